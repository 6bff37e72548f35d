"""The placement of a recipe, and the memory of packed weights and of other policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ludus.config.load import load_config
from ludus.config.schema import RunConfig
from ludus.diagnostics.memory import Memory
from ludus.diagnostics.placement import placement
from ludus.models.build import qwen3

RECIPES = Path(__file__).parents[2] / "recipes"


def recipe(name: str, *changes: str) -> RunConfig:
    config = load_config(str(RECIPES / f"{name}.yaml"), list(changes))
    assert isinstance(config, RunConfig)
    return config


def rows(config: RunConfig) -> dict[str, str]:
    heading, *lines = placement(config)
    assert heading == "placement"
    return {line[2:16].strip(): line[16:].strip() for line in lines}


def test_two_policies_on_one_gpu() -> None:
    found = rows(recipe("cuda-qwen3-4b"))
    assert found["learner"] == ("cuda: policy, optimiser (adapters of rank 32 on a base in 4 bits)")
    assert found["sampler"].startswith("cuda, in turn with the learner, on an unpacked copy")
    assert found["reference"].startswith("none")
    assert (
        "kernels at once in the sandbox, timed on a GPU where there is one"
        in (found["environment"])
    )


def test_the_reference_of_adapters_is_the_model_without_them() -> None:
    kl = "rl.algorithm={name: grpo, args: {kl_coefficient: 0.01}}"
    assert rows(recipe("cuda-qwen3-4b", kl))["reference"].endswith("no copy")
    assert rows(recipe("babyai-tiny", kl))["reference"] == "cpu: a copy of the policy as RL begins"


@pytest.mark.parametrize(("colocated", "gpus"), [("false", "5"), ("true", "2")])
def test_a_ray_cluster(colocated: str, gpus: str) -> None:
    samplers = "2" if colocated == "true" else "3"
    found = rows(
        recipe(
            "cuda-qwen3-4b-kevin",
            "model.lora.quantise=null",
            "backend.name=ray",
            "backend.args.learner_ranks=2",
            f"backend.args.samplers={samplers}",
            "backend.args.env_workers=4",
            f"backend.args.colocated={colocated}",
        )
    )
    assert found["learner"].startswith("2 ranks, a GPU each")
    assert found["samplers"].startswith(f"{samplers} processes")
    assert found["environment"].startswith("4 workers: cuda, ")
    assert found["GPUs"] == gpus


def test_several_policies_on_a_ray_cluster() -> None:
    found = rows(recipe("cuda-qwen3-4b", "backend.name=ray", "backend.args.samplers=2"))
    assert found["learner"] == (
        "1 rank of each policy, a GPU each: policy, optimiser (adapters of rank 32 on a base in 4 "
        "bits)"
    )
    assert found["samplers"] == "2 processes of each policy, a GPU each"
    assert found["GPUs"] == "6"


def test_older_versions_on_a_ray_cluster() -> None:
    changes = [
        "roles.opponent=old",
        "policies={old: {past: {most: 3}}}",
        "model.device=cuda",
        "backend.name=ray",
        "backend.args.fixed_samplers=2",
    ]
    found = rows(recipe("tictactoe-tiny", *changes))
    assert found["policy old"] == "2 processes for each of 3 older versions, a GPU each"
    assert found["GPUs"] == "8"


def test_a_host_places_its_parts_itself() -> None:
    assert placement(recipe("babyai-tiny", "backend=verl")) == []


def test_packed_weights_and_other_policies_count() -> None:
    shape: Any = qwen3(vocab_size=1000, context_length=64)

    def parts(*changes: str) -> dict[str, float]:
        memory = Memory(recipe("cuda-qwen3-4b", *changes), shape)
        return memory.parts(1_000_000, 10_000, linear=800_000)

    packed, plain = parts(), parts("model.lora.quantise=null")
    assert packed["weights"] == pytest.approx(200_000 * 2 + 800_000 * 0.516)
    assert packed["sampler's weights"] == 2_000_000
    assert plain["weights"] == 2_000_000
    assert "sampler's weights" not in plain
    assert plain["other policies"] == 10_000 * (4 + 8 + 4)
    assert packed["other policies"] == plain["other policies"] + 2_000_000
    alone = parts("policies={}", "roles={generator: policy, optimiser: policy}")
    assert "other policies" not in alone
