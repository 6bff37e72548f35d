"""TensorBoard: event files, one folder per stage, written without torch or TensorFlow."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

_COUNTER = itertools.count()


class TensorBoard:
    """Writes `run_dir/tensorboard/<stage>`; view it with `tensorboard --logdir <run_dir>`.

    A stage is a TensorBoard run, since every stage counts its own steps. Writes are synchronous, so
    a full disk raises in `log`.
    """

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "tensorboard"
        self._writers: dict[str, Any] = {}

    def log(self, stage: str, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Append one event with all metrics of the step."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(stage, Event(wall_time=time, step=step, summary=Summary(value=values)))

    def rewind(self, keep: Mapping[str, int]) -> None:
        """Start a new file per stage whose header discards the steps after the step to keep."""
        files = self.folder.rglob("events.out.tfevents.*")
        for stage in sorted({file.parent.relative_to(self.folder).as_posix() for file in files}):
            start = SessionLog(status=SessionLog.START)
            step = keep.get(stage, -1) + 1
            self._write(stage, Event(wall_time=time.time(), step=step, session_log=start))

    def close(self) -> None:
        """Close the files."""
        writers, self._writers = list(self._writers.values()), {}
        for writer in writers:
            writer.close()

    def _write(self, stage: str, event: Event) -> None:
        if stage not in self._writers:
            self._writers[stage] = self._open(stage)
        self._writers[stage].write(event.SerializeToString())
        self._writers[stage].flush()

    def _open(self, stage: str) -> RecordWriter:
        """Open a new file; readers read the files of a folder in the order of their names."""
        folder = self.folder / stage
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        writer = RecordWriter((folder / self._name(now)).open("ab"))
        writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        return writer

    def _name(self, now: float) -> str:
        host, process = socket.gethostname(), os.getpid()
        return f"events.out.tfevents.{int(now):010d}.{host}.{process}.{next(_COUNTER):04d}"
