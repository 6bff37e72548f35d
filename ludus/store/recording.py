"""Convert a step into table rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table, and_, delete, func, insert, select

from ludus.core.types import Group, Task, Trajectory
from ludus.store import schema as db
from ludus.store.codec import Tree, encode_json, pack_tree
from ludus.store.rows import TRAJECTORY_COLUMNS

MAX_TOOLS, MAX_TOOL_CHARS = 64, 100
"""Of a trajectory's `tool_calls`: models write the names."""


@dataclass(frozen=True, slots=True)
class StepWriter:
    """A step encoded before its transaction: encoding errors leave the database unchanged, and the
    lock is held only while writing."""

    head: Mapping[str, Any]
    groups: list[dict[str, Any]]
    trajectories: list[dict[str, Any]]
    group_of: list[int]
    trees: list[Tree]
    dropped: list[tuple[str, str]]
    tools: list[dict[str, int]]

    @classmethod
    def prepare(
        cls,
        where: str,
        head: Mapping[str, Any],
        groups: Sequence[Group],
        dropped: Iterable[tuple[str, str]],
    ) -> StepWriter:
        """Encode a step; `where` names it in errors. Errors: StoreError."""
        played = [(n, t, group.task) for n, group in enumerate(groups) for t in group.trajectories]
        return cls(
            head,
            [_group_values(group, where) for group in groups],
            [_trajectory_values(trajectory, task) for _, trajectory, task in played],
            [n for n, _, _ in played],
            [pack_tree(t.segments, f"{where}, trajectory {t.id!r}") for _, t, _ in played],
            [(t.id, t.dropped) for _, t, _ in played if t.dropped and not t.without_turn]
            + list(dropped),
            [tools_of(t) for _, t, _ in played],
        )

    def write(self, connection: Connection, run_key: int) -> None:
        """Replace the step within the caller's transaction."""
        s = db.steps.c
        same = and_(
            s.run_key == run_key, s.stage == self.head["stage"], s.step == self.head["step"]
        )
        connection.execute(delete(db.steps).where(same))
        [step_key] = _insert(connection, db.steps, [{"run_key": run_key, **self.head}])
        group_keys = _insert(
            connection, db.groups, [{"step_key": step_key, **row} for row in self.groups]
        )
        group_columns = ({"group_key": group_keys[n]} for n in self.group_of)
        keys = _insert(
            connection,
            db.trajectories,
            [
                {"run_key": run_key, "step_key": step_key, **group, **row}
                for group, row in zip(group_columns, self.trajectories, strict=True)
            ],
        )
        trees = [
            {"trajectory_key": key, **tree.columns()}
            for key, tree in zip(keys, self.trees, strict=True)
        ]
        if trees:
            connection.execute(insert(db.trees), trees)
        calls = [
            {"run_key": run_key, "trajectory_key": key, "tool": tool, "num_calls": num_calls}
            for key, tools in zip(keys, self.tools, strict=True)
            for tool, num_calls in tools.items()
        ]
        if calls:
            connection.execute(insert(db.tool_calls), calls)
        dropped = [
            {"step_key": step_key, "trajectory_id": id_, "reason": reason}
            for id_, reason in self.dropped
        ]
        if dropped:
            connection.execute(insert(db.dropped), dropped)


def tools_of(trajectory: Trajectory) -> dict[str, int]:
    """Returns the number of calls of each tool: of the model's calls, else of their results."""
    calls: Counter[str] = Counter()
    results: Counter[str] = Counter()
    for message in (s.message for s in trajectory.segments if s.message is not None):
        if message.tool_calls:
            calls.update(call.name[:MAX_TOOL_CHARS] for call in message.tool_calls)
        if message.role == "tool" and message.name:
            results[message.name[:MAX_TOOL_CHARS]] += 1
    if not calls and not results:
        return {}
    found = calls + Counter({name: n for name, n in results.items() if name not in calls})
    return dict(found.most_common(MAX_TOOLS))


def _insert(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> Sequence[int]:
    """Insert the rows and return their keys, in the rows' order."""
    if not rows:
        return []
    if connection.dialect.name == "sqlite":
        # SQLAlchemy inserts one by one there to know the order. A writer is alone: it can count.
        last = connection.scalar(select(func.max(table.c.key))) or 0
        keys = range(last + 1, last + 1 + len(rows))
        connection.execute(
            insert(table), [{"key": k, **r} for k, r in zip(keys, rows, strict=True)]
        )
        return keys
    query = insert(table).returning(table.c.key, sort_by_parameter_order=True)
    return connection.execute(query, rows).scalars().all()


def _group_values(group: Group, where: str) -> dict[str, Any]:
    task = group.task.model_dump(exclude_defaults=True)
    encode_json(task, f"{where}, task {group.task.id!r}")
    return {"id": group.id, "task": task}


def _trajectory_values(trajectory: Trajectory, task: Task) -> dict[str, Any]:
    values = {name: getattr(trajectory, name) for name in TRAJECTORY_COLUMNS if name != "tier"}
    return values | {
        "tier": task.tier,
        "status": trajectory.status.value,
        "scores": {name: float(value) for name, value in trajectory.scores.items()},
        "metrics": {name: float(value) for name, value in trajectory.metrics.items()},
    }
