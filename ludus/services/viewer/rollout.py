"""One rollout as the page shows it: segments with their tokens, cut to a number of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from ludus.core.types import WITHOUT_TURN, Message, Segment, Trajectory
from ludus.core.versions import spell_runs
from ludus.services.viewer.texts import Decode, token_texts
from ludus.store import RunStore
from ludus.store import schema as db
from ludus.store.rows import Record, TrajectoryRow
from ludus.store.store import run_key

MAX_TOKENS = 4000
"""Tokens of an answer; the page asks for more."""
MAX_SEGMENTS = 400
MAX_CHARS = 20_000
"""Characters of a text that is not shown token by token."""
MAX_MEMBERS = 256
MAX_TREE = 4000


@dataclass(frozen=True, slots=True)
class Cursor:
    """The first token to show: a segment, and an offset in it."""

    segment: int = 0
    offset: int = 0


def describe(store: RunStore, run: str, id_: str, decode: Decode | None) -> dict[str, Any]:
    """Returns the rollout's facts, its tree, its first tokens, its group, and why it gave no
    gradient. Errors: UnknownName, StoreError."""
    record = store.record(run, id_)
    row, trajectory = record.row, record.trajectory
    return {
        "run": run,
        "row": row_of(row),
        "scores": _numbers(row.scores),
        "metrics": _numbers(row.metrics),
        "explanation": clipped(row.explanation or ""),
        "task": _task(record),
        "why": why_untrained(record),
        "trains": trains(row),
        "observation_weight": store.run(run).observation_weight(row.stage),
        "has": {
            "logprob": any(s.logprobs for s in trajectory.segments),
            "entropy": any(s.entropies for s in trajectory.segments),
            "advantage": any(s.advantages for s in trajectory.segments),
            "text": decode is not None,
        },
        "tree": [
            [s.parent, len(s.token_ids), s.sampled, _role(s)]
            for s in trajectory.segments[:MAX_TREE]
        ],
        "leaves": trajectory.leaves()[:MAX_TREE],
        "num_segments": len(trajectory.segments),
        "group": _group(store, run, row),
        **part(trajectory, Cursor(), decode),
    }


def part(trajectory: Trajectory, start: Cursor, decode: Decode | None) -> dict[str, Any]:
    """Returns segments from `start` on, with at most MAX_TOKENS tokens, and where to continue."""
    shown: list[dict[str, Any]] = []
    left, offset, index = MAX_TOKENS, start.offset, start.segment
    segments = trajectory.segments
    while index < len(segments) and len(shown) < MAX_SEGMENTS and left > 0:
        segment = segments[index]
        end = min(len(segment.token_ids), offset + left)
        shown.append(_segment(index, segment, offset, end, decode))
        left -= max(1, end - offset)
        if end < len(segment.token_ids):
            return {"segments": shown, "next": {"segment": index, "offset": end}}
        index, offset = index + 1, 0
    following = {"segment": index, "offset": 0} if index < len(segments) else None
    return {"segments": shown, "next": following}


def _segment(
    index: int, segment: Segment, start: int, end: int, decode: Decode | None
) -> dict[str, Any]:
    ids = segment.token_ids[start:end]
    shown: dict[str, Any] = {
        "index": index,
        "parent": segment.parent,
        "role": _role(segment),
        "sampled": segment.sampled,
        "offset": start,
        "num_tokens": len(segment.token_ids),
        "ids": ids,
        "texts": token_texts(decode, ids) if decode is not None else None,
        "logprobs": _cut(segment.logprobs, start, end),
        "entropies": _cut(segment.entropies, start, end),
        "advantages": _cut(segment.advantages, start, end),
    }
    if start:
        return shown
    message = segment.message
    return shown | {
        "versions": spell_runs(segment.runs) if segment.sampled and segment.runs else None,
        "reward": number(segment.reward),
        "metrics": _numbers(segment.metrics),
        "mean_logprob": _mean(segment.logprobs),
        "constrained": segment.constraint is not None,
        "message": None if message is None else message_of(message),
    }


def message_of(message: Message) -> dict[str, Any]:
    """A message with its texts clipped."""
    return {
        "role": message.role,
        "content": clipped(message.content),
        "thinking": clipped(message.thinking or ""),
        "name": clipped(message.name or "", 200),
        "calls": [
            {"name": clipped(call.name, 200), "arguments": _arguments(call.arguments)}
            for call in message.tool_calls[:50]
        ],
    }


def _arguments(arguments: dict[str, Any]) -> list[list[str]]:
    """Names and values; text as it is, other values as Python writes them."""
    return [
        [clipped(str(name), 200), clipped(value if isinstance(value, str) else repr(value))]
        for name, value in list(arguments.items())[:50]
    ]


def row_of(row: TrajectoryRow, tools: dict[str, int] | None = None) -> dict[str, Any]:
    """A trajectory in a list."""
    return {
        "id": row.id,
        "stage": row.stage,
        "step": row.step,
        "group": row.group_id,
        "task": clipped(row.task_id, 300),
        "tier": row.tier,
        "role": row.role,
        "policy": row.policy,
        "status": row.status.value,
        "reward": number(row.reward),
        "turns": row.num_turns,
        "tokens": row.num_tokens,
        "sampled": row.num_sampled_tokens,
        "error": clipped(row.error or "", 2000),
        "dropped": clipped(row.dropped or "", 2000),
        **({} if tools is None else {"tools": tools}),
    }


def is_training(stage: str) -> bool:
    """True for a stage whose steps train."""
    return "/" not in stage


def trains(row: TrajectoryRow) -> bool:
    """True if the rollout's sampled tokens had a loss."""
    return is_training(row.stage) and row.dropped is None and row.status.trainable


def why_untrained(record: Record) -> list[str]:
    """Returns why the rollout gave no gradient, or none that matters; empty where it trained."""
    row, trajectory = record.row, record.trajectory
    if row.stage.startswith("evaluate/"):
        return ["An evaluation: its rollouts are not trained on."]
    reasons = []
    if row.dropped:
        dropped = "" if row.dropped == WITHOUT_TURN else "Dropped: "
        reasons.append(f"{dropped}{clipped(row.dropped, 2000)}")
    elif not row.status.trainable:
        reasons.append(f"Its status, {row.status.value}, is not trained on.")
    if row.error and row.error not in (row.dropped or ""):
        reasons.append(f"Error: {clipped(row.error, 2000)}")
    advantages = [x for s in trajectory.segments for x in s.advantages or ()]
    if not reasons and advantages and not any(advantages):
        reasons.append(
            "Its advantage is 0 for every token: its reward equals the baseline of its group, so "
            "only terms of the loss without an advantage, such as an entropy bonus, train on it."
        )
    return reasons


def _task(record: Record) -> dict[str, Any]:
    task = record.task
    return {
        "id": clipped(task.id, 300),
        "tier": task.tier,
        "source": task.source,
        "answer": None if task.answer is None else clipped(str(task.answer), 2000),
        "data": clipped(repr(task.data), 4000) if task.data else None,
    }


def _group(store: RunStore, run: str, row: TrajectoryRow) -> list[dict[str, Any]]:
    """The rollouts of the same group, in the same step."""
    t, s = db.trajectories.c, db.steps.c

    def work(connection: Connection) -> list[dict[str, Any]]:
        step = select(s.key).where(
            s.run_key == run_key(connection, run), s.stage == row.stage, s.step == row.step
        )
        query = (
            select(t.id, t.status, t.reward, t.dropped)
            .where(t.step_key == step.scalar_subquery(), t.group_id == row.group_id)
            .order_by(t.key)
            .limit(MAX_MEMBERS)
        )
        return [
            {
                "id": member.id,
                "status": member.status,
                "reward": number(member.reward),
                "dropped": member.dropped not in (None, WITHOUT_TURN),
            }
            for member in connection.execute(query)
        ]

    return store.read(work)


def _role(segment: Segment) -> str:
    if segment.message is not None:
        return segment.message.role
    return "assistant" if segment.sampled else "given"


def clipped(text: str, limit: int = MAX_CHARS) -> str:
    """Text of at most `limit` characters; says how many were cut."""
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more)"


def number(value: float | None) -> float | str | None:
    """A number for strict JSON, with six digits: NaN and infinities as text."""
    if value is None:
        return None
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def _numbers(values: Any) -> dict[str, float | str | None]:
    return {clipped(name, 200): number(value) for name, value in list(values.items())[:200]}


def _cut(values: list[float] | None, start: int, end: int) -> list[float | str | None] | None:
    """Values with four digits, as the page shows them."""
    if values is None:
        return None
    return [
        float(f"{value:.4g}") if math.isfinite(value) else str(value) for value in values[start:end]
    ]


def _mean(values: list[float] | None) -> float | str | None:
    return number(math.fsum(values) / len(values)) if values else None
