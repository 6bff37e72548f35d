"""Lists of episodes: those of a step, and the failures of an evaluation, by tier and turns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from ludus.core.errors import ConfigError, counted
from ludus.store.rows import NO_TURN, RunRow, TrajectoryRow
from ludus.store.show.tables import make_table, number, rule
from ludus.store.store import RunStore

NEWEST = 15
"""Rows of a list that is cut."""

LEAST = 12
"""Narrowest column of text that wraps."""

EXACT = 10
"""Different numbers of turns that have a row each; where there are more, a row has those to the
next power of two."""

PLACE = re.compile(r"(?P<stage>.+?)(?:-(?P<step>[0-9]{1,9})(?:/g(?P<group>[0-9]{1,9}))?)?")
"""The id of a step or of a group, or a stage for its last step; that of a trajectory goes on."""

SAID = 5
"""Last messages of failures that are counted."""

MOST_READ = 2000
"""Episodes of an evaluation above which their messages are not read."""


@dataclass(frozen=True, slots=True)
class Place:
    """A step, or a group of it."""

    stage: str
    step: int
    group: int | None = None

    def __str__(self) -> str:
        step = f"{self.stage}-{self.step:06d}"
        return step if self.group is None else f"{step}/g{self.group:04d}"


def find_place(store: RunStore, run_id: str, text: str) -> Place | None:
    """Returns the place that an id names; None where the run has no such stage."""
    stages = store.run(run_id).stages
    found = PLACE.fullmatch(text)
    if found is None or found["stage"] not in stages:
        return None
    if found["step"] is None:
        return Place(found["stage"], stages[found["stage"]])
    group = found["group"]
    return Place(found["stage"], int(found["step"]), None if group is None else int(group))


def last_stage(run: RunRow) -> str:
    """The last stage that trained, by what is recorded: a resumed run may have RL that the
    configuration it began with had not."""
    return "RL" if "rl" in run.stages else "SFT"


def newest_evaluation(run: RunRow) -> Place | None:
    """Returns the newest evaluation on held-out tasks; None: there is none."""
    for stage in ("evaluate/after", "evaluate/rl", "evaluate/before", "evaluate/start"):
        if stage in run.stages:
            return Place(stage, run.stages[stage])
    return None


def render_step(
    store: RunStore, run_id: str, place: str | None, *, failures: bool = False
) -> RenderableType:
    """Returns the episodes of a step or group.

    Args:
        place: its id; None: that of the newest evaluation.
        failures: those without a score, then those that failed, alone.

    Errors: UnknownName for a run; ConfigError for a place without an episode.
    """
    run = store.run(run_id)
    at = newest_evaluation(run) if place is None else find_place(store, run_id, place)
    if at is None:
        raise ConfigError(f"run {run_id} has no evaluation on held-out tasks: name a step")
    rows = [
        row
        for row in store.trajectories(run_id, at.stage, at.step)
        if at.group is None or row.id.startswith(f"{at}/")
    ]
    if not rows:
        raise ConfigError(f"run {run_id} has no episodes at {at}: {_known(store, run, at)}")
    failed = [row for row in rows if row.failed]
    unscored = [row for row in rows if row.unscored]
    chosen = unscored + failed if failures else rows
    number = sum(not row.without_turn for row in rows)
    told = f"{at}: {counted(number, 'episode')}, {len(failed):,} failed"
    told += f", {len(unscored):,} without a score" if unscored else ""
    return Group(rule(told), trajectory_table(chosen)) if chosen else rule(told)


def _known(store: RunStore, run: RunRow, at: Place) -> str:
    """The numbers of the groups of a step, or of the steps of its stage, in words."""
    groups = len({row.group_id for row in store.trajectories(run.id, at.stage, at.step)})
    if at.group is not None and groups:
        return f"the groups of that step are g0000 to g{groups - 1:04d}"
    return f"the last step of {at.stage} is {run.stages[at.stage]}"


def render_failures(store: RunStore, run: RunRow) -> list[RenderableType]:
    """Returns the failures of the newest evaluation: by tier and by turns where they differ, and
    the first of them; empty where nothing failed."""
    at = newest_evaluation(run)
    if at is None:
        return []
    rows = [
        row
        for row in store.trajectories(run.id, at.stage, at.step)
        if row.reward is not None and not row.without_turn
    ]
    failures = [row for row in rows if row.failed]
    if not failures:
        return []
    when = {
        "evaluate/start": "before SFT",
        "evaluate/before": "before RL",
        "evaluate/rl": f"at RL step {at.step}",
    }.get(at.stage, f"after {last_stage(run)}")
    parts: list[RenderableType] = [
        rule(f"held-out failures {when}: {len(failures):,} of {counted(len(rows), 'episode')}")
    ]
    for name, key in (("tier", _tier), ("turns", _turns_of(rows))):
        table = _shares(name, rows, key)
        if len(table) > 1:
            parts += [make_table((name, "episodes", "failed", "share", "their ends"), table)]
    if len(rows) <= MOST_READ and (said := _last_messages(store, run.id, at)):
        parts.append(make_table(("their last message", "failed"), said))
    parts.append(trajectory_table(failures[:NEWEST]))
    if len(failures) > NEWEST:
        hint = f"ludus show {run.id} --failed lists all {len(failures):,}"
        parts.append(Text(hint, "dim"))
    return parts


def _last_messages(store: RunStore, run_id: str, at: Place) -> list[tuple[str, str]]:
    """The environment's last messages of failed episodes, the most frequent first; empty where
    each is different."""
    counts: Counter[str] = Counter()
    for record in store.records(run_id, at.stage, at.step):
        last = record.trajectory.segments[-1:] if record.row.failed else []
        for message in (s.message for s in last if s.message and not s.sampled):
            text = " ".join(message.content.split())
            counts[text if len(text) <= 60 else f"{text[:59]}…"] += 1
    found = counts.most_common(SAID)
    return [(text, f"{count:,}") for text, count in found] if found and found[0][1] > 1 else []


def _shares(
    name: str, rows: Sequence[TrajectoryRow], key: Callable[[TrajectoryRow], tuple[float, str]]
) -> list[tuple[str, ...]]:
    """A row for each value of `key`, in its order: episodes, failures, and how these ended."""
    groups: dict[tuple[float, str], list[TrajectoryRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    table: list[tuple[str, ...]] = []
    for (_, label), members in sorted(groups.items()):
        failures = [row for row in members if row.failed]
        ends = Counter(row.status.value for row in failures).most_common()
        table.append(
            (
                label,
                f"{len(members):,}",
                f"{len(failures):,}",
                f"{len(failures) / len(members):.0%}",
                ", ".join(f"{end} {count:,}" for end, count in ends),
            )
        )
    return table


def _tier(row: TrajectoryRow) -> tuple[float, str]:
    return 0.0, row.tier or ""


def _turns_of(rows: Iterable[TrajectoryRow]) -> Callable[[TrajectoryRow], tuple[float, str]]:
    """The row of a number of turns: itself, or the span between two powers of two."""
    if len({row.num_turns for row in rows}) <= EXACT:
        return lambda row: (row.num_turns, str(row.num_turns))

    def span(row: TrajectoryRow) -> tuple[float, str]:
        last = 1 << max(row.num_turns - 1, 0).bit_length()
        first = last // 2 + 1
        return last, f"{first} to {last}" if first < last else str(last)

    return span


@dataclass(frozen=True, slots=True)
class _Listed:
    """A table of trajectories. Ids stay in one piece: where there is no room for both, the task
    stands below its trajectory."""

    columns: Mapping[str, Sequence[str]]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        columns = dict(self.columns)
        room = options.max_width
        for name, cells in columns.items():
            room -= LEAST if name == "dropped" else _width((name, *cells)) + 2
        if room < 0:
            pairs = zip(columns.pop("trajectory"), columns.pop("task"), strict=True)
            columns = {"trajectory, task": [f"{id}\n  {task}" for id, task in pairs], **columns}
        table = make_table(list(columns), zip(*columns.values(), strict=True))
        needed = sum(_width((name, *cells)) + 2 for name, cells in columns.items())
        fits = needed <= options.max_width + 2 or "dropped" in columns
        for column in table.columns:  # where nothing fits, folded text is better than none
            column.no_wrap = fits and column.header != "dropped"
        yield table


def _width(cells: Iterable[str]) -> int:
    return max(len(line) for cell in cells for line in cell.split("\n"))


def trajectory_table(rows: list[TrajectoryRow]) -> _Listed:
    """The columns that the ids do not tell already, and `dropped` where a trajectory was."""
    told = all(row.id.startswith(f"{row.stage}-{row.step:06d}/") for row in rows)
    columns: dict[str, list[str]] = {"trajectory": [row.id for row in rows]}
    if not told:
        columns |= {"stage": [row.stage for row in rows], "step": [str(row.step) for row in rows]}
    columns |= {
        "task": [row.task_id for row in rows],
        "status": [NO_TURN if row.without_turn else row.status.value for row in rows],
        "reward": [number(row.reward) or "" for row in rows],
        "turns": [str(row.num_turns) for row in rows],
    }
    dropped = ["" if row.without_turn else row.dropped or "" for row in rows]
    if any(dropped):
        columns["dropped"] = dropped
    return _Listed(columns)
