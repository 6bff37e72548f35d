"""Costs of passes, fitted from their times."""

from __future__ import annotations

import random

import pytest

from ludus.models.samplers.pass_times import MAX_PASSES, MIN_PASSES, PassTimes


def test_costs_are_found_again() -> None:
    rng, times = random.Random(0), PassTimes()
    for _ in range(200):
        rows, prefill = rng.randrange(1, 64), rng.choice((0, 0, 100))
        context = rows * rng.randrange(10, 500)
        seconds = 1e-3 + 2e-5 * rows + 4e-8 * context + 3e-6 * prefill
        times.add(rows, context, prefill, seconds)
    found = times.fit()
    assert found["time/passes"] == 200
    assert found["time/pass_s"] == pytest.approx(1e-3)
    assert found["time/pass_row_s"] == pytest.approx(2e-5)
    assert found["time/pass_context_s"] == pytest.approx(4e-8)
    assert found["time/prefill_token_s"] == pytest.approx(3e-6)


def test_costs_are_never_negative() -> None:
    times = PassTimes()
    for rows in range(1, 33):
        times.add(rows, 0, 0, 1.0 / rows)
    assert min(times.fit().values()) >= 0


def test_few_passes_give_no_costs_and_older_ones_are_forgotten() -> None:
    times = PassTimes()
    for _ in range(MIN_PASSES - 1):
        times.add(1, 0, 0, 1.0)
    assert times.fit() == {"time/passes": MIN_PASSES - 1}
    for _ in range(MAX_PASSES):
        times.add(1, 0, 0, 2.0)
    assert times.fit()["time/pass_s"] + times.fit()["time/pass_row_s"] == pytest.approx(2.0)


def test_few_long_passes_do_not_hide_the_cost_of_the_short_ones() -> None:
    """Wide passes are 5 % off at random: a hundred times the time of a narrow one."""
    rng, times = random.Random(0), PassTimes()
    for number in range(400):
        rows = 1 if number % 20 == 0 else 4000
        times.add(rows, 0, 0, (1e-3 + 2.5e-5 * rows) * rng.uniform(0.95, 1.05))
    found = times.fit()
    assert found["time/pass_s"] + found["time/pass_row_s"] == pytest.approx(1.025e-3, rel=0.05)
