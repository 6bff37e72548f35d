"""Queries, and the conversion of their results into rows and carriers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import Connection, Row, Select, case, func, select

from ludus.core.types import Status, Task, Trajectory
from ludus.store import schema as db
from ludus.store.codec import Tree, unpack_tree
from ludus.store.rows import (
    TRAJECTORY_COLUMNS,
    Record,
    RunRow,
    RunStatus,
    StageSummary,
    TrajectoryRow,
)

_NAN = float("nan")

TREE_COLUMNS = [field.name for field in fields(Tree)]

ELAPSED = "time/elapsed_s"
"""Metric of each step: the run's wall time so far, in seconds, without pauses."""


def runs(connection: Connection, key: int | None = None) -> list[RunRow]:
    """Returns all runs in order of creation, or the run with this key."""
    r, s = db.runs.c, db.steps.c
    heads = select(db.runs).order_by(r.key)
    stages = (
        select(s.run_key, s.stage, func.max(s.step).label("step"), func.max(s.started).label("at"))
        .group_by(s.run_key, s.stage)
        .order_by(func.min(s.key))
    )
    newest = select(s.run_key, s.metrics).where(
        s.key.in_(select(func.max(s.key)).group_by(s.run_key))
    )
    if key is not None:
        heads, stages = heads.where(r.key == key), stages.where(s.run_key == key)
        newest = newest.where(s.run_key == key)
    all_stages = connection.execute(stages).all()
    elapsed = {row.run_key: row.metrics.get(ELAPSED) for row in connection.execute(newest)}
    rows = []
    for row in connection.execute(heads):
        run_stages = [stage for stage in all_stages if stage.run_key == row.key]
        steps = {stage.stage: stage.step for stage in run_stages}
        last_step = max((stage.at for stage in run_stages), default=None)
        columns = {name: value for name, value in row._mapping.items() if name != "key"}
        columns["status"] = RunStatus(row.status)
        columns["elapsed_s"] = took(row) if row.finished else elapsed.get(row.key)
        rows.append(RunRow(**columns, stages=steps, last_step=last_step))
    return rows


def took(row: Any) -> float | None:
    """Wall time of a run's row from start to end; None while it runs. A row of an older ludus has
    the time of its pauses too."""
    if row.finished is None or row.elapsed_s is not None:
        return None if row.elapsed_s is None else float(row.elapsed_s)
    return float((row.finished - row.created).total_seconds())


def summary(connection: Connection, run_key: int) -> list[StageSummary]:
    """Returns the stages of a run, in order of their start."""
    s, t = db.steps.c, db.trajectories.c
    scored = case((t.reward != _NAN, t.reward))
    stages = connection.execute(
        select(s.stage, func.count().label("num_steps"), func.max(s.step).label("last"))
        .where(s.run_key == run_key)
        .group_by(s.stage)
        .order_by(func.min(s.key))
    ).all()
    ends = connection.execute(
        select(
            s.stage,
            t.role,
            t.status,
            func.sum(case((t.num_turns == 0, 1), else_=0)).label("num_silent"),
            func.count().label("num"),
            func.count(scored).label("num_scored"),
            func.sum(scored).label("total"),
        )
        .join_from(db.trajectories, db.steps)
        .where(s.run_key == run_key)
        .group_by(s.stage, t.role, t.status)
        .order_by(t.status)
    ).all()
    summaries = []
    for stage in stages:
        counts = [end for end in ends if end.stage == stage.stage]
        num_scored = sum(end.num_scored for end in counts)
        total = sum(end.total for end in counts if end.num_scored)
        statuses: Counter[Status] = Counter()
        without_turn = sum(end.num_silent for end in counts if Status(end.status).trainable)
        for end in counts:
            status = Status(end.status)
            if played := end.num - (end.num_silent if status.trainable else 0):
                statuses[status] += played
        summaries.append(
            StageSummary(
                stage=stage.stage,
                num_steps=stage.num_steps,
                last_step=stage.last,
                num_trajectories=sum(end.num for end in counts),
                mean_reward=total / num_scored if num_scored else None,
                statuses=statuses,
                rewards=_mean_rewards(counts),
                num_without_turn=without_turn,
            )
        )
    return summaries


def _mean_rewards(counts: Sequence[Any]) -> dict[str, float | None]:
    """The mean reward of each role."""
    means: dict[str, float | None] = {}
    for role in sorted({end.role for end in counts}):
        own = [end for end in counts if end.role == role and end.num_scored]
        num = sum(end.num_scored for end in own)
        means[role] = sum(end.total for end in own) / num if num else None
    return means


def trajectories(
    run_key: int,
    stage: str | None = None,
    step: int | None = None,
    status: Status | None = None,
    min_reward: float | None = None,
) -> Select[Any]:
    """Returns a query of trajectories without their trees, for `trajectory_row`."""
    s, t = db.steps.c, db.trajectories.c
    columns = (t[name] for name in TRAJECTORY_COLUMNS)
    query = select(t.key, t.group_key, s.stage, s.step, *columns).join_from(
        db.trajectories, db.steps
    )
    if step is None:  # the run's index is in the order of the keys
        query = query.where(t.run_key == run_key)
    else:
        query = query.where(s.run_key == run_key, s.step == step)
    if stage is not None:
        query = query.where(s.stage == stage)
    if status is not None:
        query = query.where(t.status == status.value)
    if min_reward is not None:
        query = query.where(t.reward >= min_reward, t.reward != _NAN)
    return query


def with_trees(query: Select[Any]) -> Select[Any]:
    """Returns the query of `trajectories` with the additional columns of `record`."""
    tree = db.trees.c
    return (
        query.join(db.groups, db.groups.c.key == db.trajectories.c.group_key)
        .join(db.trees, tree.trajectory_key == db.trajectories.c.key)
        .add_columns(db.groups.c.task, *(tree[name] for name in TREE_COLUMNS))
    )


def trajectory_row(row: Row[Any]) -> TrajectoryRow:
    """Converts a row of `trajectories`."""
    values = {name: getattr(row, name) for name in TRAJECTORY_COLUMNS}
    values["status"] = Status(row.status)
    return TrajectoryRow(row.stage, row.step, **values)


def record(row: Row[Any]) -> Record:
    """Converts a row of `with_trees`. Errors: StoreError for damaged bytes."""
    head = trajectory_row(row)
    tree = Tree(*(getattr(row, name) for name in TREE_COLUMNS))
    trajectory = Trajectory(
        id=head.id,
        group_id=head.group_id,
        task_id=head.task_id,
        segments=unpack_tree(tree, f"trajectory {head.id!r} of {head.stage} step {head.step}"),
        role=head.role,
        policy=head.policy,
        status=head.status,
        reward=head.reward,
        scores=dict(head.scores),
        explanation=head.explanation,
        error=head.error,
        dropped=head.dropped,
        metrics=dict(head.metrics),
    )
    return Record(head, Task.model_validate(row.task), trajectory)
