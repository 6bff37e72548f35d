"""Search of a run's trajectories: filters, sorting, keyset paging, with bounded work per page.

    page = search(store, "run-1", Search(sort="reward", status=Status.COMPLETED))
    page = search(store, "run-1", Search(sort="reward", status=Status.COMPLETED, after=page.next))

A page is read in one of two ways, so that none reads a whole run:

- A filter with an index (step, group, status, tool, id) that at most MAX_SELECTED trajectories
  pass: read them all, sort, cut.
- Otherwise: read about WINDOW trajectories in the order of the sort's index, fewer once WINDOWS_S
  have passed, and drop those that the filters refuse. Such a page may hold fewer rows than
  `limit`, or none; `next` continues.
"""

from __future__ import annotations

import base64
import binascii
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    exists,
    func,
    literal,
    or_,
    select,
    tuple_,
)

from ludus.core.errors import ConfigError
from ludus.core.types import Status
from ludus.store import queries
from ludus.store import schema as db
from ludus.store.codec import decode_json, encode_json
from ludus.store.rows import TRAJECTORY_COLUMNS, TrajectoryRow
from ludus.store.store import RunStore, run_key

Sort = Literal["time", "reward", "tokens", "turns"]

MAX_SELECTED = 4000
WINDOW, SMALL_WINDOW = 8000, 800
WINDOWS_S = 0.06
"""Seconds after which a page takes no further window: on a loaded machine, or a slow disk."""
MAX_ROWS = 200
MAX_TOOLS = 200

_COLUMN = {"reward": "reward", "tokens": "num_tokens", "turns": "num_turns"}


@dataclass(frozen=True, slots=True)
class Search:
    """A question. `text` is an id, or a part of a task's id, an error or a reason of exclusion.

    `after` is `Page.next` of the page before. Trajectories without a reward come last in both
    orders; NaN is greater than every number.
    """

    sort: Sort = "time"
    descending: bool = True
    stage: str | None = None
    step: int | None = None
    group: str | None = None
    status: Status | None = None
    tool: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    dropped: bool | None = None
    text: str = ""
    limit: int = 50
    after: str | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Rows with the tools that each called; `next` is None after the last page. `num_examined`:
    trajectories read for this page."""

    rows: list[TrajectoryRow]
    tools: list[dict[str, int]]
    next: str | None
    num_examined: int


class _Place(NamedTuple):
    """A place in an order: the part (1: trajectories without a reward), the value, the key."""

    part: int
    value: Any
    key: int


def search(store: RunStore, run_id: str, ask: Search) -> Page:
    """Returns a page. Errors: UnknownName for the run, ConfigError for a wrong `after` or limit."""
    if not 1 <= ask.limit <= MAX_ROWS:
        raise ConfigError(f"limit must be 1 to {MAX_ROWS}, got {ask.limit}")
    place = None if ask.after is None else _decoded(ask)
    return store.read(lambda connection: _page(connection, run_key(connection, run_id), ask, place))


def tools(store: RunStore, run_id: str) -> list[str]:
    """Returns the names of the tools that a run's trajectories called, at most MAX_TOOLS."""
    c = db.tool_calls.c

    def work(connection: Connection) -> list[str]:
        query = select(func.min(c.tool)).where(c.run_key == run_key(connection, run_id))
        found: list[str] = []
        name = connection.scalar(query)
        while name is not None and len(found) < MAX_TOOLS:  # one look into the index for each
            found.append(name)
            name = connection.scalar(query.where(c.tool > name))
        return found

    return store.read(work)


def statuses(store: RunStore, run_id: str) -> list[Status]:
    """Returns the statuses that a run's trajectories have."""
    t = db.trajectories.c

    def work(connection: Connection) -> list[Status]:
        key = run_key(connection, run_id)
        one = {s: select(t.key).where(t.run_key == key, t.status == s.value) for s in Status}
        return [s for s, query in one.items() if connection.scalar(query.limit(1)) is not None]

    return store.read(work)


def _page(connection: Connection, key: int, ask: Search, place: _Place | None) -> Page:
    filters = _filters(key, ask)
    selected = _selected(connection, key, ask)
    rows: list[Any] = []
    examined = newest = 0
    following: _Place | None = None
    for part in _parts(ask, place):
        start = place if place is not None and place.part == part else None
        missing = ask.limit - len(rows)
        missing = ask.limit - len(rows)
        if filters and selected is None:
            found, end, seen = _in_windows(connection, ask, key, part, start, filters, missing)
        else:
            # Without its run in the condition, keys are looked up: no index of the run is read.
            base = _base(key if selected is None else None, ask, part, start)
            chosen = base.where(*filters, *([] if selected is None else [selected]))
            query = _with_rows(_ordered(chosen, ask, part)).limit(missing + 1)
            found, end = list(connection.execute(query).all()), None
            seen = len(found)
        examined += seen
        rows += found[:missing]
        if missing:
            newest = part  # the part of the last row
        if len(found) > missing:
            following = _place_of(rows[-1], ask, newest)
            break
        if end is not None:
            following = end
            break
    return Page(
        [queries.trajectory_row(row) for row in rows],
        _tools_of(connection, [row.key for row in rows]),
        None if following is None else _encoded(ask, following),
        examined,
    )


def _in_windows(
    connection: Connection,
    ask: Search,
    key: int,
    part: int,
    start: _Place | None,
    filters: Sequence[ColumnElement[bool]],
    limit: int,
) -> tuple[list[Any], _Place | None, int]:
    """Returns the rows of the next WINDOW trajectories that pass the filters, up to `limit` + 1.

    Also the place where the last window ended (None: the order ends there, or there are rows
    enough), and the number of trajectories read.
    """
    rows: list[Any] = []
    examined = 0
    deadline = time.monotonic() + WINDOWS_S
    for size in _sizes():
        if examined and time.monotonic() > deadline:
            break
        query = _ordered(_base(key, ask, part, start), ask, part)
        found = _in_window(connection, query.limit(size), filters, ask, part, limit - len(rows))
        rows += found
        examined += size
        if len(rows) > limit:
            return rows, None, examined
        columns = query.add_columns(_column(ask).label("value"))
        last = connection.execute(columns.offset(size - 1).limit(1)).one_or_none()
        if last is None:
            return rows, None, examined
        start = _Place(part, None if part or ask.sort == "time" else last.value, last.key)
    return rows, start, examined


def _sizes() -> Iterator[int]:
    """The windows of a page: WINDOW trajectories in small parts, as few often suffice."""
    for first in range(0, WINDOW, SMALL_WINDOW):
        yield min(SMALL_WINDOW, WINDOW - first)


def _in_window(
    connection: Connection,
    window: Select[Any],
    filters: Sequence[ColumnElement[bool]],
    ask: Search,
    part: int,
    limit: int,
) -> Sequence[Any]:
    t, keys = db.trajectories.c, window.subquery()
    inside = select(t.key).join(keys, keys.c.key == t.key).where(*filters)
    return connection.execute(_with_rows(_ordered(inside, ask, part)).limit(limit + 1)).all()


def _parts(ask: Search, place: _Place | None) -> list[int]:
    """The parts of the order that are left: trajectories with a reward, then those without."""
    scored_only = ask.sort != "reward" or bool(_range(ask))
    parts = [0] if scored_only else [0, 1]
    return [part for part in parts if place is None or part >= place.part]


def _column(ask: Search) -> Any:
    return db.trajectories.c[_COLUMN.get(ask.sort, "key")]


def _base(key: int | None, ask: Search, part: int, start: _Place | None) -> Select[Any]:
    """The keys of a part of the order, after `start`; `key` None: of all runs."""
    t = db.trajectories.c
    query = select(t.key) if key is None else select(t.key).where(t.run_key == key)
    if ask.sort == "reward":
        query = query.where(t.reward.is_(None) if part else t.reward.is_not(None), *_range(ask))
    if start is None:
        return query
    if part or ask.sort == "time":
        return query.where(t.key < start.key if ask.descending else t.key > start.key)
    column = _column(ask)
    here = tuple_(column, t.key)
    there = tuple_(literal(start.value, column.type), literal(start.key, t.key.type))
    return query.where(here < there if ask.descending else here > there)


def _ordered(query: Select[Any], ask: Search, part: int) -> Select[Any]:
    t = db.trajectories.c
    columns = [t.key] if part or ask.sort == "time" else [_column(ask), t.key]
    return query.order_by(*(c.desc() if ask.descending else c.asc() for c in columns))


def _with_rows(query: Select[Any]) -> Select[Any]:
    """The columns of `trajectory_row`, for a query of keys."""
    t, s = db.trajectories.c, db.steps.c
    columns = [t[name] for name in TRAJECTORY_COLUMNS]
    return query.join(db.steps, s.key == t.step_key).add_columns(s.stage, s.step, *columns)


def _filters(key: int, ask: Search) -> list[ColumnElement[bool]]:
    t = db.trajectories.c
    found: list[ColumnElement[bool]] = [*_steps(key, ask)]
    if ask.group is not None:
        found.append(t.group_id == ask.group)
    if ask.status is not None:
        found.append(t.status == ask.status.value)
    if ask.tool is not None:
        found.append(_called(key, ask.tool))
    if ask.sort != "reward":
        found += _range(ask)
    if ask.dropped is not None:
        found.append(t.dropped.is_not(None) if ask.dropped else t.dropped.is_(None))
    if ask.text:
        columns = (t.id, t.task_id, t.error, t.dropped)
        found.append(or_(*(column.contains(ask.text, autoescape=True) for column in columns)))
    return found


def _range(ask: Search) -> list[ColumnElement[bool]]:
    """The range of rewards, without NaN, which is greater than every number."""
    reward = db.trajectories.c.reward
    if ask.min_reward is None and ask.max_reward is None:
        return []
    low = [] if ask.min_reward is None else [reward >= ask.min_reward]
    return [*low, reward <= (math.inf if ask.max_reward is None else ask.max_reward)]


def _steps(key: int, ask: Search) -> Iterator[ColumnElement[bool]]:
    if ask.stage is None and ask.step is None:
        return
    s, t = db.steps.c, db.trajectories.c
    where = [s.run_key == key]
    if ask.stage is not None:
        where.append(s.stage == ask.stage)
    if ask.step is not None:
        where.append(s.step == ask.step)
    yield t.step_key.in_(select(s.key).where(*where))


def _called(key: int, tool: str) -> ColumnElement[bool]:
    c, t = db.tool_calls.c, db.trajectories.c
    return exists().where(c.run_key == key, c.tool == tool, c.trajectory_key == t.key)


def _selected(connection: Connection, run: int, ask: Search) -> ColumnElement[bool] | None:
    """A condition that few trajectories meet, and an index finds; None where there is none."""
    t, c = db.trajectories.c, db.tool_calls.c
    candidates: list[Select[Any]] = []
    if ask.text:
        candidates.append(select(t.key).where(t.run_key == run, t.id == ask.text))
    if ask.step is not None:
        candidates.append(select(t.key).where(*_steps(run, ask)))
    if ask.status is not None:
        candidates.append(select(t.key).where(t.run_key == run, t.status == ask.status.value))
    if ask.tool is not None:
        called = select(c.trajectory_key).where(c.run_key == run, c.tool == ask.tool)
        candidates.append(called)
    for number, candidate in enumerate(candidates):
        if ask.text and not number and connection.scalar(candidate.limit(1)) is None:
            continue  # `text` is no id
        if connection.scalar(candidate.limit(1).offset(MAX_SELECTED)) is None:
            return t.key.in_(candidate)
    return None


def _tools_of(connection: Connection, keys: Sequence[int]) -> list[dict[str, int]]:
    c = db.tool_calls.c
    found: dict[int, dict[str, int]] = {key: {} for key in keys}
    query = select(c.trajectory_key, c.tool, c.num_calls).where(c.trajectory_key.in_(keys))
    for row in connection.execute(query.order_by(c.num_calls.desc(), c.tool)) if keys else ():
        found[row.trajectory_key][row.tool] = row.num_calls
    return [found[key] for key in keys]


def _place_of(row: Any, ask: Search, part: int) -> _Place:
    value = None if part or ask.sort == "time" else getattr(row, _COLUMN[ask.sort])
    return _Place(part, value, row.key)


def _encoded(ask: Search, place: _Place) -> str:
    text = encode_json([ask.sort, ask.descending, *place])
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _decoded(ask: Search) -> _Place:
    """Errors: ConfigError where `after` is no place in this order."""
    after = ask.after or ""
    try:
        value = decode_json(base64.urlsafe_b64decode(after + "=" * (-len(after) % 4)))
        sort, descending, part, number, key = value
        whole = type(number) is int and abs(number) < 2**62
        numeric = number is None or isinstance(number, float) or whole
        inner = not part and ask.sort in _COLUMN
        valid = (
            (sort, descending) == (ask.sort, ask.descending)
            and part in _parts(ask, None)
            and type(key) is int
            and 0 <= key < 2**63
            and numeric
            and (number is not None) == inner
        )
    except (ValueError, TypeError, binascii.Error, RecursionError):
        valid = False
    if not valid:
        raise ConfigError("after: not the `next` of a page in this order: leave it out to restart")
    return _Place(int(part), number, key)


assert set(_COLUMN) | {"time"} == set(get_args(Sort))
