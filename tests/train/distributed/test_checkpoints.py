"""Sharded checkpoints: read by the local trainer and by any number of ranks, and the other way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sharded import (
    RankPool,
    iterate,
    local_trainer,
    run_config,
    settings,
    sharded_trainer,
    state_of,
    world,
)
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM

from ludus.config.load import dump_config
from ludus.config.schema import RunConfig
from ludus.core.errors import CheckpointError
from ludus.core.types import Spec
from ludus.pipeline.evaluation.evaluate import export_checkpoint
from ludus.train import ALGORITHMS
from ludus.train.checkpoint.listing import check
from ludus.train.checkpoint.manifest import file_sha256, manifest_sha256
from ludus.train.distributed import Rank
from ludus.train.trainer import Restored

RESTORED = Restored(2, {"cursor": [1]})
CASES: dict[str, tuple[Spec, dict[str, Any]]] = {
    "a reference": (Spec(name="grpo", args={"kl_coefficient": 0.1}), {}),
    "a critic": (Spec(name="ppo"), {"shape": {"tie_embeddings": False}}),
    "adapters": (Spec(name="grpo"), {"model": {"lora": {"rank": 2}}}),
    "dropout": (Spec(name="grpo"), {"model": {"lora": {"rank": 2, "dropout": 0.2}}}),
    "bfloat16": (Spec(name="grpo"), {"model": {"dtype": "bfloat16"}}),
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


def save(rank: Rank, config: RunConfig, spec: Spec, folder: Path, ways: int = 1) -> Any:
    """Returns the checkpoint of two steps, and metrics and weights two steps later."""
    with sharded_trainer(rank, config, folder, tensor_parallel=ways) as trainer:
        algorithm = ALGORITHMS.build(spec)
        trainer.begin_stage(settings(), algorithm)
        iterate(trainer, algorithm, [0, 1])
        path = trainer.save("rl", 2, {"cursor": [1]}, 0.5, policy_version=2, pin=False)
        return path, iterate(trainer, algorithm, [2, 3]), state_of(trainer)


def resume(
    rank: Rank, config: RunConfig, spec: Spec, folder: Path, path: Path, ways: int = 1
) -> Any:
    with sharded_trainer(rank, config, folder, tensor_parallel=ways) as trainer:
        algorithm = ALGORITHMS.build(spec)
        trainer.begin_stage(settings(), algorithm)
        iterate(trainer, algorithm, [5])  # what it did before it loads does not matter
        assert trainer.load(path) == RESTORED
        return path, iterate(trainer, algorithm, [2, 3]), state_of(trainer)


def locally(config: RunConfig, spec: Spec, folder: Path, path: Path | None = None) -> Any:
    trainer = local_trainer(config, folder)
    algorithm = ALGORITHMS.build(spec)
    trainer.begin_stage(settings(), algorithm)
    if path is None:
        iterate(trainer, algorithm, [0, 1])
        path = trainer.save("rl", 2, {"cursor": [1]}, 0.5, policy_version=2, pin=False)
    else:
        iterate(trainer, algorithm, [5])
        assert trainer.load(path) == RESTORED
    return path, iterate(trainer, algorithm, [2, 3]), state_of(trainer)


def require_equal(found: Any, expected: Any, tolerance: float) -> None:
    skipped = {"train/padding", "train/unique_tokens"}
    for ours, theirs in zip(found[1], expected[1], strict=True):
        for name in theirs.keys() - skipped:
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), name
    for name in found[2].keys() & expected[2].keys():
        torch.testing.assert_close(found[2][name], expected[2][name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_goes_on_with_any_number_of_ranks(
    pool: RankPool, tmp_path: Path, case: str
) -> None:
    """Bit for bit with as many ranks as wrote it; else, without dropout, up to rounding."""
    spec, changes = CASES[case]
    config = run_config(**changes)
    written: dict[int, Any] = {0: locally(config, spec, tmp_path / "from-0")}
    for size in (2, 4):
        written[size] = pool.run(size, save, config, spec, tmp_path / f"from-{size}")[0]
    tolerance = 5e-2 if case == "bfloat16" else 2e-5
    for source, expected in written.items():
        for size in (0, 1, 2, 4):
            folder = tmp_path / f"{size}-after-{source}"
            reference = tmp_path / f"from-{source}" / "reference"
            if reference.exists():
                shutil.copytree(reference, folder / "reference")
            if size:
                found = pool.run(size, resume, config, spec, folder, expected[0])[0]
            else:
                found = locally(config, spec, folder, expected[0])
            if size == source or case != "dropout":
                require_equal(found, expected, 0.0 if size == source else tolerance)


def test_matrices_that_ranks_share_are_in_checkpoints(pool: RankPool, tmp_path: Path) -> None:
    spec, config = Spec(name="ppo"), run_config()
    expected = pool.run(4, save, config, spec, tmp_path / "a", 2)[0]
    path = expected[0]
    assert check(path) == []
    require_equal(locally(config, spec, tmp_path / "b", path), expected, 2e-5)
    require_equal(pool.run(2, resume, config, spec, tmp_path, path)[0], expected, 2e-5)
    require_equal(pool.run(2, resume, config, spec, tmp_path, path, 2)[0], expected, 2e-5)
    require_equal(pool.run(4, resume, config, spec, tmp_path, path, 2)[0], expected, 0.0)
    whole = locally(config, spec, tmp_path / "c")
    require_equal(pool.run(4, resume, config, spec, tmp_path, whole[0], 2)[0], whole, 2e-5)


@pytest.fixture
def checkpoint(pool: RankPool, tmp_path: Path) -> Path:
    """Of two ranks."""
    path: Path = pool.run(2, save, run_config(), Spec(name="grpo"), tmp_path)[0][0]
    return path


def test_a_sharded_checkpoint_is_checked(checkpoint: Path) -> None:
    assert check(checkpoint) == []
    assert not list(checkpoint.glob("*.distcp"))  # no pickle
    (checkpoint / "shard-00002-model-00001-of-00002.safetensors").unlink()
    assert "bytes expected" in str(check(checkpoint)[0])


def test_shards_that_lack_rows_are_named(checkpoint: Path) -> None:
    """Also where the manifest agrees with the files: a writer's fault."""
    path = checkpoint / "shard-00002-model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes())
    tensors = load_file(path)
    del tensors["model/model.norm.weight"]
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    save_file(tensors, path, header["__metadata__"])
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][path.name] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
    manifest["sha256"] = manifest_sha256(manifest)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert [p.detail for p in check(checkpoint)] == [
        "model.norm.weight: float32[16] in the shards, float32[32] expected"
    ]
    trainer = local_trainer(run_config(), checkpoint.parent)
    with pytest.raises(CheckpointError, match=r"shards is missing: model\.norm\.weight"):
        trainer.load_weights(checkpoint)


def test_shards_are_exported_as_one_model(pool: RankPool, tmp_path: Path) -> None:
    config, run = run_config(model={"chat_template": "plain"}), tmp_path / "run-1"
    run.mkdir()
    (run / "config.yaml").write_text(dump_config(config))
    world(config)[1].save_pretrained(run / "tokenizer")
    pool.run(2, save_last, config, run)
    trainer = local_trainer(config, tmp_path / "local")
    trainer.begin_stage(settings(), ALGORITHMS.build("grpo"))
    iterate(trainer, ALGORITHMS.build("grpo"), [0])
    path = tmp_path / "hf"
    export_checkpoint("run-1", str(tmp_path), "latest", path, merge=True, overwrite=False)
    exported = AutoModelForCausalLM.from_pretrained(path)
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(
            exported.get_parameter(name), parameter, rtol=0, atol=1e-5, check_dtype=True
        )


def save_last(rank: Rank, config: RunConfig, folder: Path) -> None:
    with sharded_trainer(rank, config, folder) as trainer:
        trainer.begin_stage(settings(), ALGORITHMS.build("grpo"))
        iterate(trainer, ALGORITHMS.build("grpo"), [0])
        trainer.save("rl", 1, {}, None, policy_version=1, pin=False)


def test_dcp_reads_the_shards(checkpoint: Path) -> None:
    """Other tools can: the format is DCP's own."""
    found = HuggingFaceStorageReader(str(checkpoint)).read_metadata().state_dict_metadata
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name, layout in manifest["model"]["tensors"].items():
        assert layout == f"float32{list(found[f'model/{name}'].size)}"


def test_a_checkpoint_of_another_model_is_refused(checkpoint: Path, pool: RankPool) -> None:
    with pytest.raises(CheckpointError, match="is a checkpoint of another model"):
        local_trainer(run_config(shape={"num_layers": 1}), checkpoint).load_weights(checkpoint)
    config = run_config(shape={"num_layers": 1})
    args = (config, Spec(name="grpo"), checkpoint.parent, checkpoint)
    outcomes = pool.outcomes(2, resume, *args)
    assert all(isinstance(outcome, CheckpointError) for outcome in outcomes)
    assert "is a checkpoint of another model" in str(outcomes[1])
