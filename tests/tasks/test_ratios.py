"""Exact shares of every batch and of the whole, and the order in a batch."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.core.errors import CheckpointError, ConfigError
from ludus.tasks.ratios import Schedule, shares


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ({"a": 2, "b": 1}, [2, 1]),
        ({"a": 4, "b": 2}, [4, 2]),
        ({"a": "40%", "b": "30%", "c": "30%"}, [4, 3, 3]),
        ({"a": 0.1, "b": 0.2, "c": 0.7}, [1, 2, 7]),
        ({"a": "1/3", "b": "2/3"}, [1, 2]),
        ({"a": "12.5 %", "b": 0.875}, [1, 7]),
        ({"a": 1.0}, [1]),
        ({"a": 5}, [5]),
    ],
    ids=str,
)
def test_ratios_become_whole_numbers(ratios: dict[str, float], expected: list[int]) -> None:
    assert list(shares(ratios).values()) == expected


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        (
            {"a": "40%", "b": "30%", "c": "20%"},
            r"ratios 40% \+ 30% \+ 20% sum to 0\.9; .* sum to 1",
        ),
        ({"a": "1/3", "b": "1/3", "c": 0.3}, "sum to 29/30"),
        ({"a": "100%", "b": "50%"}, r"sum to 1\.5"),
        ({"a": 2, "b": 0.5}, "ratio of 'a' is a whole number, that of 'b' a fraction"),
        ({"a": -1}, r"tasks\.a\.ratio must be a whole number >= 1, a fraction .*, got -1"),
        ({"a": 1.5}, "must be a whole number"),
        ({"a": "half"}, "must be a whole number"),
        ({"a": "1/0"}, "must be a whole number"),
        ({"a": True}, "must be a whole number"),
        ({"a": float("nan")}, "must be a whole number"),
        ({"a": 10**7}, "must be a whole number"),
    ],
    ids=str,
)
def test_wrong_ratios_are_refused(ratios: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shares(ratios, "tasks")


def check_exact(ratios: list[int], size: int, num_batches: int) -> None:
    """Every batch has each share rounded up or down; so have all batches so far."""
    by_name, total = {f"p{n}": ratio for n, ratio in enumerate(ratios)}, sum(ratios)
    order, had = Schedule(by_name, size), Counter[str]()
    for number in range(1, num_batches + 1):
        batch = Counter(islice(order, size))
        had += batch
        for name, ratio in by_name.items():
            assert size * ratio // total <= batch[name] <= -(-size * ratio // total)
            assert abs(had[name] * total - number * size * ratio) < total


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 40))
def test_each_batch_and_the_whole_are_exact(ratios: list[int], size: int) -> None:
    check_exact(ratios, size, 60)


@pytest.mark.parametrize(
    ("ratios", "size"),
    [
        ([4, 3, 3], 8),
        ([333, 333, 334], 16),
        # many left-over rows
        ([11, 9, 7, 5, 3, 1, 12, 10, 8, 6, 4, 2], 18),
    ],
    ids=str,
)
def test_ten_thousand_batches_are_exact(ratios: list[int], size: int) -> None:
    check_exact(ratios, size, 10_000)


def test_ten_thousand_batches_are_exact_across_a_resume_in_each_hundredth() -> None:
    ratios, size = {"code": 40, "search": 30, "maths": 30}, 8
    order, whole, had = Schedule(ratios, size), Schedule(ratios, size), Counter[str]()
    for number in range(1, 10_001):
        cut = number % size if number % 100 == 0 else 0  # in the middle of a batch
        batch = list(islice(order, cut))
        if number % 100 == 0:
            state = json.loads(json.dumps(order.state_dict()))
            order = Schedule(ratios, size)
            order.load_state_dict(state)
        batch += islice(order, size - cut)
        assert batch == list(islice(whole, size))
        had.update(batch)
        for name, ratio in ratios.items():
            assert size * ratio // 100 <= batch.count(name) <= -(-size * ratio // 100)
            assert abs(had[name] * 100 - number * size * ratio) < 100


@pytest.mark.parametrize(
    ("ratios", "order"),
    [
        ({"a": 2, "b": 1}, "aba"),
        ({"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}, "abcde"),
        ({"a": 7, "b": 5, "c": 3}, "abacbaabcabacba"),
        ({"a": 5, "b": 1}, "aaabaa"),
    ],
    ids=str,
)
def test_the_order_of_a_batch_that_the_ratios_divide(ratios: dict[str, int], order: str) -> None:
    assert list(islice(Schedule(ratios), 2 * len(order))) == list(order * 2)
    twice = Schedule(ratios, 2 * len(order))
    assert list(islice(twice, 2 * len(order))) == list(order * 2)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_by_default_each_place_has_the_share_rounded_up_or_down(ratios: list[int]) -> None:
    by_name, total = {f"p{n}": ratio for n, ratio in enumerate(ratios)}, sum(ratios)
    had: Counter[str] = Counter()
    for place, name in enumerate(islice(Schedule(by_name), 2 * total), start=1):
        had[name] += 1
        for other, ratio in by_name.items():
            assert abs(had[other] * total - place * ratio) < total


@pytest.mark.parametrize("other", [Schedule({"a": 1, "b": 2}, 4), Schedule({"a": 2, "b": 1}, 5)])
def test_a_state_of_another_schedule_is_refused(other: Schedule) -> None:
    with pytest.raises(CheckpointError, match=r"has (ratios|tasks a step) .*, this run has"):
        other.load_state_dict(Schedule({"a": 2, "b": 1}, 4).state_dict())
