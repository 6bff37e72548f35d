"""Horizons by hand, from the configuration to the turns of an episode."""

from __future__ import annotations

import pytest

from ludus.config.schema import RLConfig
from ludus.train.schedule import horizon


def test_horizon_by_hand() -> None:
    schedule = [(0, 5), (3, 8), (4, 20)]
    assert [horizon(schedule, step) for step in range(6)] == [5, 5, 5, 8, 20, 20]


def test_the_configuration_takes_a_schedule() -> None:
    config = RLConfig.model_validate({"horizon": [[0, 5], [100, 10]]})
    assert config.horizon == [(0, 5), (100, 10)]


@pytest.mark.parametrize(
    "wrong", [[], [[1, 5]], [[0, 5], [0, 6]], [[0, 5], [9, 6], [3, 7]], [[0, 0]]]
)
def test_wrong_schedules_are_refused(wrong: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="begins with step 0"):
        RLConfig.model_validate({"horizon": wrong})
