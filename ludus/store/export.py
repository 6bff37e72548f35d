"""Export a run as JSON lines, Parquet or an Inspect log, or as SFT data filtered by score.

    what           row
    trajectories   a trajectory: stage and step, status, segments with their tokens
    steps          a step with its metrics
    sft            {"messages": [...], "reward": 1.0, "task_id": "..."}: chat, for `sft.data`; with
                   the task's `tools` and `part` of a mixture, where it has them
    inspect        a sample of an Inspect log, *.eval: see `inspect_log`

SFT data has each conversation once, and none of an evaluation unless `stage` names it: those tasks
are held out.
A non-finite float is "NaN", "Infinity" or "-Infinity" in JSON lines, and a float in Parquet.
Parquet holds values without a fixed schema as JSON text: a segment's `message`, a tool call's
`arguments`. The file is written atomically.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ludus.core.errors import ConfigError, MissingDependency, StoreError, did_you_mean
from ludus.core.files import atomic_file
from ludus.core.types import Message, Segment, Status, Task, Trajectory
from ludus.store.inspect_log import write_inspect_log
from ludus.store.rows import Record, RunRow, TrajectoryRow
from ludus.store.store import RunStore
from ludus.tasks.mixture import part_of

Format = Literal["jsonl", "parquet", "eval"]
What = Literal["trajectories", "steps", "sft", "inspect"]
Decode = Callable[[list[int]], str]

_ROW_GROUP = 500
_HELD_OUT = "held-out evaluation"
_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".eval": "eval",
}


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export.

    `skipped` counts the omitted trajectories by reason, `incomplete` the exported ones by what they
    lack.
    """

    path: Path
    num_rows: int
    skipped: Mapping[str, int]
    incomplete: Mapping[str, int] = field(default_factory=dict)


def export(
    store: RunStore,
    run_id: str,
    path: str | Path,
    *,
    format: str | None = None,
    what: str = "trajectories",
    min_score: float | None = None,
    stage: str | None = None,
    step: int | None = None,
    status: Status | None = None,
    decode: Decode | None = None,
) -> Exported:
    """Write a run, a stage or a step to `path`.

    `format`: jsonl, parquet, or eval (for inspect); None: by the suffix of `path`. `min_score`: the
    lowest reward of an exported trajectory. `decode` turns token ids into text, for the segments'
    `text` and for sampled turns without a message.
    Errors: ConfigError for a wrong format or selection, MissingDependency for Parquet, StoreError
    for an unknown run, an unreadable store or an unwritable file.
    """
    if what not in get_args(What):
        raise ConfigError(f"export: what {what!r} is unknown{did_you_mean(what, get_args(What))}")
    path, format = Path(path), _format(Path(path), format, cast(What, what))
    if what == "steps" and (min_score is not None or status is not None):
        raise ConfigError(
            "export: steps have neither score nor status: leave min_score and status out"
        )
    if min_score is not None and math.isnan(min_score):
        raise ConfigError("export: min_score must be a number, got nan")
    run = store.run(run_id)
    if stage is not None:
        _check_stage(store, run_id, stage)
    skipped: Counter[str] = Counter()
    incomplete: Counter[str] = Counter()
    rows: Iterator[dict[str, Any]]
    if what == "steps":
        recorded = store.steps(run_id, stage)
        chosen = (row for row in recorded if step is None or row.step == step)
        rows = ({**asdict(row), "started": row.started.isoformat()} for row in chosen)
    else:
        if min_score is not None:
            for row in store.trajectories(run_id, stage, step, status=status):
                if row.reward is None or not row.reward >= min_score:  # NaN too
                    left_out = what == "sft" and stage is None and _heldout(row)
                    low = f"reward below {min_score:g}, or none"
                    skipped[_HELD_OUT if left_out else low] += 1
        records = store.records(run_id, stage, step, status=status, min_reward=min_score)
        if what == "inspect":
            return _write_inspect(run, records, path, decode, skipped)
        if what == "sft":
            rows = _sft(records, decode, skipped, heldout=stage is not None)
            if run.config.get("agent") and not run.config.get("tools"):
                rows = _without_tools(rows, incomplete)
        else:
            rows = (_trajectory(record, decode) for record in records)
    rows = ({"run": run_id, **row} if what != "sft" else row for row in rows)
    write = _write_jsonl if format == "jsonl" else _write_parquet
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary:
            num_rows = write(rows, temporary, cast(What, what))
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
    return Exported(path, num_rows, dict(skipped), dict(incomplete))


def _write_inspect(
    run: RunRow,
    records: Iterable[Record],
    path: Path,
    decode: Decode | None,
    skipped: Mapping[str, int],
) -> Exported:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary:
            num_rows = write_inspect_log(run, records, temporary, decode)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
    return Exported(path, num_rows, dict(skipped))


def _format(path: Path, format: str | None, what: What) -> Format:
    """The format of a file. Errors: ConfigError where it is unknown, or the suffix contradicts."""
    if what == "inspect" and format is None and path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"export: {path} is to be an Inspect log: name it *.eval")
    if not path.name:
        raise ConfigError(f"export: {str(path)!r} is not a file name")
    if path.is_dir():
        raise ConfigError(f"export: {path} is a folder: name a file in it, *.jsonl or *.parquet")
    if format is not None and format not in get_args(Format):
        near = did_you_mean(format, get_args(Format))
        raise ConfigError(f"export: format {format!r} is unknown{near}")
    named = _SUFFIXES.get(path.suffix.lower())
    if named is None and format is None:
        raise ConfigError(
            f"export: {path} names no format: name it *.jsonl or *.parquet, or set the format"
        )
    if named is not None and format not in (None, named):
        raise ConfigError(
            f"export: {path} ends in {path.suffix}, but the format is {format}: name it "
            f"{path.stem}.{format}, or leave the format out"
        )
    if ((format or named) == "eval") != (what == "inspect"):
        right = "*.eval" if what == "inspect" else "*.jsonl or *.parquet"
        raise ConfigError(f"export: {path}: name it {right} for {what}")
    return cast(Format, format or named)


def _check_stage(store: RunStore, run_id: str, stage: str) -> None:
    stages = [summary.stage for summary in store.summary(run_id)]
    if stage not in stages:
        raise ConfigError(
            f"export: run {run_id} has no stage {stage!r} (stages: {', '.join(stages) or 'none'})"
            f"{did_you_mean(stage, stages)}"
        )


def _heldout(row: TrajectoryRow) -> bool:
    return row.stage.startswith("evaluate/")


def _trajectory(record: Record, decode: Decode | None) -> dict[str, Any]:
    return {
        **asdict(record.row),
        "status": record.row.status.value,
        "segments": [_segment(segment, decode) for segment in record.trajectory.segments],
    }


def _segment(segment: Segment, decode: Decode | None) -> dict[str, Any]:
    return {
        "parent": segment.parent,
        "sampled": segment.sampled,
        "token_ids": segment.token_ids,
        "logprobs": segment.logprobs,
        "message": segment.message and _chat(segment.message),
        "policy_version": segment.policy_version,
        "version_runs": segment.runs if segment.sampled else None,
        "reward": segment.reward,
        "metrics": segment.metrics,
        "constraint": segment.constraint and asdict(segment.constraint),
        "text": decode(segment.token_ids) if decode else None,
    }


def _chat(message: Message) -> dict[str, Any]:
    """Returns a message as a dictionary without default fields, but always with its content."""
    return {"role": message.role, "content": "", **message.to_json()}


def _sft(
    records: Iterable[Record], decode: Decode | None, skipped: Counter[str], *, heldout: bool
) -> Iterator[dict[str, Any]]:
    """Yields one conversation per trajectory: the path to its last segment, which was scored.

    Equal conversations are yielded once, those of evaluations only if `heldout`.
    """
    seen: set[bytes] = set()
    for record in records:
        if _heldout(record.row) and not heldout:
            skipped[_HELD_OUT] += 1
            continue
        trajectory = record.trajectory
        messages = _conversation(trajectory, decode)
        if not trajectory.status.trainable:
            skipped[f"status {trajectory.status.value}"] += 1
        elif trajectory.reward is None or math.isnan(trajectory.reward):
            skipped["no reward"] += 1
        elif messages is None:
            skipped["a sampled turn without a message (pass decode)"] += 1
        elif not any(message.role == "assistant" for message in messages):
            skipped["no assistant message"] += 1
        elif messages[0].role == "assistant":
            skipped["no message before the first assistant message"] += 1
        else:
            chat = [_chat(message) for message in messages]
            row = {"messages": chat, **_shown(record.task)}
            digest = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).digest()
            if digest in seen:
                skipped["duplicate conversation"] += 1
                continue
            seen.add(digest)
            yield {**row, "reward": trajectory.reward, "task_id": trajectory.task_id}


def _without_tools(
    rows: Iterable[dict[str, Any]], incomplete: Counter[str]
) -> Iterator[dict[str, Any]]:
    """Yields the rows; counts those with calls of tools that the run's agent offered. An agent may
    offer others at each call, and the store has them as tokens of the prompt only."""
    for row in rows:
        if any(message.get("tool_calls") for message in row["messages"]):
            incomplete["calls of tools that the agent offered, without their descriptions"] += 1
        yield row


def _shown(task: Task) -> dict[str, Any]:
    """The settings that select the functions and the format of a task's prompt."""
    fields = {"tools": task.tools, "part": part_of(task)}
    return {name: value for name, value in fields.items() if value is not None}


def _conversation(trajectory: Trajectory, decode: Decode | None) -> list[Message] | None:
    """Returns the last path's messages; None if a sampled turn has neither message nor decoder.

    Appended tokens without a message belong to the chat template and are omitted.
    """
    messages = []
    for index in trajectory.path():
        segment = trajectory.segments[index]
        if segment.message is not None:
            messages.append(segment.message)
        elif segment.sampled:
            if decode is None:
                return None
            messages.append(Message(role="assistant", content=decode(segment.token_ids)))
    return messages


def _write_jsonl(rows: Iterable[dict[str, Any]], path: Path, what: What) -> int:
    num_rows = 0
    # a lone surrogate is invalid in UTF-8; backslashreplace gives its JSON escape
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for row in rows:
            file.write(_json(row) + "\n")
            num_rows += 1
    return num_rows


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def _write_parquet(rows: Iterable[dict[str, Any]], path: Path, what: What) -> int:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise MissingDependency("pyarrow", "data", "export to Parquet") from error
    schema = _arrow_schema(what)
    num_rows = 0
    remaining = iter(rows)
    with path.open("wb") as file, pyarrow.parquet.ParquetWriter(file, schema) as writer:
        while batch := [_flat(row) for row in itertools.islice(remaining, _ROW_GROUP)]:
            writer.write_table(pyarrow.Table.from_pylist(batch, schema))
            num_rows += len(batch)
    return num_rows


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with open-ended values as JSON text, and text valid in UTF-8."""
    flat: dict[str, Any] = {
        key: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for key, value in row.items()
    }
    if "segments" in flat:
        flat["segments"] = [
            {**segment, "message": segment["message"] and _json(segment["message"])}
            for segment in flat["segments"]
        ]
    if "messages" in flat:
        flat["messages"] = [
            {
                **message,
                "tool_calls": [
                    {**call, "arguments": _json(call.get("arguments", {}))}
                    for call in message.get("tool_calls", [])
                ],
            }
            for message in flat["messages"]
        ]
    return flat


def _arrow_schema(what: What) -> Any:
    import pyarrow as pa

    text, whole, real = pa.string(), pa.int64(), pa.float64()
    numbers = pa.map_(text, real)
    place = {"run": text, "stage": text, "step": whole}
    if what == "steps":
        columns = {"started": text, "seconds": real, "policy_version": whole, "metrics": numbers}
        return pa.schema({**place, **columns})
    if what == "sft":
        call = pa.struct({"name": text, "arguments": text, "id": text})
        fields = dict.fromkeys(("role", "content", "thinking", "tool_call_id", "name"), text)
        message = pa.struct({**fields, "tool_calls": pa.list_(call)})
        columns = {"messages": pa.list_(message), "tools": pa.list_(text), "part": text}
        return pa.schema({**columns, "reward": real, "task_id": text})
    segment = {
        "parent": whole,
        "sampled": pa.bool_(),
        "token_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(real),
        "message": text,
        "policy_version": whole,
        "version_runs": pa.list_(pa.list_(whole)),
        "reward": real,
        "metrics": numbers,
        "constraint": pa.struct({"grammar": text, "stop_token_ids": pa.list_(whole)}),
        "text": text,
    }
    texts = ("id", "group_id", "task_id", "tier", "role", "policy", "status")
    columns = {
        **dict.fromkeys(texts, text),
        "reward": real,
        **dict.fromkeys(("num_turns", "num_tokens", "num_sampled_tokens"), whole),
        "scores": numbers,
        "metrics": numbers,
        "explanation": text,
        "error": text,
        "dropped": text,
        "segments": pa.list_(pa.struct(segment)),
    }
    return pa.schema({**place, **columns})
