"""Exact ratios at every place of the order of visits, before and after a resume; the reader."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from itertools import islice
from typing import Any

import pytest

from ludus.core.errors import CheckpointError, ConfigError, DataError
from ludus.core.types import Spec, Task
from ludus.envs.mixture import Mixture
from ludus.tasks.curriculum import TaskSampler
from ludus.tasks.mixture import (
    PART,
    MixtureSampler,
    for_part,
    part_of,
    read_mixture,
    schedule,
    task_sampler,
)
from ludus.tasks.readers import read_tasks

ENV = Mixture(envs={"grid": Spec(name="babyai"), "crafting": Spec(name="textcraft")})


def tasks_of(**counts: int) -> list[Task]:
    return [
        Task(id=f"{part}/{n}", data={PART: part, "seed": n})
        for part, count in counts.items()
        for n in range(count)
    ]


def parts_of(sampler: TaskSampler, count: int) -> list[str | None]:
    return [part_of(task) for task in islice(sampler, count)]


@pytest.mark.parametrize(
    "ratios",
    [
        (1,),
        (3,),
        (1, 1),
        (2, 1),
        (5, 1),
        (7, 5, 3),
        (1, 1, 1, 1, 1),
        (40, 1, 1, 1),
        (9, 8, 7, 6, 5),
    ],
    ids=str,
)
def test_at_every_place_each_part_has_its_share_rounded_up_or_down(ratios: tuple[int, ...]) -> None:
    by_name = {f"p{n}": ratio for n, ratio in enumerate(ratios)}
    order, total = schedule(by_name), sum(ratios)
    assert Counter(order) == by_name
    had: Counter[str] = Counter()
    for place, name in enumerate(order * 2, start=1):
        had[name] += 1
        for other, ratio in by_name.items():
            assert abs(had[other] - Fraction(place * ratio, total)) < 1


def test_a_step_that_the_ratios_divide_has_exactly_its_shares_and_others_carry_over() -> None:
    tasks, ratios = tasks_of(a=5, b=11, c=3), {"a": 3, "b": 2, "c": 1}
    sampler = MixtureSampler(tasks, 0, True, ratios)
    for _ in range(50):
        assert Counter(parts_of(sampler, 12)) == {"a": 6, "b": 4, "c": 2}
    sampler = MixtureSampler(tasks, 0, True, ratios)
    steps = [Counter(parts_of(sampler, 4)) for _ in range(300)]
    assert sum(steps, Counter()) == {"a": 600, "b": 400, "c": 200}
    assert {step["c"] for step in steps} == {0, 1}


def test_each_part_is_visited_in_passes_of_its_own() -> None:
    sampler = MixtureSampler(tasks_of(a=4, b=10), 3, True, {"a": 1, "b": 1})
    given = [task.id for task in islice(sampler, 40)]
    a, b = ([id for id in given if id.startswith(part)] for part in "ab")
    assert all(len(set(a[i : i + 4])) == 4 for i in range(0, 20, 4))
    assert all(len(set(b[i : i + 10])) == 10 for i in range(0, 20, 10))
    assert len({tuple(a[i : i + 4]) for i in range(0, 20, 4)}) > 1, "each pass has a new order"
    metrics = sampler.metrics()
    assert (metrics["tasks/epoch_a"], metrics["tasks/epoch_b"]) == (5.0, 2.0)


@pytest.mark.parametrize("stop", range(9))
def test_resumed_it_goes_on_at_the_very_task(stop: int) -> None:
    def make() -> MixtureSampler:
        return MixtureSampler(tasks_of(a=3, b=4), 7, True, {"a": 2, "b": 5})

    whole, first = make(), make()
    ids = [task.id for task in islice(whole, 40)]
    for _ in range(stop):
        next(first)
    again = make()
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [task.id for task in islice(again, 40 - stop)] == ids[stop:]
    assert again.state_dict() == whole.state_dict()


def test_a_state_of_other_ratios_is_refused() -> None:
    tasks = tasks_of(a=3, b=4)
    state = MixtureSampler(tasks, 0, True, {"a": 2, "b": 1}).state_dict()
    with pytest.raises(CheckpointError, match="ratios"):
        MixtureSampler(tasks, 0, True, {"a": 1, "b": 2}).load_state_dict(state)
    with pytest.raises(CheckpointError, match="ratios"):
        MixtureSampler(tasks, 0, True, {"a": 1, "b": 2}).load_state_dict(
            TaskSampler(tasks).state_dict()
        )


def test_a_part_without_tasks_leaves_the_ratio_of_the_others() -> None:
    sampler = task_sampler(tasks_of(a=3, b=4), 0, shuffle=True, ratios={"a": 2, "b": 1, "c": 7})
    assert Counter(parts_of(sampler, 30)) == {"a": 20, "b": 10}
    plain = task_sampler([Task(id="x")], 0, shuffle=True, ratios={"a": 2})
    assert type(plain) is TaskSampler, "conversations of a file are of no part"


def test_settings_by_part() -> None:
    task = tasks_of(a=1)[0]
    assert for_part({"a": 4, "b": 5}, task) == 4
    assert for_part({"b": 5}, task) is None
    assert for_part(7, task) == 7
    assert for_part({"a": 4}, Task(id="x")) is None


def mixture(**parts: Any) -> Spec:
    return Spec(name="mixture", args={"parts": parts})


def reader(num_tasks: int, *tiers: str, **args: Any) -> dict[str, Any]:
    return {"name": "env", "args": {"num_tasks": num_tasks, "tiers": list(tiers), **args}}


def test_the_reader_interleaves_and_labels() -> None:
    spec = mixture(
        grid={"ratio": 2, "tasks": reader(6, "GoToObj", "GoToLocal")},
        crafting={"tasks": reader(5, "depth-1")},
    )
    tasks = read_tasks(spec, "tasks.train", maker=ENV)
    assert tasks.ratios == {"grid": 2, "crafting": 1}
    parts = [part_of(task) for task in tasks]
    assert all(Counter(parts[i : i + 3]) == {"grid": 2, "crafting": 1} for i in (0, 3, 6))
    assert parts[9:] == ["crafting"] * 2, "those of the longer part come last"
    assert {task.tier for task in tasks} == {"grid/GoToObj", "grid/GoToLocal", "crafting/depth-1"}
    assert tasks == read_tasks(spec, "tasks.train", maker=ENV)


REFUSED: dict[str, tuple[Spec, str]] = {
    "unknown environment": (
        mixture(gird={"tasks": reader(1, "GoToObj")}),
        r"tasks\.train\.args\.parts\.gird: 'gird' is no environment .*did you mean grid",
    ),
    "unknown tier": (mixture(grid={"tasks": reader(1, "GoToObjx")}), "not a tier of BabyAI"),
    "unknown reader": (
        mixture(grid={"tasks": "evn"}),
        r"tasks\.train\.args\.parts\.grid\.tasks\.name: 'evn' is not a known reader",
    ),
    "wrong argument": (
        mixture(grid={"tasks": reader(0, "GoToObj")}),
        r"parts\.grid\.tasks\.args\.num_tasks must be a whole number >= 1",
    ),
    "ratio": (
        mixture(grid={"ratio": 0, "tasks": reader(1, "GoToObj")}),
        r"parts\.grid\.ratio must be a whole number >= 1",
    ),
    "no parts": (mixture(), r"tasks\.train\.args\.parts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_reader_says_what_is_wrong_and_where(case: str) -> None:
    spec, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        read_tasks(spec, "tasks.train", maker=ENV)


def test_the_same_tasks_twice_are_refused() -> None:
    twice = Mixture(envs={"a": Spec(name="babyai"), "b": Spec(name="babyai")})
    spec = mixture(a={"tasks": reader(2, "GoToObj")}, b={"tasks": reader(2, "GoToObj")})
    with pytest.raises(DataError, match="2 ids belong to more than one task"):
        read_tasks(spec, "tasks.train", maker=twice)


def test_the_reader_needs_the_environment() -> None:
    with pytest.raises(ConfigError, match="needs the environment 'mixture'"):
        read_mixture({})
