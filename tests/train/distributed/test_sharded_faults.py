"""Faults of ranks: the same error on all ranks, which names the rank; nobody waits for ever."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from sharded import RankPool, groups, iterate, run_config, settings, sharded_trainer, world
from torch.distributed.distributed_c10d import _set_pg_timeout

from ludus.core.errors import CheckpointError, ConfigError, LudusError
from ludus.core.types import Sample
from ludus.train import ALGORITHMS
from ludus.train.batches.samples import to_samples
from ludus.train.checkpoint.listing import check
from ludus.train.distributed import Rank, ShardedTrainer, ShardSettings, open_listener, saving
from ludus.train.distributed.parallel import check_model
from ludus.train.distributed.settings import check_supported

GRPO = ALGORITHMS.build("grpo")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(3)
    yield pool
    pool.close()


def samples() -> list[Sample]:
    return to_samples(GRPO.assign(groups(0)))


def error_of(trainer: ShardedTrainer, given: list[Sample], *after: Any) -> str:
    """The kind and text of the error of a training step."""
    try:
        trainer.train(given, GRPO, 0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def train_on_nan(rank: Rank, folder: Path) -> Any:
    with sharded_trainer(rank, run_config(), folder) as trainer:
        trainer.begin_stage(settings(), GRPO)
        iterate(trainer, GRPO, [0])
        before = trainer.group.share([p.clone() for p in trainer.learner.parameters])
        bad = [replace(s, advantages=[math.nan] * len(s.token_ids)) for s in samples()[:1]]
        text = error_of(trainer, [*bad, *samples()[1:]])
        after = trainer.group.share([p.clone() for p in trainer.learner.parameters])
        same = all(
            bool((a == b).all()) for x, y in zip(before, after, strict=True)
            for a, b in zip(x, y, strict=True)
        )  # fmt: skip
        return text, same, iterate(trainer, GRPO, [1])


def test_a_loss_that_is_not_finite_stops_all_ranks_alike(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(2, train_on_nan, tmp_path)
    texts = {text for text, _, _ in found}
    assert len(texts) == 1
    assert "optimizer step 1: the loss of rank" in texts.pop()
    assert all(same for _, same, _ in found)
    assert found[0][2] == found[1][2]  # the ranks go on
    assert sorted(p.name for p in (tmp_path / "failed-batch-000001").iterdir())


def train_on_long(rank: Rank, folder: Path) -> Any:
    with sharded_trainer(rank, run_config(), folder) as trainer:
        trainer.begin_stage(settings(tokens_per_batch=20), GRPO)
        return error_of(trainer, samples()), trainer.broken


def test_a_sample_that_does_not_fit_is_refused_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(2, train_on_long, tmp_path)
    assert found[0] == found[1]
    assert "ConfigError: " in found[0][0]
    assert "rl.tokens_per_batch" in found[0][0]
    assert not found[0][1]


def fail_in_a_layer(rank: Rank, folder: Path, backward: bool) -> Any:
    with sharded_trainer(rank, run_config(), folder) as trainer:
        trainer.begin_stage(settings(), GRPO)
        if rank.rank == 1:

            def fail(*_: Any) -> None:
                raise RuntimeError("DefaultCPUAllocator: not enough memory: out of memory")

            layer = trainer.model.model.layers[1]
            hook = layer.register_full_backward_hook if backward else layer.register_forward_hook
            hook(fail)
        text = error_of(trainer, samples())
        return text, error_of(trainer, samples()), trainer.broken


@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_that_fails_in_a_pass_tells_the_others(
    pool: RankPool, tmp_path: Path, backward: bool
) -> None:
    first, failing, third = pool.run(3, fail_in_a_layer, tmp_path, backward)
    assert failing[0].startswith("RuntimeError: DefaultCPUAllocator")
    reason = "OtherRankLost: rank 1 of 3 left: RuntimeError: DefaultCPUAllocator: not enough memory"
    for text, again, broken in (first, third):
        assert text.startswith(reason)  # and not "no answer"
        assert broken
        assert "has lost the other ranks: rank 1 of 3 left" in again


def be_late(rank: Rank, folder: Path) -> Any:
    with sharded_trainer(rank, run_config(), folder) as trainer:
        trainer.begin_stage(settings(), GRPO)
        trainer.group.share(None)
        if rank.rank == 1:
            time.sleep(8)
            return None
        trainer.group.timeout_s = 2.0
        _set_pg_timeout(timedelta(seconds=2), trainer.group._control)
        return error_of(trainer, samples())


def test_a_rank_that_does_not_answer_is_named(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(2, be_late, tmp_path)
    assert found[0] == "OtherRankLost: no answer from rank 1 of 2 for 2 s"


def die(rank: Rank, folder: Path) -> Any:
    with sharded_trainer(rank, run_config(), folder) as trainer:
        trainer.begin_stage(settings(), GRPO)
        if rank.rank == 1:
            os._exit(9)
        return error_of(trainer, samples())


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    pool = RankPool(2)
    found = pool.outcomes(2, die, tmp_path)
    pool.close()
    reason = "rank 1 of 2 closed the connection: it ended, or was killed"
    assert found == [f"OtherRankLost: {reason}", None]


def stay_away(rank: Rank, folder: Path) -> Any:
    if rank.rank:
        return None
    try:
        with sharded_trainer(rank, run_config(), folder, timeout_s=1.0):
            return None
    except LudusError as error:
        return str(error)


def test_ranks_that_do_not_come_are_named(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(3, stay_away, tmp_path)
    assert "rank 0 of 3: ranks 1, 2 did not come to" in found[0]


def save_badly(rank: Rank, folder: Path) -> Any:
    """The second of three checkpoints fails on rank 1."""
    with sharded_trainer(rank, run_config(), folder) as trainer:
        trainer.begin_stage(settings(), GRPO)
        iterate(trainer, GRPO, [0])
        trainer.save("rl", 1, {}, None, policy_version=1, pin=False, wait=True)
        plain = saving._compare
        if rank.rank == 1:

            def full(*_: Any) -> None:
                raise OSError(28, "No space left on device")

            saving._compare = full
        trainer.save("rl", 2, {}, None, policy_version=1, pin=False)
        trainer._saving.join()
        try:
            trainer.score(groups(0), GRPO)
        except CheckpointError as error:
            text = str(error)
        saving._compare = plain
        iterate(trainer, GRPO, [1])
        trainer.save("rl", 3, {}, None, policy_version=2, pin=False)
    return text


def test_a_failed_write_is_reported_by_the_next_call(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(2, save_badly, tmp_path)
    assert found[0] == found[1]
    assert "rl-000002 cannot be written: rank 1: [Errno 28] No space left" in found[0]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["rl-000001", "rl-000003"]
    assert check(tmp_path / "checkpoints") == []


def save_slowly(rank: Rank, folder: Path) -> Any:
    with sharded_trainer(rank, run_config(), folder) as trainer:
        trainer.begin_stage(settings(), GRPO)
        iterate(trainer, GRPO, [0])
        plain, go_on = saving.save_shards, threading.Event()

        def slow(*args: Any, **options: Any) -> Any:
            go_on.wait()
            return plain(*args, **options)

        saving.save_shards = slow
        path = trainer.save("rl", 1, {}, None, policy_version=1, pin=False)
        iterate(trainer, GRPO, [1])
        early = path.exists()
        go_on.set()
        trainer.finish_save()
        saving.save_shards = plain
        return early, path.exists()


def test_training_goes_on_while_a_checkpoint_is_written(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, save_slowly, tmp_path) == [(False, True)] * 2


def load_wrong(rank: Rank, folder: Path, path: Path) -> Any:
    with sharded_trainer(rank, run_config(), folder) as trainer:
        trainer.begin_stage(settings(), GRPO)
        try:
            trainer.load(path)
        except CheckpointError as error:
            return str(error), len(iterate(trainer, GRPO, [0]))
        return None


def test_a_missing_checkpoint_changes_nothing(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(2, load_wrong, tmp_path, tmp_path / "rl-000007")
    assert found[0] == found[1]
    assert "rl-000007" in found[0][0]
    assert found[0][1] == 1


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"verify": True}, "verify: true is not supported by a sharded learner"),
        ({"learner": {"compile": True}}, "learner.compile: true is not supported"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        check_supported(run_config(**changes), ShardSettings(), 2)


def test_shard_settings_check_themselves() -> None:
    with pytest.raises(ConfigError, match="cpu_offload: true is not supported"):
        check_supported(run_config(), ShardSettings(cpu_offload=True), 2)
    with pytest.raises(ConfigError, match=r"tensor_parallel: 2 does not divide .* ranks, 3"):
        check_supported(run_config(), ShardSettings(tensor_parallel=2), 3)
    with pytest.raises(ConfigError, match="lora with tensor_parallel: 2 is not supported"):
        check_supported(run_config(model={"lora": {}}), ShardSettings(tensor_parallel=2), 2)
    with pytest.raises(ConfigError, match=r"tensor_parallel: 3 does not divide .*heads, 2"):
        check_model(world(run_config())[0](), 3)
    with pytest.raises(ValidationError, match="tensor_parallel"):
        ShardSettings(tensor_parallel=0)
    with pytest.raises(ConfigError, match="its address is HOST:PORT"):
        Rank(0, 2, "nowhere")
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        Rank(2, 2, "127.0.0.1:1")


def test_the_port_at_which_ranks_meet_is_held_from_the_start() -> None:
    """A port that was only found free was another program's once, minutes later."""
    listener, address = open_listener()
    with listener, pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", Rank(0, 2, address).port))
