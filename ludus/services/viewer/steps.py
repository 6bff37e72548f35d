"""Steps: what they gave, and why a step had no gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, select

from ludus.core.errors import ConfigError
from ludus.core.types import WITHOUT_TURN
from ludus.services.viewer.rollout import clipped, is_training, number
from ludus.store import RunStore
from ludus.store import schema as db
from ludus.store.store import run_key

MAX_STEPS = 100
MAX_GROUPS = 200
MAX_ROWS = 20_000
MAX_REASONS = 30
SHOWN = (
    "rollout/reward", "rollout/success", "rollout/episodes", "rollout/dropped",
    "rollout/groups_with_signal", "train/loss", "train/grad_norm", "train/optimizer_steps",
    "time/step_s", "time/tokens_per_s", "evaluate/success", "evaluate/score",
)  # fmt: skip
"""Metrics in the list of steps."""


def list_steps(store: RunStore, run: str, stage: str | None, before: int | None) -> dict[str, Any]:
    """Returns the newest steps, newest first, and the `before` of the next page."""
    s = db.steps.c

    def work(connection: Connection) -> dict[str, Any]:
        query = select(s.key, s.stage, s.step, s.started, s.seconds, s.policy_version, s.metrics)
        query = query.where(s.run_key == run_key(connection, run))
        if stage is not None:
            query = query.where(s.stage == stage)
        if before is not None:
            query = query.where(s.key < before)
        rows = connection.execute(query.order_by(s.key.desc()).limit(MAX_STEPS + 1)).all()
        steps = [
            {
                "stage": row.stage,
                "step": row.step,
                "started": row.started.timestamp(),
                "seconds": number(row.seconds),
                "policy_version": row.policy_version,
                "metrics": {n: number(row.metrics[n]) for n in SHOWN if n in row.metrics},
                "gradient": has_gradient(row.stage, row.metrics),
            }
            for row in rows[:MAX_STEPS]
        ]
        return {"steps": steps, "next": rows[MAX_STEPS - 1].key if len(rows) > MAX_STEPS else None}

    return store.read(work)


def has_gradient(stage: str, metrics: Mapping[str, Any]) -> bool | None:
    """False for a training step that changed no weight; None where the metrics do not tell."""
    if not is_training(stage) or "train/optimizer_steps" not in metrics:
        return None
    if not metrics["train/optimizer_steps"]:
        return False
    return bool(metrics.get("train/grad_norm", 1.0))


def describe_step(store: RunStore, run: str, stage: str, step: int) -> dict[str, Any]:
    """Returns a step's metrics, its groups, the reasons of exclusion, and a verdict.

    Errors: ConfigError for a step that is not there.
    """
    s, t, d, g = db.steps.c, db.trajectories.c, db.dropped.c, db.groups.c

    def work(connection: Connection) -> dict[str, Any]:
        where = (s.run_key == run_key(connection, run), s.stage == stage, s.step == step)
        head = connection.execute(select(db.steps).where(*where)).one_or_none()
        if head is None:
            raise ConfigError(f"run {run!r} has no step {step} of {stage!r}")
        columns = (t.id, t.group_key, t.task_id, t.status, t.reward, t.dropped, t.num_turns)
        played = select(*columns).where(t.step_key == head.key).order_by(t.key).limit(MAX_ROWS)
        rows = connection.execute(played).all()
        reasons = list(connection.scalars(select(d.reason).where(d.step_key == head.key)))
        names = select(g.key, g.id).where(g.step_key == head.key).order_by(g.key)
        groups = connection.execute(names.limit(MAX_GROUPS + 1)).all()
        return {
            "stage": stage,
            "step": step,
            "started": head.started.timestamp(),
            "seconds": number(head.seconds),
            "policy_version": head.policy_version,
            "metrics": {name: number(value) for name, value in head.metrics.items()},
            "gradient": has_gradient(stage, head.metrics),
            "verdict": verdict(stage, head.metrics, rows, reasons),
            "reasons": _reasons(reasons),
            "statuses": dict(Counter(row.status for row in rows).most_common()),
            "groups": _groups(rows, groups[:MAX_GROUPS]),
            "more_groups": len(groups) > MAX_GROUPS,
        }

    return store.read(work)


def _is_dropped(row: Any) -> bool:
    return row.dropped not in (None, WITHOUT_TURN)


def verdict(stage: str, metrics: Mapping[str, Any], rows: Any, reasons: list[str]) -> list[str]:
    """Returns sentences that say whether the step trained, and why not."""
    if not is_training(stage):
        return ["This stage trains nothing."]
    trained = has_gradient(stage, metrics)
    told = []
    if trained is False:
        no_step = not metrics.get("train/optimizer_steps")
        told.append(
            "No gradient: no row was left to train on, so no optimizer step was taken."
            if no_step
            else "No gradient: its norm is 0, so the optimizer step changed nothing but momentum."
        )
    told += _signal(rows)
    num_dropped = sum(_is_dropped(row) for row in rows)
    if rows and num_dropped:
        told.append(f"{num_dropped} of {len(rows)} rollouts were dropped.")
    told += [f"{count} × {reason}" for reason, count in _reasons(reasons)[:5]]
    if rows and trained is False and not reasons:
        told.append("Every rollout's advantage is 0: the rewards of each group are equal.")
    return told


def _signal(rows: Any) -> list[str]:
    """Says how many groups have equal rewards, if groups have several trajectories."""
    rewards: dict[int, set[Any]] = {}
    sizes = Counter(row.group_key for row in rows)
    for row in rows:
        rewards.setdefault(row.group_key, set()).add(row.reward)
    compared = [key for key, size in sizes.items() if size > 1]
    equal = sum(len(rewards[key]) == 1 for key in compared)
    if not equal:
        return []
    return [f"{equal} of {len(compared)} groups have no signal: their rewards are equal."]


def _reasons(reasons: list[str]) -> list[tuple[str, int]]:
    """Reasons by their kind, the text before the colon, with one example of each."""
    kinds = Counter(reason.partition(":")[0] for reason in reasons)
    examples = {reason.partition(":")[0]: reason for reason in reversed(reasons)}
    most = kinds.most_common(MAX_REASONS)
    return [(clipped(examples[kind], 500), count) for kind, count in most]


def _groups(rows: Any, groups: Any) -> list[dict[str, Any]]:
    members: dict[int, list[Any]] = {group.key: [] for group in groups}
    for row in rows:
        if row.group_key in members:
            members[row.group_key].append(row)
    return [
        {
            "id": group.id,
            "task": clipped(members[group.key][0].task_id, 300) if members[group.key] else "",
            "signal": len({row.reward for row in members[group.key]}) > 1,
            "reasons": _reasons([row.dropped for row in members[group.key] if _is_dropped(row)])[
                :2
            ],
            "members": [
                {
                    "id": row.id,
                    "status": row.status,
                    "reward": number(row.reward),
                    "turns": row.num_turns,
                    "dropped": _is_dropped(row),
                }
                for row in members[group.key]
            ],
        }
        for group in groups
    ]
