"""Serialisation of a step, to move a run from one store to another.

The format is zlib over JSON with the tables' column names. Equal steps give equal bytes,
independent of database keys.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import astuple
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, select

from ludus.core.errors import StoreError
from ludus.store import schema as db
from ludus.store.codec import Tree, decode_json, encode_json
from ludus.store.recording import StepWriter

_KEYS = {"key", "run_key", "step_key", "group_key"}


def read_step(connection: Connection, run_key: int, stage: str, step: int) -> StepWriter:
    """Returns a recorded step as a StepWriter. Errors: StoreError where there is none."""
    s = db.steps.c
    query = select(db.steps).where(s.run_key == run_key, s.stage == stage, s.step == step)
    head = connection.execute(query).mappings().one_or_none()
    if head is None:
        raise StoreError(f"the run has no step {step} of {stage}")
    groups = _under(connection, db.groups, head["key"])
    played = _under(connection, db.trajectories, head["key"])
    dropped = _under(connection, db.dropped, head["key"])
    number = {row["key"]: index for index, row in enumerate(groups)}
    stored = connection.execute(
        select(db.trees).join(db.trajectories).where(db.trajectories.c.step_key == head["key"])
    )
    trees = {
        t.trajectory_key: Tree(t.segments, t.token_ids, t.logprobs, t.advantages, t.entropies)
        for t in stored
    }
    tools: dict[int, dict[str, int]] = {row["key"]: {} for row in played}
    c = db.tool_calls.c
    for call in connection.execute(
        select(c.trajectory_key, c.tool, c.num_calls)
        .join(db.trajectories, db.trajectories.c.key == c.trajectory_key)
        .where(db.trajectories.c.step_key == head["key"])
        .order_by(c.trajectory_key, c.tool)
    ):
        tools[call.trajectory_key][call.tool] = call.num_calls
    return StepWriter(
        _values(head),
        [_values(row) for row in groups],
        [_values(row) for row in played],
        [number[row["group_key"]] for row in played],
        [trees[row["key"]] for row in played],
        [(row["trajectory_id"], row["reason"]) for row in dropped],
        [tools[row["key"]] for row in played],
    )


def encode_step(step: StepWriter) -> bytes:
    """Returns the step as bytes, for `decode_step`."""
    content = {
        "head": {**step.head, "started": step.head["started"].timestamp()},
        "groups": step.groups,
        "trajectories": step.trajectories,
        "group_of": step.group_of,
        "trees": [[_to_text(part) for part in astuple(t)] for t in step.trees],
        "dropped": step.dropped,
        "tools": [dict(sorted(tools.items())) for tools in step.tools],
    }
    return zlib.compress(encode_json(content, "the step").encode("ascii"))


def decode_step(data: bytes) -> StepWriter:
    """Returns the step of `encode_step`'s bytes. Errors: StoreError for other bytes."""
    try:
        content: dict[str, Any] = decode_json(zlib.decompress(data))
        head = content["head"]
        return StepWriter(
            {**head, "started": datetime.fromtimestamp(head["started"], UTC)},
            content["groups"],
            content["trajectories"],
            content["group_of"],
            [Tree(*(_to_bytes(part) for part in parts)) for parts in content["trees"]],
            [(id_, reason) for id_, reason in content["dropped"]],
            content.get("tools") or [{} for _ in content["trajectories"]],  # none in older bytes
        )
    except (zlib.error, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"these bytes are not a step of a run ({type(error).__name__}: {error})"
        ) from error


def _to_text(part: bytes | None) -> str | None:
    return None if part is None else base64.b64encode(part).decode()


def _to_bytes(text: str | None) -> Any:
    return None if text is None else base64.b64decode(text)


def _under(connection: Connection, table: Any, step_key: int) -> Any:
    query = select(table).where(table.c.step_key == step_key).order_by(table.c.key)
    return connection.execute(query).mappings().all()


def _values(row: Any) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in _KEYS}
