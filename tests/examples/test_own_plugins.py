"""The plug-ins that the docs show work: each kind that has a page."""

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
from ludus.core.errors import ConfigError, DataError
from ludus.core.types import Group, Segment, Spec, Task, Trajectory
from ludus.models.build import build_model
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.tasks.readers import read_tasks
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


def test_the_reader_reads_a_table(tmp_path: Path) -> None:
    path = block("your-own-plugins.md", "def questions", tmp_path)
    table = tmp_path / "train.csv"
    table.write_text("question,answer,year\nHow many?,7,1999\nWhere?,here,\n")
    spec = Spec(name=f"{path}:questions", args={"path": str(table)})
    first, second = read_tasks(spec, "tasks.train")
    assert (first.id, first.prompt[0].content, first.answer) == ("row-1", "How many?", "7")
    assert second.data == {"year": ""}
    table.write_text("question,answer\n,7\n")
    with pytest.raises(DataError, match=r"row 1: the column 'question' is empty"):
        read_tasks(spec, "tasks.train")


def test_the_tokenizer_has_a_token_per_character(tmp_path: Path) -> None:
    path = block("your-own-plugins.md", "def characters", tmp_path)
    spec = Spec(name=f"{path}:characters", args={"min_count": 2})
    tokenizer = train_tokenizer(spec, ["go left", "got\nlost"])
    assert tokenizer.decode(tokenizer.encode("lo\ngo t")) == "lo<unk>go t"
    assert [tokenizer.decode([id]) for id in tokenizer.encode("tog")] == ["t", "o", "g"]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_sampler_conforms(check: Check, tmp_path: Path) -> None:
    path = block("your-own-plugins.md", "class PlainSampler", tmp_path)
    await check(partial(made, sampler=f"{path}:PlainSampler"), tmp_path)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_back_end_conforms(check: Check, tmp_path: Path) -> None:
    path = block("training.md", "class WeightNorm", tmp_path)
    await check(partial(made, backend=f"{path}:WeightNorm"), tmp_path)


def made(folder: Path, **changes: object) -> Backend:
    """A back end with these settings, in a folder."""
    renderer = Renderer(train_tokenizer(Spec(name="words"), ["go left", "go right", "stop here"]))
    config = run_config(**changes)
    make_model = partial(build_model, config.model, renderer.tokenizer, seed=1)
    built: Backend = BACKENDS.build(
        config.backend, make_model=make_model, renderer=renderer, config=config, run_dir=folder
    )
    return built
