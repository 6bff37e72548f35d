"""A user's loss, advantages and weights that are wrong: a sentence that names them, at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ludus.core.errors import ConfigError, TrainingError
from ludus.core.types import Group, Sample, Segment, Task, Trajectory
from ludus.train.algorithms.aggregates import token_mean
from ludus.train.algorithms.base import Algorithm
from ludus.train.algorithms.credit import Outcome
from ludus.train.algorithms.losses import (
    LossInputs,
    LossOutput,
    clipped,
    computed,
    depends_on,
    require_unit,
    with_entropy_bonus,
)
from ludus.train.algorithms.terms import with_terms
from ludus.train.batches.minibatches import to_batch


def fault(*_: Any) -> Any:
    raise ValueError("my own fault")


def inputs() -> LossInputs:
    logprobs = torch.tensor([-1.0, -2.0, -1.5], requires_grad=True)
    entropy = torch.ones(3, requires_grad=True)
    zeros = torch.zeros(3)
    return LossInputs(logprobs, zeros, zeros, zeros.long(), entropy_N=entropy)


def algorithm(**own: Any) -> Algorithm:
    parts: dict[str, Any] = {
        "advantages": Outcome(list),
        "loss": clipped(0.2, 0.2),
        "aggregate": token_mean,
        "source": "own",
    }
    return Algorithm("own", **(parts | own))


def groups() -> list[Group]:
    def played(number: int) -> Trajectory:
        segments = [Segment(-1, [5]), Segment(0, [6], [-0.5], policy_version=0)]
        return Trajectory(f"t{number}", "g", "a", segments=segments, reward=float(number))

    return [Group("g", Task(id="a"), [played(0), played(1)])]


LOSSES: dict[str, tuple[Callable[[LossInputs], Any], str]] = {
    "mean": (lambda i: LossOutput(-i.logprobs_N.mean()), r"a loss of shape \[\]"),
    "column": (lambda i: LossOutput(-i.logprobs_N[:, None]), r"a loss of shape \[3, 1\]"),
    "tensor": (lambda i: -i.logprobs_N, "returned a Tensor"),
    "none": (lambda i: None, "returned a NoneType"),
    "float": (lambda i: LossOutput(3.0), "a loss that is a float"),  # type: ignore[arg-type]
    "detached": (lambda i: LossOutput(-i.logprobs_N.detach()), "a loss without a gradient"),
    "metric": (
        lambda i: LossOutput(-i.logprobs_N, {"x": torch.tensor(1.0)}),
        r"metric 'x' of shape \[\]",
    ),
    "metrics": (lambda i: LossOutput(-i.logprobs_N, None), "metrics that are a NoneType"),  # type: ignore[arg-type]
    "fault": (fault, r"raised ValueError: my own fault \[test_own_functions.py, line \d+\]"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_none_is_refused(name: str) -> None:
    """A mean, or a column, would be broadcast to all tokens and train something else."""
    loss, said = LOSSES[name]
    for wrong in (loss, with_entropy_bonus(loss, 0.1)):
        with pytest.raises(TrainingError, match=rf"^rl\.algorithm: the loss .*{said}"):
            computed(wrong, inputs())


def test_a_declared_loss_is_refused_before_its_unit_is_compared() -> None:
    with pytest.raises(TrainingError, match=r"a loss of shape \[\]; .* of shape \[3\]"):
        require_unit(depends_on("token")(lambda i: LossOutput(i.logprobs_N.mean())), inputs())


def test_a_right_loss_is_passed_on() -> None:
    for loss in (clipped(0.2, 0.2), lambda i: LossOutput(-i.logprobs_N)):
        assert computed(loss, inputs()).loss_N.shape == (3,)
    row = with_terms(algorithm(loss=lambda i: LossOutput(-i.logprobs_N)), entropy_bonus=0.1)
    assert computed(row.loss, inputs()).loss_N.tolist() == pytest.approx([0.9, 1.9, 1.4])


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"advantages": Outcome(lambda rewards: None)}, "None for the 2 rewards of a group"),  # type: ignore[arg-type,return-value]
        ({"advantages": Outcome(lambda rewards: [1.0])}, r"\[1.0\] for the 2 rewards of a gr"),
        ({"advantages": Outcome(lambda rewards: ["x", "y"])}, r"'x' for trajectory t0"),  # type: ignore[list-item]
        ({"advantages": Outcome(lambda rewards: torch.zeros(2, 2))}, "for trajectory t0"),  # type: ignore[arg-type,return-value]
        (
            {"advantages": Outcome(lambda rewards: [1.0, math.inf])},
            "returned inf for trajectory t1",
        ),
        ({"advantages": lambda earned: 3}, "returned 3 for 1 groups"),
        ({"advantages": lambda earned: []}, r"returned \[\] for 1 groups"),
        ({"advantages": lambda earned: [[1.0]]}, r"\[1.0\] for the 2 trajectories of group g"),
        ({"advantages": Outcome(fault)}, "`advantages` raised ValueError: my own fault"),
        ({"keep": fault}, "`keep` raised ValueError: my own fault"),
    ],
)
def test_advantages_that_are_none_are_refused(own: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainingError, match=rf"^rl\.algorithm: .*{said}"):
        algorithm(**own).assign(groups())


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (lambda samples: None, "`aggregate` returned None for 1 samples"),
        (lambda samples: [1.0], r"`aggregate` returned \[1.0\] for 1 samples"),
        (lambda samples: [[1.0]], r"`aggregate` returned \[\[1.0\]\] for 1 samples"),
        (fault, "`aggregate` raised ValueError: my own fault"),
    ],
)
def test_weights_that_are_none_are_refused(weights: Any, said: str) -> None:
    sample = Sample([5, 6], [False, True], [0.0, -0.5], [0.0, 1.0], "t0")
    with pytest.raises(TrainingError, match=said):
        to_batch([sample], algorithm(aggregate=weights), 16, 0, "packed")


def test_a_part_that_is_no_function_is_refused_when_it_is_built() -> None:
    with pytest.raises(ConfigError, match="`loss` of 'own' is 3, not a function"):
        algorithm(loss=3)


def test_a_fault_of_ludus_keeps_its_traceback() -> None:
    without_entropy = replace(inputs(), entropy_N=None)
    with pytest.raises(ValueError, match="an entropy bonus needs the entropy"):
        computed(with_entropy_bonus(clipped(0.2, 0.2), 0.1), without_entropy)
