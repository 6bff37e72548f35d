"""Budgets, on a manual clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from ludus.config.schema import BudgetConfig
from ludus.core.errors import DataError
from ludus.pipeline.monitoring.budget import Budget, Spent


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_cost_is_projected_from_recent_steps(tmp_path: Path) -> None:
    clock = Clock()
    budget = Budget(BudgetConfig(price_per_hour=36.0), tmp_path / "budget.json", clock)
    clock.now += 50  # demonstrations, a tokenizer
    budget.begin_stage()
    clock.now += 10
    found = budget.step(200, steps_left=9)
    assert found == {
        "budget/hours": pytest.approx(60 / 3600),
        "budget/tokens": 200,
        "budget/cost": pytest.approx(0.60),
        "budget/projected_cost": pytest.approx(0.60 + 9 * 0.10),
    }
    clock.now += 20
    found = budget.step(200, steps_left=8)
    assert found["budget/projected_cost"] == pytest.approx(0.80 + 8 * 0.15)
    assert budget.exceeded() is None


def test_without_a_price_there_is_no_cost(tmp_path: Path) -> None:
    budget = Budget(BudgetConfig(), tmp_path / "budget.json", Clock())
    assert budget.step(7, 1).keys() == {"budget/hours", "budget/tokens"}


@pytest.mark.parametrize(
    ("limits", "steps", "message"),
    [
        ({"max_cost": 0.35, "price_per_hour": 36.0}, 3, "budget.max_cost: 0.30 of 0.35 EUR"),
        ({"max_hours": 45 / 3600}, 4, "budget.max_hours: 0.01 of 0.0125 hours"),
        ({"max_tokens": 1_000}, 5, "budget.max_tokens: 1,000 of 1,000 are spent"),
    ],
)
def test_a_step_that_would_exceed_a_limit_is_refused(
    limits: dict[str, float], steps: int, message: str, tmp_path: Path
) -> None:
    clock = Clock()
    budget = Budget(BudgetConfig(currency="EUR", **limits), tmp_path / "b.json", clock)
    budget.begin_stage()
    done = 0
    while (over := budget.exceeded()) is None:
        clock.now += 10
        budget.step(200, 100)
        done += 1
    assert done == steps
    assert over.startswith(message)


def test_processes_add_up_and_repeated_steps_count_twice(tmp_path: Path) -> None:
    path, clock = tmp_path / "budget.json", Clock()
    first = Budget(BudgetConfig(), path, clock)
    clock.now += 100
    first.step(50, 3)
    clock.now += 5  # killed during a step: this time is lost
    second = Budget(BudgetConfig(), path, clock)
    clock.now += 30
    second.step(50, 3)
    assert second.spent == Spent(130, 100)
    assert json.loads(path.read_text()) == {"seconds": 130, "tokens": 100}


def test_a_malformed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "budget.json"
    for text in ("", "[]", '{"seconds": "x", "tokens": 1}', '{"seconds": 1}'):
        path.write_text(text)
        with pytest.raises(DataError, match=r"budget.json: malformed count of time and tokens"):
            Budget(BudgetConfig(), path)


def test_a_limit_in_money_needs_a_price() -> None:
    with pytest.raises(ValidationError, match="`max_cost` needs `price_per_hour`"):
        BudgetConfig(max_cost=3)
