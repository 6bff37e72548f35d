"""Metrics of a run: one JSON line a step always, and other sinks on request.

    metrics.jsonl   {"stage": "rl", "step": 3, "time": 1760000000.123, "rollout/success": 0.4}

A stage counts its own steps. Names are `stage/name`: `rollout/success`, `evaluate/pass@4`.
The JSON lines belong to the run's state: they are rewound on resume, and a failure to write them
stops the run. The other sinks are a courtesy: one that fails is switched off, told once in the
log, and counted; training goes on.
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
from ludus.core.files import atomic_write
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

    An existing file is continued; a last line that a kill tore is dropped.

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
        """Record one step's metrics. What is not finite goes to the JSON lines only.

        Raises:
            ValueError: a name is malformed or reserved, or a value is no number.
            LudusError: the JSON line cannot be written (the disk is full).
        """
        values = _checked(stage, step, metrics)
        now = round(time.time(), 3)
        line = {"stage": stage, "step": step, "time": now}
        shown = {name: v if math.isfinite(v) else spelled(v) for name, v in values.items()}
        self._append(json.dumps({**line, **shown}, allow_nan=False).encode() + b"\n")
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for sink in self.sinks:
            sink.log(stage, step, finite, now)

    def rewind(self, keep: Mapping[str, int]) -> None:
        """Drop what a resumed run does again: every line after the last step to keep of its stage.

        A stage that `keep` does not name is dropped whole. Atomic: a kill leaves the old file or
        the new one.
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
        """All lines of a `metrics.jsonl`, a torn last one left out. May run beside the writer.

        Raises:
            DataError: the file is missing, or a line of it is malformed.
        """
        return [line for _, line in _lines(Path(path))]

    def close(self) -> None:
        """Close the file and the sinks; nothing may be logged afterwards."""
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
        """Write a whole line or none of it."""
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
        raise ValueError(f"{stage!r} is no name of a stage: write it like rl or evaluate/rl")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"the step of {stage} must be a whole number >= 0, got {step!r}")
    values: dict[str, float] = {}
    for name, value in metrics.items():
        if not NAME.fullmatch(name) or name in RESERVED:
            raise ValueError(f"{name!r} is no name of a metric: write it like rollout/success")
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError(f"metric {name} must be a number, got {value!r}")
        values[name] = value if isinstance(value, int) else float(value)
    return values


def _open(path: Path) -> int:
    """A descriptor that appends, behind the last whole line."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    if path.is_file():
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.ftruncate(descriptor, data.rfind(b"\n") + 1)
    return descriptor


def _lines(path: Path) -> Iterator[tuple[bytes, Line]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: the metrics cannot be read: {error.strerror}") from None
    for number, raw in enumerate(data.splitlines(keepends=True), 1):
        if not raw.endswith(b"\n"):
            return  # being written, or torn by a kill
        try:
            values = json.loads(raw)
            stage, step, when = (values.pop(key) for key in ("stage", "step", "time"))
            metrics = {k: float(v) if isinstance(v, str) else v for k, v in values.items()}
        except (ValueError, KeyError, AttributeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{path}: line {number} is no line of metrics: {reason}") from None
        yield raw, Line(stage, step, when, metrics)
