"""Several ranks train as the local trainer does: losses, gradients and weights up to rounding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded import (
    RankPool,
    groups,
    iterate,
    local_trainer,
    run_config,
    scored,
    settings,
    sharded_trainer,
    state_of,
)

from ludus.config.schema import RunConfig
from ludus.config.training import RLOptimizerConfig
from ludus.core.types import Group, Spec
from ludus.models.build import merge_lora
from ludus.train import ALGORITHMS
from ludus.train.batches.minibatches import TrainSettings
from ludus.train.batches.samples import to_samples
from ludus.train.distributed import Rank
from ludus.train.trainer import Trainer

TOLERANCE = 1e-5
OWN = {"train/padding", "train/unique_tokens"}
"""Depend on the split: a cut tree computes its prefix twice."""


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


def train(
    rank: Rank, config: RunConfig, spec: Spec, stage: TrainSettings, folder: Path, ways: int = 1
) -> Any:
    """Returns metrics of two iterations, the weights after them, and the scores of a third."""
    with sharded_trainer(rank, config, folder, tensor_parallel=ways) as trainer:
        algorithm = ALGORITHMS.build(spec)
        trainer.begin_stage(stage, algorithm)
        metrics = iterate(trainer, algorithm, [0, 1])
        return metrics, state_of(trainer), scored(trainer, algorithm, 2)


def train_locally(config: RunConfig, spec: Spec, stage: TrainSettings, folder: Path) -> Any:
    trainer = local_trainer(config, folder)
    algorithm = ALGORITHMS.build(spec)
    trainer.begin_stage(stage, algorithm)
    metrics = iterate(trainer, algorithm, [0, 1])
    return metrics, state_of(trainer), scored(trainer, algorithm, 2)


def require_equal(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - OWN:
            assert ours[name] == pytest.approx(theirs[name], rel=TOLERANCE, abs=TOLERANCE), name
    for name, tensor in found[1].items():
        torch.testing.assert_close(tensor, expected[1][name], rtol=TOLERANCE, atol=TOLERANCE)
    for field in ("learner_logprobs", "ref_logprobs", "values", "entropies"):
        ours, theirs = (fields(done[2], field) for done in (found, expected))
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4), field


def fields(groups: list[Group], name: str) -> list[float]:
    segments = [s for g in groups for t in g.trajectories for s in t.segments]
    return [x for s in segments for x in getattr(s, name) or []]


def test_two_ranks_train_as_one_does(pair: RankPool, tmp_path: Path) -> None:
    """With a critic, token trees, two minibatches; and the weights that samplers get."""
    config, spec, stage = run_config(), Spec(name="ppo"), settings(minibatches=2)
    expected = train_locally(config, spec, stage, tmp_path)
    for found in pair.run(2, train, config, spec, stage, tmp_path):
        require_equal(found, expected)


CASES: dict[str, tuple[Spec, dict[str, Any], dict[str, Any]]] = {
    "minibatches and epochs": (Spec(name="grpo"), {}, {"minibatches": 2, "epochs": 2}),
    "a rate that follows KL": (
        Spec(name="grpo"), {},
        {"minibatches": 3, "optimizer": RLOptimizerConfig(lr=1e-2, target_kl=1e-5)},
    ),
    "one ratio a trajectory": (Spec(name="gspo"), {}, {"tokens_per_batch": 32}),
    "whole trajectories in one row": (Spec(name="gspo_token"), {}, {"tokens_per_batch": 32}),
    "a critic": (Spec(name="ppo"), {}, {}),
    "a copied reference": (Spec(name="grpo", args={"kl_coefficient": 0.1}), {}, {}),
    "a reference in the reward": (
        Spec(name="grpo", args={"kl_coefficient": 0.1, "kl_in": "reward"}), {}, {},
    ),
    "importance ratios": (Spec(name="grpo", args={"importance_cap": 2.0}), {}, {}),
    "adapters": (Spec(name="grpo"), {"model": {"lora": {"rank": 2}}}, {}),
    "adapters and a reference": (
        Spec(name="grpo", args={"kl_coefficient": 0.1}), {"model": {"lora": {"rank": 2}}}, {},
    ),
    "adapters of the head": (
        Spec(name="grpo"), {"model": {"lora": {"rank": 2, "targets": ["q_proj", "lm_head"]}},
                            "shape": {"tie_embeddings": False}}, {},
    ),
    "llama, untied": (
        Spec(name="dapo"), {"architecture": "llama", "shape": {"tie_embeddings": False}}, {},
    ),
    "checkpointed": (Spec(name="grpo"), {"learner": {"gradient_checkpointing": True}}, {}),
    "no trees": (Spec(name="grpo"), {"learner": {"share_prefixes": False}}, {}),
    "fewer trajectories than ranks": (Spec(name="grpo"), {}, {"minibatches": 6}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_one_does(pool: RankPool, tmp_path: Path, case: str) -> None:
    spec, changes, stage_changes = CASES[case]
    config, stage = run_config(**changes), settings(**stage_changes)
    expected = train_locally(config, spec, stage, tmp_path / "local")
    for size in (1, 2, 4):
        found = pool.run(size, train, config, spec, stage, tmp_path / f"{size}")
        require_equal(found[0], expected)


HALF: dict[str, dict[str, Any]] = {
    "adapters of bfloat16": {"model": {"dtype": "bfloat16", "lora": {"rank": 2}}},
    "stochastic rounding": {
        "model": {"dtype": "bfloat16"}, "learner": {"master_weights": "stochastic_rounding"},
    },
    "autocast": {"learner": {"dtype": "bfloat16"}},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", HALF)
def test_half_precision_is_near(pool: RankPool, tmp_path: Path, case: str) -> None:
    config, stage = run_config(**HALF[case]), settings()
    expected = train_locally(config, Spec(name="grpo"), stage, tmp_path / "local")
    found = pool.run(4, train, config, Spec(name="grpo"), stage, tmp_path)[0]
    for ours, theirs in zip(found[0], expected[0], strict=True):
        for name in ("train/loss", "train/grad_norm", "train/entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=0.05, abs=0.02), name
    for name, tensor in found[1].items():
        torch.testing.assert_close(tensor, expected[1][name], rtol=0.02, atol=0.02)


SHARED = ["minibatches and epochs", "one ratio a trajectory", "a critic", "a copied reference",
          "llama, untied", "checkpointed"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARED)
def test_ranks_that_share_matrices_train_as_one_does(
    pool: RankPool, tmp_path: Path, case: str
) -> None:
    spec, changes, stage_changes = CASES[case]
    config, stage = run_config(**changes), settings(**stage_changes)
    expected = train_locally(config, spec, stage, tmp_path / "local")
    for size in (2, 4):
        found = pool.run(size, train, config, spec, stage, tmp_path / f"{size}", 2)
        require_equal(found[0], expected)


def one_gradient(rank: Rank, config: RunConfig, folder: Path) -> Any:
    with sharded_trainer(rank, config, folder, reshard_after_forward=rank.world_size == 2) as t:
        t.begin_stage(settings(), GRPO)
        batch, _ = t._own_batch(to_samples(GRPO.assign(groups(0))), GRPO)
        t.learner.forward_backward(batch, GRPO.loss)
        parts = {n: p.grad.clone() for n, p in t.learner.parts.named_parameters()}
        return t.group.share(parts)


GRPO = ALGORITHMS.build("grpo")


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradients_are_those_of_one_rank(pool: RankPool, tmp_path: Path, size: int) -> None:
    trainer = local_trainer(run_config(), tmp_path)
    trainer.begin_stage(settings(), GRPO)
    expected = gradients(trainer)
    parts = pool.run(size, one_gradient, run_config(), tmp_path)[0]
    for name, grad in expected.items():
        found = torch.cat([part[name] for part in parts])
        assert (found - grad).abs().max() <= TOLERANCE * grad.abs().max(), name


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    from ludus.train.batches.minibatches import to_batch

    samples = to_samples(GRPO.assign(groups(0)))
    batch = to_batch(samples, GRPO, 64, 0, trainer.learner.forward.layout)
    trainer.learner.forward_backward(batch, GRPO.loss)
    return {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}


def published(rank: Rank, config: RunConfig, folder: Path) -> Any:
    with sharded_trainer(rank, config, folder) as trainer:
        trainer.begin_stage(settings(), GRPO)
        iterate(trainer, GRPO, [0])
        plain = list(trainer.weights(3000))
        return plain, {n: t for b in trainer.weights(1 << 20, merged=True) for n, t in b.items()}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_weights_are_published_in_buckets(pool: RankPool, tmp_path: Path, lora: bool) -> None:
    changes: dict[str, Any] = {"model": {"lora": {"rank": 2}}} if lora else {}
    config = run_config(**changes)
    trainer = local_trainer(config, tmp_path)
    trainer.begin_stage(settings(), GRPO)
    iterate(trainer, GRPO, [0])
    trained = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    merged = merge_lora(trainer.model)
    whole = dict(merged.named_parameters())
    for plain, all_merged in pool.run(4, published, config, tmp_path):
        for bucket in plain:
            assert len(bucket) == 1 or sum(t.nbytes for t in bucket.values()) <= 3000
        joined = {n: t for bucket in plain for n, t in bucket.items()}
        assert list(joined) == list(trained)
        assert joined.keys() == trained.keys()
        assert all_merged.keys() == whole.keys()
        for found, expected in ((joined, trained), (all_merged, whole)):
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, expected[name].detach(), rtol=0, atol=1e-5)
