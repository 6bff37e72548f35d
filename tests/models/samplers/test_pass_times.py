"""Costs of passes, fitted from their times."""

from __future__ import annotations

import random

import pytest

from ludus.models.samplers.pass_times import MAX_PASSES, MIN_PASSES, PassTimes


def test_costs_are_found_again() -> None:
    rng, times = random.Random(0), PassTimes()
    for _ in range(200):
        rows, prefill = rng.randrange(1, 64), rng.choice((0, 0, 100))
        times.add(rows, prefill, 1e-3 + 2e-5 * rows + 3e-6 * prefill)
    found = times.fit()
    assert found["time/passes"] == 200
    assert found["time/pass_s"] == pytest.approx(1e-3)
    assert found["time/pass_row_s"] == pytest.approx(2e-5)
    assert found["time/prefill_token_s"] == pytest.approx(3e-6)


def test_costs_are_never_negative() -> None:
    times = PassTimes()
    for rows in range(1, 33):
        times.add(rows, 0, 1.0 / rows)
    assert min(times.fit().values()) >= 0


def test_few_passes_give_no_costs_and_older_ones_are_forgotten() -> None:
    times = PassTimes()
    for _ in range(MIN_PASSES - 1):
        times.add(1, 0, 1.0)
    assert times.fit() == {"time/passes": MIN_PASSES - 1}
    for _ in range(MAX_PASSES):
        times.add(1, 0, 2.0)
    assert times.fit()["time/pass_s"] + times.fit()["time/pass_row_s"] == pytest.approx(2.0)
