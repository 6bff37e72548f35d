"""Metrics of a run: one JSON line per step, and optional other sinks.

    metrics.jsonl   {"stage": "rl", "step": 3, "time": 1760000000.123, "rollout/success": 0.4}

Every stage counts its own steps. Names are `stage/name`: `rollout/success`, `evaluate/pass@4`.
The JSON lines are part of the run's state: a resume rewinds them, and a failed write stops the run.
A failure of another sink disables that sink, with one log line; training continues.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

from ludus.core.errors import DataError, LudusError
from ludus.core.files import atomic_write, open_regular
from ludus.telemetry.logs import spelled
from ludus.telemetry.sinks.base import Guarded

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*(/[A-Za-z0-9_.@-]+)*")
RESERVED = {"stage", "step", "time"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of `metrics.jsonl`; `time` is in seconds since 1970."""

    stage: str
    step: int
    time: float
    metrics: dict[str, float]


class MetricsLog:
    """The metrics of one run: the file at `path` (its `metrics.jsonl`), and sinks.

    An existing file is continued; an incomplete last line is removed.

    Raises:
        LudusError: the file cannot be written.
    """

    def __init__(self, path: Path | str, sinks: Sequence[Guarded] = ()) -> None:
        self.path = Path(path)
        self.sinks = list(sinks)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open(self.path)
        except OSError as error:
            raise self._failure(error) from error

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step's metrics. Non-finite values go to the JSON lines only.

        Raises:
            ValueError: a name is malformed or reserved, or a value is not a number.
            LudusError: the JSON line cannot be written (the disk is full).
        """
        values = _checked(stage, step, metrics)
        now = round(time.time(), 3)
        line = {"stage": stage, "step": step, "time": now}
        spelt = {name: v if math.isfinite(v) else spelled(v) for name, v in values.items()}
        self._append(json.dumps({**line, **spelt}, allow_nan=False).encode() + b"\n")
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for sink in self.sinks:
            sink.log(stage, step, finite, now)

    def rewind(self, keep: Mapping[str, int]) -> None:
        """Remove the lines after each stage's last step to keep, before a resume repeats them.

        All lines of a stage missing from `keep` are removed. The write is atomic.
        """
        kept = [raw for raw, line in _lines(self.path) if line.step <= keep.get(line.stage, -1)]
        try:
            atomic_write(self.path, b"".join(kept))
            os.close(self._file)
            self._file = _open(self.path)
        except OSError as error:
            raise self._failure(error) from error
        for sink in self.sinks:
            sink.rewind(keep)

    @staticmethod
    def read(path: Path | str) -> list[Line]:
        """Returns all complete lines of a `metrics.jsonl`. Safe while the file is written.

        Raises:
            DataError: the file is missing, or a line is malformed.
        """
        return [line for _, line in _lines(Path(path))]

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            for sink in self.sinks:
                sink.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        """Write the whole line or nothing."""
        before = os.fstat(self._file).st_size
        try:
            rest = line
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, before)
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> LudusError:
        return LudusError(f"{self.path}: the metrics cannot be written: {error.strerror}")


def _checked(stage: str, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
    if not NAME.fullmatch(stage):
        raise ValueError(f"{stage!r} is not a stage name: write a name like rl or evaluate/rl")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"the step of {stage} must be a whole number >= 0, got {step!r}")
    values: dict[str, float] = {}
    for name, value in metrics.items():
        if not NAME.fullmatch(name) or name in RESERVED:
            raise ValueError(f"{name!r} is not a metric name: write a name like rollout/success")
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError(f"metric {name} must be a number, got {value!r}")
        values[name] = value if isinstance(value, int) else float(value)
    return values


def _open(path: Path) -> int:
    """Returns a descriptor that appends after the last complete line."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    if path.is_file():
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.ftruncate(descriptor, data.rfind(b"\n") + 1)
    return descriptor


def _lines(path: Path) -> Iterator[tuple[bytes, Line]]:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            data = file.read()
    except OSError as error:
        raise DataError(f"{path}: the metrics cannot be read: {error.strerror}") from None
    *complete, _ = data.split(b"\n")  # the last is being written, or was cut off by a kill
    for number, raw in enumerate(complete, 1):
        try:
            line = _parsed(raw)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}: line {number} is not a line of metrics: {error}; remove that line"
            ) from None
        yield raw + b"\n", line


def _parsed(raw: bytes) -> Line:
    """Errors: ValueError, RecursionError."""
    values = json.loads(raw)
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    if missing := [key for key in ("stage", "step", "time") if key not in values]:
        raise ValueError(f"{missing[0]!r} is missing")
    stage, step, when = (values.pop(key) for key in ("stage", "step", "time"))
    if not isinstance(stage, str):
        raise ValueError(f"'stage' is {stage!r}, not a text")
    if isinstance(step, bool) or not isinstance(step, int):
        raise ValueError(f"'step' is {step!r}, not a whole number")
    metrics = {name: _number(name, value) for name, value in values.items()}
    return Line(stage, step, _number("time", when), metrics)


def _number(name: str, value: object) -> float:
    if isinstance(value, str):
        value = float(value)  # nan, inf
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name!r} is {value!r}, not a number")
    return value
