"""Search: pages together are the sorted, filtered list; wrong places are refused."""

from __future__ import annotations

import base64
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ludus.core.errors import ConfigError
from ludus.core.types import Group, Message, Segment, Status, Task, ToolCall, Trajectory
from ludus.store import RunStore
from ludus.store import search as module
from ludus.store.search import Search, Sort, search, statuses, tools
from ludus.store.store import UnknownName

TOOLS = ("python", "search", "p%_\\")
REWARDS = (0.0, 0.5, 0.5, 1.0, -2.0, math.nan, math.inf, None)


def made(rng: random.Random, id_: str, group: str) -> Trajectory:
    used = [tool for tool in TOOLS if rng.random() < 0.3]
    calls = [ToolCall(name=tool) for tool in used for _ in range(rng.randint(1, 2))]
    segments = [Segment(-1, [1] * rng.randint(1, 4), None, Message(role="user", content="?"))]
    for call in calls:
        said = Message(role="assistant", tool_calls=[call])
        segments.append(Segment(len(segments) - 1, [2], [-0.5], said))
    status = rng.choice([Status.COMPLETED, Status.COMPLETED, Status.ERROR_ENV, Status.ABORTED])
    return Trajectory(
        id_, group, f"task-{rng.randint(0, 3)}", segments, status=status,
        reward=rng.choice(REWARDS), error=rng.choice([None, "50% lost", "a_b"]),
        dropped=rng.choice([None, "no signal: x"]),
    )  # fmt: skip


@pytest.fixture
def rows(store: RunStore) -> list[Any]:
    rng = random.Random(3)
    store.create_run("run-2", "demo", {}, {})
    for run, step in itertools.product(("run-1", "run-2"), range(3)):
        groups = [
            Group(group, Task(id="t"), [made(rng, f"{group}-{n}", group) for n in range(4)])
            for group in (f"g{step}-{g}" for g in range(2))
        ]
        store.record_step(run, "sft" if step == 0 else "rl", step, groups, {})
    return list(enumerate(store.trajectories("run-1")))


def value(row: Any, sort: str) -> Any:
    return {"reward": row.reward, "tokens": row.num_tokens, "turns": row.num_turns}.get(sort)


def expected(rows: list[Any], ask: Search, used: dict[str, set[str]]) -> list[str]:
    """The ids that the search has to find, in order."""

    def passes(row: Any) -> bool:
        low, high = ask.min_reward, ask.max_reward
        number = row.reward is not None and not math.isnan(row.reward)
        texts = (row.id, row.task_id, row.error or "", row.dropped or "")
        return all(
            (
                ask.stage in (None, row.stage),
                ask.step in (None, row.step),
                ask.group in (None, row.group_id),
                ask.status in (None, row.status),
                ask.tool is None or ask.tool in used[row.id],
                ask.dropped is None or ask.dropped == (row.dropped is not None),
                low is None or (number and row.reward >= low),
                high is None or (number and row.reward <= high),
                not ask.text or any(ask.text in text for text in texts),
            )
        )

    found = [(n, row) for n, row in rows if passes(row)]
    if ask.sort == "time":
        return [row.id for _, row in sorted(found, key=lambda r: r[0], reverse=ask.descending)]

    def key(item: Any) -> tuple[Any, ...]:
        number = value(item[1], ask.sort)
        return math.isnan(number), 0.0 if math.isnan(number) else number, item[0]

    known = [item for item in found if value(item[1], ask.sort) is not None]
    rest = [item for item in found if value(item[1], ask.sort) is None]
    known.sort(key=key, reverse=ask.descending)
    rest.sort(key=lambda item: item[0], reverse=ask.descending)
    return [row.id for _, row in known + rest]


def paged(store: RunStore, ask: Search) -> tuple[list[str], dict[str, set[str]]]:
    ids: list[str] = []
    used: dict[str, set[str]] = {}
    for _ in range(200):
        page = search(store, "run-1", ask)
        ids += [row.id for row in page.rows]
        used |= {row.id: set(t) for row, t in zip(page.rows, page.tools, strict=True)}
        assert len(page.rows) <= ask.limit
        if page.next is None:
            return ids, used
        ask = replace(ask, after=page.next)
    raise AssertionError("the pages do not end")


ORDERS: list[tuple[Sort, bool]] = [
    ("time", True),
    ("reward", True),
    ("reward", False),
    ("tokens", False),
    ("turns", True),
]
FILTERS: list[dict[str, Any]] = [
    {},
    {"stage": "rl"},
    {"step": 1},
    {"stage": "rl", "step": 0},
    {"group": "g2-1"},
    {"status": Status.ABORTED},
    {"status": Status.COMPLETED, "tool": "python"},
    {"tool": "p%_\\"},
    {"tool": "never"},
    {"dropped": True},
    {"dropped": False, "min_reward": 0.25},
    {"min_reward": 0.0, "max_reward": 0.5},
    {"max_reward": math.inf},
    {"text": "0% l"},
    {"text": "a_b"},
    {"text": "g1-2-3"},
    {"text": "\\"},
]


@pytest.mark.parametrize(("window", "selected"), [(3, 2), (5, 1000)])
def test_pages_together_are_the_sorted_list(
    store: RunStore, rows: list[Any], monkeypatch: pytest.MonkeyPatch, window: int, selected: int
) -> None:
    _, used = paged(store, Search())
    monkeypatch.setattr(module, "WINDOW", window)
    monkeypatch.setattr(module, "MAX_SELECTED", selected)
    for (sort, descending), filters in itertools.product(ORDERS, FILTERS):
        ask = Search(sort=sort, descending=descending, limit=5, **filters)
        found, _ = paged(store, ask)
        assert found == expected(rows, ask, used), ask


def test_a_page_ends_with_its_time_and_the_next_goes_on(
    store: RunStore, rows: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, used = paged(store, Search())
    monkeypatch.setattr(module, "SMALL_WINDOW", 4)
    monkeypatch.setattr(module, "MAX_SELECTED", 1)
    ask = Search(sort="reward", dropped=True)
    monkeypatch.setattr(module, "WINDOWS_S", 600.0)
    whole = search(store, "run-1", ask)
    monkeypatch.setattr(module, "WINDOWS_S", -1.0)
    first = search(store, "run-1", ask)
    assert first.num_examined == 4 < whole.num_examined
    found, _ = paged(store, ask)
    assert found == expected(rows, ask, used)


def test_a_range_of_rewards_reads_no_trajectory_without_one(
    store: RunStore, rows: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read all of them, 170 ms in a run of a million."""
    asked: list[int] = []
    base = module._base
    monkeypatch.setattr(module, "_base", lambda *args: asked.append(args[2]) or base(*args))
    search(store, "run-1", Search(sort="reward", min_reward=0.0, max_reward=0.5))
    assert asked == [0]
    search(store, "run-1", Search(sort="reward", limit=200))
    assert asked == [0, 0, 1]


def test_tools_and_statuses_of_a_run(store: RunStore, rows: list[Any]) -> None:
    assert tools(store, "run-1") == sorted(TOOLS)
    assert set(statuses(store, "run-1")) == {row.status for _, row in rows}
    page = search(store, "run-1", Search(tool="python", limit=200))
    assert page.rows
    assert all(found["python"] in (1, 2) for found in page.tools)


def test_rows_recorded_between_pages_do_not_move_the_others(
    store: RunStore, rows: list[Any]
) -> None:
    first = search(store, "run-1", Search(sort="reward", limit=5))
    rng = random.Random(9)
    store.record_step("run-1", "rl", 7, [Group("g", Task(id="t"), [made(rng, "new", "g")])], {})
    seen = [row.id for row in first.rows]
    ask = Search(sort="reward", limit=5, after=first.next)
    assert not {row.id for row in search(store, "run-1", ask).rows} & set(seen)


def test_a_resumed_run_loses_the_calls_of_its_steps(store: RunStore, rows: list[Any]) -> None:
    store.rewind("run-1", {"sft": 0})
    found = search(store, "run-1", Search(tool="python", limit=200)).rows
    assert {row.stage for row in found} <= {"sft"}
    store.rewind("run-1", {})
    assert tools(store, "run-1") == []


@pytest.mark.parametrize(
    "after",
    [
        "", "!", "a", "W10", "%00", "é",
        *(
            base64.urlsafe_b64encode(text.encode()).decode()
            for text in (
                "[]", "[1]", '["reward",true,0,1.0]', '["tokens",true,0,1.0,3]', "{}", "[" * 9999,
                '["reward",true,0,"x",3]', '["reward",true,0,1.0,"3"]', '["reward",false,0,1.0,3]',
                '["reward",true,0,null,3]', '["reward",true,0,1.0,-1]', '["reward",true,2,1.0,3]',
                '["reward",true,0,1.0,1e400]', '["reward",true,0,1.0,99999999999999999999]',
                '["reward",true,0,true,3]', '["reward",true,0,{"$float":"x"},3]',
            )
        ),
    ],
)  # fmt: skip
def test_wrong_places_are_refused(store: RunStore, rows: list[Any], after: str) -> None:
    with pytest.raises(ConfigError, match="not the `next` of a page"):
        search(store, "run-1", Search(sort="reward", after=after))


def test_wrong_questions_are_refused(store: RunStore) -> None:
    with pytest.raises(UnknownName, match="did you mean run-1"):
        search(store, "run-l", Search())
    for limit in (0, 201):
        with pytest.raises(ConfigError, match="limit must be 1 to 200"):
            search(store, "run-1", Search(limit=limit))


def test_names_of_tools_are_cut(store: RunStore, open_store: Callable[..., RunStore]) -> None:
    calls = [ToolCall(name=f"{n}" + "x" * 500) for n in range(100)]
    said = Message(role="assistant", tool_calls=calls)
    turn = Trajectory("a", "g", "t", [Segment(-1, [1], None), Segment(0, [2], [-1.0], said)])
    store.record_step("run-1", "rl", 0, [Group("g", Task(id="t"), [turn])], {})
    found = tools(store, "run-1")
    assert len(found) == 64
    assert max(map(len, found)) == 100
    copy = open_store()
    copy.create_run("run-9", "demo", {}, {})
    copy.unpack_step("run-9", store.pack_step("run-1", "rl", 0))
    assert tools(copy, "run-9") == found
    assert copy.pack_step("run-9", "rl", 0) == store.pack_step("run-1", "rl", 0)
