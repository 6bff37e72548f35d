"""Mixtures: the order of visits, before and after a resume; the reader."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from ludus.core.errors import CheckpointError, ConfigError, DataError
from ludus.core.types import Spec, Task
from ludus.envs.babyai.env import BabyAI
from ludus.envs.mixture import Mixture
from ludus.rollout.hosts.host import LocalEnvs
from ludus.tasks.curriculum import TaskSampler
from ludus.tasks.mixture import (
    PART,
    MixtureSampler,
    for_part,
    part_of,
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
        r"tasks\.train\.args\.parts\.grid\.ratio must be a whole number >= 1, a fraction",
    ),
    "ratios that do not sum to 1": (
        mixture(
            grid={"ratio": "60%", "tasks": reader(1, "GoToObj")},
            crafting={"ratio": 0.3, "tasks": reader(1, "depth-1")},
        ),
        r"tasks\.train\.args\.parts: the ratios 60% \+ 0\.3 sum to 0\.9; .*have to sum to 1",
    ),
    "generated tasks without an environment": (
        mixture(grid={"env": "none", "tasks": reader(1, "GoToObj")}),
        "the reader 'env' needs an environment",
    ),
    "a name that is none for a metric": (
        mixture(**{"my grid": {"tasks": reader(1, "GoToObj")}}),
        r"tasks\.train\.args\.parts: 'my grid' cannot be the name of a part",
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


def file_of(path: Path, count: int) -> dict[str, Any]:
    rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"name": "json", "args": {"path": str(path)}}


def test_a_part_of_a_file_has_its_own_judge_and_tools_and_no_environment(tmp_path: Path) -> None:
    sums = {"env": "none", "judge": "answer", "tools": ["calculate"]}
    spec = mixture(
        grid={"ratio": "1/3", "tasks": reader(2, "GoToObj")},
        sums={"ratio": "2/3", "tasks": file_of(tmp_path / "sums.jsonl", 4), **sums},
    )
    tasks = read_tasks(spec, "tasks.train", maker=ENV)
    assert tasks.ratios == {"grid": 1, "sums": 2}
    of = {name: [task for task in tasks if part_of(task) == name] for name in tasks.ratios}
    envs = LocalEnvs(Spec(name="mixture", args={"envs": {"grid": "babyai"}}))
    for task in of["sums"]:
        assert envs.spec_of(task) is None
        assert (task.judge, task.tools) == (Spec(name="answer"), ["calculate"])
    for task in of["grid"]:
        assert envs.spec_of(task) == envs.spec
        assert (task.judge, task.tools) == (None, None)
    alone = read_tasks(mixture(sums={"tasks": file_of(tmp_path / "s.jsonl", 4)}), "tasks.train")
    assert [task.env for task in alone] == [None] * 4, "a run without environment"


def test_the_functions_of_a_row_come_before_those_of_its_part(tmp_path: Path) -> None:
    own: list[list[str] | None] = [["search"], [], None]
    rows = [{"prompt": str(tools), "answer": "1", "has": tools} for tools in own]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = {"name": "json", "args": {"path": str(path), "tools": "has"}}
    tasks = read_tasks(mixture(rows={"tasks": file, "tools": ["calculate"]}), "tasks.train")
    assert [task.tools for task in tasks] == [["search"], [], ["calculate"]]


def test_with_a_plain_environment_all_parts_are_played_in_it() -> None:
    levels = {name: {"tasks": reader(3, name)} for name in ("GoToObj", "GoToLocal")}
    tasks = read_tasks(mixture(**levels), "tasks.train", maker=BabyAI())
    assert Counter(task.tier for task in tasks) == {"GoToObj/GoToObj": 3, "GoToLocal/GoToLocal": 3}


@pytest.mark.parametrize("fault", ["missing", "empty"])
def test_a_source_that_is_missing_or_empty_is_refused_with_its_part(
    tmp_path: Path, fault: str
) -> None:
    tasks = file_of(tmp_path / "sums.jsonl", 0)
    if fault == "missing":
        (tmp_path / "sums.jsonl").unlink()
    spec = mixture(grid={"tasks": reader(2, "GoToObj")}, sums={"env": "none", "tasks": tasks})
    says = "does not exist" if fault == "missing" else "gives no task"
    with pytest.raises(DataError, match=rf"tasks\.train\.args\.parts\.sums\b.* {says}"):
        read_tasks(spec, "tasks.train", maker=ENV)


@pytest.mark.parametrize("stop", [0, 1, 7, 13, 20])
def test_a_distinct_part_has_no_task_twice_in_a_step(stop: int) -> None:
    def make(distinct: tuple[str, ...] = ("a",)) -> MixtureSampler:
        return MixtureSampler(tasks_of(a=4, b=9), 3, True, {"a": 1, "b": 2}, 10, distinct)

    sampler = make()
    ids = [task.id for task in islice(sampler, 300)]
    a = [[id for id in ids[i : i + 10] if id.startswith("a")] for i in range(0, 300, 10)]
    assert {len(step) for step in a} == {3, 4}
    assert all(len(set(step)) == len(step) for step in a)
    assert Counter(id for step in a for id in step) == dict.fromkeys(
        ["a/0", "a/1", "a/2", "a/3"], 25
    )
    free = [task.id for task in islice(make(()), 300)]
    steps = [free[i : i + 10] for i in range(0, 300, 10)]
    assert any(len(set(step)) < 10 for step in steps), "without `distinct`, a task comes twice"
    first, again = make(), make()
    for _ in range(stop):
        next(first)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [task.id for task in islice(again, 300 - stop)] == ids[stop:]


def test_a_distinct_part_with_too_few_tasks_is_refused() -> None:
    with pytest.raises(DataError, match=r"part 'a' has 3 tasks, but a step of 10 takes up to 4"):
        MixtureSampler(tasks_of(a=3, b=9), 3, True, {"a": 1, "b": 2}, 10, ["a"])


def test_a_state_that_has_only_the_number_of_tasks_is_read() -> None:
    whole = MixtureSampler(tasks_of(a=3, b=4), 7, True, {"a": 2, "b": 1}, 4)
    ids = [task.id for task in islice(whole, 50)]
    first, again = (MixtureSampler(tasks_of(a=3, b=4), 7, True, {"a": 2, "b": 1}, 4) for _ in "ab")
    for _ in range(12):
        next(first)
    old = {key: value for key, value in first.state_dict().items() if key != "schedule"}
    again.load_state_dict({**old, "given": 12})
    assert [task.id for task in islice(again, 38)] == ids[12:]


def test_its_composition_is_measured() -> None:
    sampler = MixtureSampler(tasks_of(a=3, b=40), 7, True, {"a": 1, "b": 3}, 8)
    for _ in range(32):
        next(sampler)
    metrics = sampler.metrics()
    assert {key: value for key, value in metrics.items() if key.startswith("mixture/")} == {
        "mixture/a/wraps": 2.0,
        "mixture/a/left": 1.0,
        "mixture/b/wraps": 0.0,
        "mixture/b/left": 16.0,
    }
