"""Processes by pid and start time, so that a pid that was given to a stranger is never signalled.

    server = identify(pid, "vLLM server")       # the pid, and its start time of /proc/PID/stat
    family = descendants([server])              # its children, and theirs
    end(family, signal.SIGTERM, grace_s=5)      # waits; returns those that are still alive

A run marks the processes that it starts by an environment variable, which their children inherit:
`marked` finds them also after their parent has died.

Linux only: elsewhere `identify` returns None.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "LUDUS_RUN_MARK"
"""Environment variable with the mark of a run, a random text."""

PROC = Path("/proc")

KERNEL_THREAD = 0x00200000
"""Flag of the kernel's own threads in /proc/PID/stat (PF_KTHREAD)."""

EXEC_WAITS_S = (0.0, 0.005, 0.02)
"""Seconds before each look at processes without an environment."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process. `started` is in clock ticks since the machine's start; no two processes share both
    numbers."""

    pid: int
    started: int
    what: str = ""

    def __str__(self) -> str:
        return f"{self.what or 'process'} ({self.pid})"


def identify(pid: int, what: str = "") -> Process | None:
    """Returns the living process with this pid; None where there is none, or no /proc.

    `what` describes it; default: the name of its program.
    """
    stat = _stat(pid)
    if stat is None or stat.state in "ZX":
        return None
    return Process(pid, stat.started, what or stat.name)


def is_alive(process: Process) -> bool:
    """True if this very process runs: not another with its pid, and not a zombie."""
    now = identify(process.pid)
    return now is not None and now.started == process.started


def descendants(roots: Iterable[Process]) -> list[Process]:
    """Returns the living children of `roots`, and theirs, parents first."""
    children: dict[int, list[tuple[int, _Stat]]] = {}
    for pid, stat in _all():
        children.setdefault(stat.parent, []).append((pid, stat))
    found: list[Process] = []
    waiting = [root for root in roots if is_alive(root)]
    while waiting:
        parent = waiting.pop(0)
        for pid, stat in children.get(parent.pid, ()):
            # A child is not older than its parent: then the parent's pid is another's now.
            if stat.state not in "ZX" and stat.started >= parent.started:
                child = Process(pid, stat.started, stat.name)
                found.append(child)
                waiting.append(child)
    return found


def marked(mark: str, variable: str = MARK) -> list[Process]:
    """Returns the living processes of this user that were started with `variable=mark`.

    A process that is being executed has no environment for a moment, and is looked at again.
    """
    wanted = f"{variable}={mark}".encode()
    found, left = [], [(pid, stat) for pid, stat in _all() if not stat.is_kernel]
    for wait_s in EXEC_WAITS_S:
        time.sleep(wait_s)
        without = []
        for pid, stat in left:
            with suppress(OSError):
                environ = (PROC / str(pid) / "environ").read_bytes()
                if wanted in environ.split(b"\0"):
                    found.append(Process(pid, stat.started, stat.name))
                elif not environ and stat.state not in "ZX":
                    without.append((pid, stat))
        if not without:
            break
        left = without
    return [process for process in found if is_alive(process)]


def end(
    processes: Sequence[Process], number: signal.Signals | None, grace_s: float
) -> list[Process]:
    """Signal the processes that still live; returns those that live `grace_s` seconds later.

    None only waits.

    Errors: PermissionError for a process of another user.
    """
    handles: dict[int, Process] = {}
    try:
        for process in processes:
            try:
                handle = os.pidfd_open(process.pid)
            except ProcessLookupError:
                continue
            handles[handle] = process
            if is_alive(process):  # the handle is of this process, and not of a later one
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, number or 0)
            else:
                os.close(handle)
                del handles[handle]
        _wait(handles, grace_s)
    finally:
        for handle in handles:
            os.close(handle)
    return [process for process in handles.values() if is_alive(process)]


def terminate(process: subprocess.Popen[Any], seconds: float) -> None:
    """End a child: SIGTERM, and SIGKILL where it is alive after `seconds`. Idempotent."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(handles: Iterable[int], seconds: float) -> None:
    poll, waiting = select.poll(), set(handles)
    for handle in waiting:
        poll.register(handle, select.POLLIN)
    deadline = time.monotonic() + seconds
    while waiting and (left := deadline - time.monotonic()) > 0:
        for handle, _ in poll.poll(left * 1000):
            poll.unregister(handle)
            waiting.discard(handle)


def machine() -> str:
    """Returns a name of this start of this machine, and of this container: pids and start times are
    unique there. Empty without /proc."""
    with suppress(OSError):
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(PROC / 'self/ns/pid')}"
    return ""


# Children of a run

_listeners: list[Callable[[int, str], Any]] = []


def started(pid: int, what: str) -> None:
    """Tell the run of this process, if there is one, of a child that was started."""
    for listener in _listeners:
        listener(pid, what)


@contextmanager
def listening(listener: Callable[[int, str], Any]) -> Iterator[None]:
    """Call `listener` with the pid and the description of each child that starts in the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@dataclass(frozen=True, slots=True)
class _Stat:
    name: str
    state: str
    parent: int
    started: int
    is_kernel: bool


def _stat(pid: int) -> _Stat | None:
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except (OSError, ValueError):
        return None
    head, _, tail = text.rpartition(")")  # the name may contain anything
    fields = tail.split()
    is_kernel = bool(int(fields[6]) & KERNEL_THREAD)
    return _Stat(head.partition("(")[2], fields[0], int(fields[1]), int(fields[19]), is_kernel)


def _all() -> Iterator[tuple[int, _Stat]]:
    for path in PROC.iterdir() if PROC.is_dir() else ():
        if path.name.isdigit() and (stat := _stat(int(path.name))) is not None:
            yield int(path.name), stat
