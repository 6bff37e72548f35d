"""Loss and advantages are tried on made-up tokens and episodes before demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ludus.config.schema import RunConfig
from ludus.pipeline.preflight.algorithm import try_advantages, try_loss
from ludus.pipeline.preflight.limits import Findings
from ludus.train import ALGORITHMS

OWN = """
from dataclasses import replace
import torch
from ludus.train.algorithms.losses import LossOutput
from ludus.train import ALGORITHMS

def raises(inputs):
    return inputs.no_such_field

def mean(inputs):
    return LossOutput(-(inputs.logprobs_N * inputs.advantages_N).mean())

def constant(inputs):
    return LossOutput(-inputs.logprobs_N.detach())

def silent(inputs):
    return LossOutput(-inputs.logprobs_N * inputs.advantages_N)

def of(loss):
    return replace(ALGORITHMS.build("grpo"), name="own", loss=loss)

def earning(value):
    each = lambda groups: [[value(earned) for earned in group] for group in groups]
    return replace(ALGORITHMS.build("grpo"), name="own", advantages=each)

def keeping(keep): return replace(ALGORITHMS.build("grpo"), name="own", keep=keep)
def crashing(): return earning(lambda earned: earned.reward)
def short(): return replace(earning(id), advantages=lambda groups: [[0.0] for group in groups])
def huge(): return earning(lambda earned: 10**400)
def many(): return keeping(lambda rewards: sorted(rewards)[7] > 0)
def parsing(): return earning(lambda earned: int(earned.trajectory.segments[1].message.content))
def array(): return keeping(lambda rewards: torch.tensor(rewards) > 0)
def failing(): return earning(lambda earned: -earned.total)
def equal(): return earning(lambda earned: 0.0)
def dividing(): return earning(lambda earned: 1.0 / earned.total)
def infinite(): return earning(lambda earned: earned.total * float("inf"))
def measuring(): return earning(lambda earned: earned.trajectory.metrics["steps"])
def choosing(): return keeping(lambda rewards: rewards.mean() > 0)
def sound(): return earning(lambda earned: earned.total)

def raising(): return of(raises)
def meaning(): return of(mean)
def constantly(): return of(constant)
def silently(): return of(silent)
"""


def config(algorithm: Any, **optimizer: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "tried",
            "model": {"architecture": "qwen3", "tokenizer": "words", "context_length": 512},
            "env": "babyai",
            "tasks": {"train": {"name": "env", "args": {"num_tasks": 4}}},
            "rollout": {"max_tokens_per_turn": 8},
            "rl": {"steps": 1, "minibatches": 2, "algorithm": algorithm, "optimizer": optimizer},
        }
    )


@pytest.mark.parametrize("name", [n for n in ALGORITHMS.names() if n != "sft"])
def test_ready_made_losses_pass(name: str) -> None:
    assert list(try_loss(config(name))) == []


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("raising", "no_such_field"),
        ("meaning", "returned a loss of shape []; it has to return"),
        ("constantly", "a loss without a gradient"),
        ("silently", ""),
    ],
)
def test_a_loss_of_ones_own_is_tried(tmp_path: Path, function: str, told: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    faults = list(try_loss(config(f"{file}:{function}")))
    assert len(faults) == bool(told), faults
    assert told in "".join(faults)


def test_a_target_of_kl_that_the_loss_does_not_measure_is_told(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    [fault] = try_loss(config(f"{file}:silently", target_kl=0.01))
    assert fault.startswith("rl.optimizer.target_kl has no effect")


@pytest.mark.parametrize("name", [n for n in ALGORITHMS.names() if n != "sft"])
def test_ready_made_advantages_pass(name: str) -> None:
    found = Findings()
    try_advantages(config(name), found)
    assert (found.faults, found.notes) == ([], [])


@pytest.mark.parametrize(
    ("function", "faults", "notes"),
    [
        ("crashing", ["`advantages` raised AttributeError: 'Earned' object has no attribute"], []),
        ("short", ["`advantages` returned [0.0] for the 8 trajectories of group made-up/g0"], []),
        ("huge", ["`advantages` returned 1000", "int too large to convert to float"], []),
        ("array", ["Boolean value of Tensor with more than one value is ambiguous"], []),
        ("many", [], []),
        ("failing", [], ["get an advantage of -1, those of 0 one of 0, so the policy learns to f"]),
        ("equal", [], ["episodes with a reward of 1 get the same advantage as those of 0"]),
        ("parsing", [], ["`advantages` raised ValueError: invalid literal for int()"]),
        ("dividing", [], ["`advantages` raised ZeroDivisionError", "float division by zero"]),
        ("infinite", ["`advantages` of own returned nan for trajectory made-up/g0/0"], []),
        (
            "measuring",
            [],
            ["`advantages` raised KeyError: 'steps'", "go on if real episodes have what"],
        ),
        ("choosing", ["`keep` raised AttributeError: 'list' object has no attribute 'mean'"], []),
        ("sound", [], []),
    ],
)
def test_advantages_of_ones_own_are_tried(
    tmp_path: Path, function: str, faults: list[str], notes: list[str]
) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    found = Findings()
    try_advantages(config(f"{file}:{function}"), found)
    for told, parts in ((found.faults, faults), (found.notes, notes)):
        assert len(told) == bool(parts), told
        assert all(part in "".join(told) for part in parts), told
        assert all("made-up episodes of two turns" in line for line in told)
