"""The entropy bonus that depends on the policy's entropy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ludus.core.types import Group, Segment, Status, Task, Trajectory
from ludus.train.algorithms.base import EntropyFloor
from ludus.train.algorithms.entropy import LEVELS, EntropyControl, sampled_entropy
from ludus.train.algorithms.table import GRPO


def group(*logprobs: float, status: Status = Status.COMPLETED) -> Group:
    segments = [Segment(-1, [5, 6]), Segment(0, [7] * len(logprobs), logprobs=list(logprobs))]
    trajectory = Trajectory("t", "g", "task", segments=segments, reward=1.0, status=status)
    return Group("g", Task(id="task"), [trajectory])


def test_the_entropy_is_that_of_the_sampled_tokens() -> None:
    assert sampled_entropy([group(-0.1, -0.3), group(-0.2)]) == pytest.approx(0.2)
    assert sampled_entropy([group(-0.1), group(-9.0, status=Status.ERROR_ENV)]) == 0.1
    assert sampled_entropy([]) is None


@pytest.mark.parametrize(
    ("entropy", "share"), [(0.0, 1.0), (0.05, 0.5), (0.1, 0.0), (3.0, 0.0), (None, 0.0)]
)
def test_the_bonus_grows_below_the_target(entropy: float | None, share: float) -> None:
    assert EntropyFloor(0.2, 0.1).share(entropy) == share


def test_an_algorithm_is_made_once_for_each_size_of_the_bonus() -> None:
    control = EntropyControl(replace(GRPO, entropy_floor=EntropyFloor(0.2, 0.1)))
    low, bonus = control.at([group(-0.05)])
    assert bonus == {"train/entropy_bonus": 0.1}
    assert low.regularised
    assert control.at([group(-0.05 - 0.1 / LEVELS / 4)])[0] is low
    assert control.at([group(-0.2)]) == (control.algorithm, {"train/entropy_bonus": 0.0})
    assert EntropyControl(GRPO).at([group(0.0)]) == (GRPO, {})
