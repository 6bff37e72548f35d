"""The record of the processes that a run started: `.processes.json` in its folder.

    {"machine": "0f3c... pid:[4026531836]", "host": "node-3", "mark": "5b1e...",
     "processes": [{"pid": 812, "started": 66412, "what": "the run"}, ...]}

`ludus kill` ends these, and their children, and nothing else. The record is written when a process
starts, and emptied at the end of the run; a run that is killed leaves it.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ludus.core.errors import DataError, LudusError
from ludus.core.files import atomic_write
from ludus.core.system.processes import (
    MARK,
    Process,
    descendants,
    end,
    identify,
    is_alive,
    listening,
    machine,
    marked,
)
from ludus.store.folders import RunFolder

RUN = "the run"
NOTIFIER = "the run's notification"
"""It ends by itself, soon after the run."""

NOTIFY_S = 30.0
"""Seconds that it may take."""

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL for the processes that a run started."""


@dataclass(slots=True)
class ProcessRecord:
    """The processes that a run recorded. The first is the run itself."""

    machine: str = ""
    host: str = ""
    mark: str = ""
    processes: list[Process] = field(default_factory=list)

    @classmethod
    def read(cls, folder: RunFolder) -> ProcessRecord:
        """Returns the record of a run; an empty one where there is none. Errors: DataError."""
        path = record_path(folder)
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            processes = [_process(item) for item in raw["processes"]]
            texts = {name: _text(raw[name]) for name in ("machine", "host", "mark")}
            return cls(**texts, processes=processes)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} is damaged ({error!r:.100}): end the run's processes yourself, and remove "
                "the file"
            ) from None

    def write(self, folder: RunFolder) -> None:
        """Write the record atomically."""
        path = record_path(folder)
        atomic_write(path, json.dumps(asdict(self), indent=1), flush=False)

    def alive(self) -> list[Process]:
        """The recorded processes that run, then their children, then processes with the mark."""
        own = [process for process in self.processes if is_alive(process)]
        with_mark = marked(self.mark) if self.mark else []
        found = [*own, *descendants(own), *with_mark, *descendants(with_mark)]
        by_pid = {process.pid: process for process in reversed(found)}
        return [p for p in dict.fromkeys(by_pid[p.pid] for p in found) if p.pid != os.getpid()]


def record_path(folder: RunFolder) -> Path:
    """The file with a run's processes."""
    return folder.path / ".processes.json"


def _process(item: dict[str, Any]) -> Process:
    if type(item["pid"]) is not int or type(item["started"]) is not int or item["pid"] < 2:
        raise ValueError("no pid")
    return Process(item["pid"], item["started"], _text(item["what"]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("no text")
    return value


@contextmanager
def recorded_processes(folder: RunFolder) -> Iterator[list[Process]]:
    """Record this process, which has locked the run, and the children that it starts.

    Yields what an earlier process of the run left, and this ended.
    """
    left = end_leftovers(folder)
    record = ProcessRecord(machine(), socket.gethostname(), secrets.token_hex(16))
    lock = threading.Lock()

    def add(pid: int, what: str) -> None:
        process = identify(pid, what)
        if process is None:
            return
        with lock, suppress(OSError):  # a full disk ends the run elsewhere, with a message
            record.processes = [p for p in record.processes if is_alive(p)] + [process]
            record.write(folder)

    before = os.environ.get(MARK)
    add(os.getpid(), RUN)
    os.environ[MARK] = record.mark
    try:
        with listening(add):
            yield left
    finally:
        os.environ.pop(MARK, None)
        if before is not None:
            os.environ[MARK] = before
        with suppress(OSError):
            record_path(folder).unlink(missing_ok=True)


def end_leftovers(folder: RunFolder) -> list[Process]:
    """End what an earlier process of the run left, and return it. The run's lock is held, so that
    process is dead. A damaged record is removed."""
    try:
        record = ProcessRecord.read(folder)
    except DataError:
        return []
    if record.machine != machine():
        return []
    left = record.alive()
    with suppress(PermissionError):
        end(end(left, signal.SIGTERM, GRACE_S), signal.SIGKILL, GRACE_S)
    return left


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that was ended, and the signal that ended it."""

    process: Process
    signal: signal.Signals

    def __str__(self) -> str:
        return f"{self.process}: {self.signal.name}"


def kill_run(folder: RunFolder, grace_s: float) -> list[Ended]:
    """End a run, then what it started; returns what was ended.

    The run gets SIGTERM: it finishes its step, saves, and ends its children in order. What lives
    `grace_s` seconds later is killed. Children that the run left get SIGTERM, and GRACE_S seconds.

    Errors: LudusError where the run does not run, or not here, or a process is another user's.
    """
    record = ProcessRecord.read(folder)
    if record.machine and record.machine != machine():
        raise LudusError(
            f"run {folder.id} does not run here: {record.host} started it, before a restart or in "
            "another container; nothing was ended"
        )
    if not (first := record.alive()):
        raise LudusError(f"run {folder.id} is not running")
    ended: list[Ended] = []
    try:
        main = [process for process in first if process.what == RUN]
        _end(main, grace_s, ended)
        for _ in range(3):  # a process that starts another meanwhile
            rest = [process for process in record.alive() if process.what != NOTIFIER]
            if not rest:
                break
            _end(rest, min(grace_s, GRACE_S), ended)
        _end_notifier(record, ended)
    except PermissionError:
        raise LudusError(
            f"run {folder.id} has processes of another user: run `ludus kill` as that user"
        ) from None
    if rest := record.alive():
        names = ", ".join(map(str, rest))
        raise LudusError(f"run {folder.id} still has processes, which cannot be ended: {names}")
    return ended


def _end_notifier(record: ProcessRecord, ended: list[Ended]) -> None:
    """Wait until it has told of the end; kill it where it hangs."""
    waiting = [process for process in record.alive() if process.what == NOTIFIER]
    for process in end(waiting, None, NOTIFY_S):
        _end([process], 0, ended)


def _end(processes: list[Process], grace_s: float, ended: list[Ended]) -> None:
    stubborn = end(processes, signal.SIGTERM, grace_s)
    end(stubborn, signal.SIGKILL, GRACE_S)
    for process in processes:
        number = signal.SIGKILL if process in stubborn else signal.SIGTERM
        if not is_alive(process):
            ended.append(Ended(process, number))
