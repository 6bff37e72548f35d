"""The algorithm, sink and back end that the docs show work as plug-ins."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch

import ludus
from ludus.backends import BACKENDS
from ludus.backends.base import Backend
from ludus.backends.conformance import CHECKS, Check
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError
from ludus.core.types import Group, Segment, Spec, Task, Trajectory
from ludus.models.build import build_model
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.telemetry.sinks import build_sinks
from ludus.train import ALGORITHMS
from ludus.train.algorithms.losses import LossInputs

DOCS = Path(ludus.__file__).parents[1] / "docs"
ARCHITECTURE = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 48}


def block(page: str, contains: str, folder: Path) -> Path:
    """Write the page's Python block with this text to a file."""
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    (code,) = [text for text in blocks if contains in text]
    path = folder / "plugin.py"
    path.write_text(code)
    return path


def test_the_algorithm_subtracts_the_median(tmp_path: Path) -> None:
    path = block("your-own-algorithm.md", "def median_grpo", tmp_path)
    name = f"{path}:median_grpo"
    algorithm = ALGORITHMS.build(Spec(name=name, args={"clip": 0.3, "entropy_bonus": 0.001}))
    trajectories = [
        Trajectory(
            id=f"t{i}",
            group_id="g",
            task_id="a",
            segments=[Segment(-1, [5]), Segment(0, [6], [-0.5], policy_version=0)],
            reward=reward,
        )
        for i, reward in enumerate([0.0, 0.0, 1.0])
    ]
    assigned = algorithm.assign([Group("g", Task(id="a"), trajectories)])
    assert [advantage for _, advantage in assigned.pairs] == [0.0, 0.0, 1.0]
    with pytest.raises(ConfigError, match="clip"):
        ALGORITHMS.build(Spec(name=name, args={"clip": 2}))


def test_the_loss_returns_one_value_per_token(tmp_path: Path) -> None:
    path = block("your-own-algorithm.md", "def plain_reinforce", tmp_path)
    plain_reinforce = ALGORITHMS.load(f"{path}:plain_reinforce")
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = LossInputs(
        logprobs, torch.tensor([-1.5, -2.0]), torch.tensor([1.0, -1.0]), torch.tensor([0, 1])
    )
    output = plain_reinforce(inputs)
    assert output.loss_N.tolist() == [1.0, -2.0]
    assert output.metrics["log_ratio"].tolist() == [0.5, 0.0]


def test_the_sink_writes_and_rewinds(tmp_path: Path) -> None:
    path = block("metrics.md", "class CsvSink", tmp_path)
    spec = {"name": f"{path}:CsvSink", "args": {"file": "table.csv"}}
    (sink,) = build_sinks(run_config(metrics=[spec]), tmp_path)
    for step in range(3):
        sink.log("rl", step, {"rollout/reward": 0.5}, 0.0)
    sink.rewind({"rl": 1})
    sink.close()
    table = (tmp_path / "table.csv").read_text().split()
    assert table == ["rl,0,rollout/reward,0.5", "rl,1,rollout/reward,0.5"]
    assert sink.error is None


def run_config(**changes: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {
                "architecture": {"name": "qwen3", "args": ARCHITECTURE},
                "tokenizer": "words",
                "context_length": 48,
            },
            "tasks": {"train": "env"},
            "rollout": {"max_tokens_per_turn": 8},
            **changes,
        }
    )


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_back_end_conforms(check: Check, tmp_path: Path) -> None:
    path = block("training.md", "class WeightNorm", tmp_path)
    renderer = Renderer(train_tokenizer(Spec(name="words"), ["go left", "go right", "stop here"]))

    def make(folder: Path) -> Backend:
        config = run_config(backend=f"{path}:WeightNorm")
        make_model = partial(build_model, config.model, renderer.tokenizer, seed=1)
        return BACKENDS.build(
            config.backend, make_model=make_model, renderer=renderer, config=config, run_dir=folder
        )

    await check(make, tmp_path)
