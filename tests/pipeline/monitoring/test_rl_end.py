"""RL ends where its groups have lost their signal."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.pipeline.rl_end import METRIC, WINDOW, Signal
from ludus.telemetry.metrics import MetricsLog


def signal(minimum: float | None, shares: list[float | None]) -> Signal:
    made = Signal(minimum)
    for share in shares:
        made.add(share)
    return made


def test_rl_ends_where_the_mean_of_the_last_steps_is_below_the_minimum() -> None:
    reason = signal(0.02, [0.5] * 30 + [0.0] * (WINDOW - 1) + [0.3]).reason
    assert reason is not None
    assert reason.startswith(
        "1.5 % of the groups of the last 20 steps have a signal, less than 2 %"
    )


@pytest.mark.parametrize(
    ("minimum", "shares"),
    [
        (None, [0.0] * 100),
        (0.02, [0.5] * 5 + [0.0] * (WINDOW - 6)),
        (0.02, [0.5] * 30 + [0.0] * 100 + [0.5]),  # the mean of 20 is 2.5 %
        (0.02, [0.0] * 100),  # what is rare at first may be found
        (0.02, [None] * 100),  # an algorithm that does not score
    ],
    ids=["without a minimum", "too few steps", "enough", "never had more", "no measure"],
)
def test_rl_goes_on(minimum: float | None, shares: list[float | None]) -> None:
    assert signal(minimum, shares).reason is None


def test_a_resumed_run_has_the_steps_before_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for stage, shares in (("sft", [1.0] * 50), ("rl", [1.0] * WINDOW + [0.0] * WINDOW)):
            for step, share in enumerate(shares):
                log.log(stage, step, {METRIC: share})
        log.log("rl", 2 * WINDOW, {METRIC: 1.0})  # after the checkpoint: played again
    assert Signal.restored(0.02, path, 2 * WINDOW).reason is not None
    assert Signal.restored(0.02, path, 2 * WINDOW - 1).reason is None
    assert Signal.restored(0.02, path, 2 * WINDOW + 1).reason is None
    assert Signal.restored(None, path, 2 * WINDOW).reason is None
