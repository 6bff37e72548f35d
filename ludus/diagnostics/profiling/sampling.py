"""Sample the stacks of this process with py-spy if permitted, else with a thread.

py-spy reads all threads from another process; it needs the permission to trace, which containers
often lack. The thread reads Python frames from `sys._current_frames` and blocks other Python code
for some tens of microseconds a sample.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Protocol

Stack = tuple[str, ...]
"""Frames from the outermost to the innermost."""
Stacks = Counter[Stack]

RATE = 100  # samples a second
START_TIMEOUT_S = 10.0  # of py-spy

WAITING = re.compile(r"\b(threading|queue|selectors|_base|thread)\.py\b|^WorkerThread\._work ")
"""Innermost frames of idle threads."""


class StackSampler(Protocol):
    """Samples until `stop`, which returns the stacks. `how` describes the method."""

    how: str

    def stop(self) -> Stacks: ...


def start_sampling() -> StackSampler:
    """Start the best sampler that this machine permits."""
    return PySpy.start() or ThreadSampler()


class PySpy:
    """Samples with py-spy, from another process."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path) -> None:
        self.how = f"sampled {RATE} times a second by py-spy"
        self._process = process
        self._out = out

    @classmethod
    def start(cls) -> PySpy | None:
        """Start py-spy; returns None where it is not installed or not permitted."""
        beside_python = str(Path(sys.executable).parent)
        program = shutil.which("py-spy") or shutil.which("py-spy", path=beside_python)
        if program is None:
            return None
        _allow_tracing()
        out = Path(tempfile.mkdtemp(prefix="ludus-profile-")) / "stacks.txt"
        arguments = f"record --nonblocking --threads --format raw --rate {RATE} --pid {os.getpid()}"
        process = subprocess.Popen(
            [program, *arguments.split(), "--output", str(out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C belongs to the run
        )
        assert process.stdout is not None
        timeout = threading.Timer(START_TIMEOUT_S, process.kill)
        timeout.start()
        started = any(b"Sampling process" in line for line in process.stdout)
        timeout.cancel()
        if started:
            return cls(process, out)
        process.communicate()
        shutil.rmtree(out.parent, ignore_errors=True)
        return None

    def stop(self) -> Stacks:
        self._process.send_signal(signal.SIGINT)
        self._process.communicate()
        text = self._out.read_text(encoding="utf-8") if self._out.exists() else ""
        shutil.rmtree(self._out.parent, ignore_errors=True)
        stacks: Stacks = Counter()
        for line in text.splitlines():
            frames, _, count = line.rpartition(" ")
            stacks[tuple(frames.split(";"))] += int(count)
        return busy_stacks(stacks)


def busy_stacks(stacks: Stacks) -> Stacks:
    """Returns the stacks without idle threads. Keeps the main thread: the run waits for it."""
    return Counter(
        {
            stack: count
            for stack, count in stacks.items()
            if "MainThread" in stack[0] or not WAITING.search(stack[-1])
        }
    )


def _allow_tracing() -> None:
    """Permit a child process to trace this process (Linux refuses by default)."""
    if sys.platform == "linux":
        import ctypes

        set_ptracer, anyone = 0x59616D61, ctypes.c_ulong(-1)
        ctypes.CDLL(None).prctl(set_ptracer, anyone, 0, 0, 0)


class ThreadSampler:
    """Samples with a thread of this process."""

    def __init__(self) -> None:
        self.how = f"sampled {RATE} times a second by a thread, Python's frames only"
        self._stacks: Stacks = Counter()
        self._names: dict[CodeType, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="ludus-profile", daemon=True)
        self._thread.start()

    def stop(self) -> Stacks:
        self._stop.set()
        self._thread.join()
        return busy_stacks(self._stacks)

    def _sample(self) -> None:
        own = threading.get_ident()
        while not self._stop.wait(1 / RATE):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if ident != own:
                    stack = self._stack(frame)
                    self._stacks[(f"thread {names.get(ident, ident)}", *stack)] += 1

    def _stack(self, frame: FrameType | None) -> list[str]:
        stack: list[str] = []
        while frame is not None:
            code = frame.f_code
            if code not in self._names:
                name = getattr(code, "co_qualname", code.co_name)
                self._names[code] = f"{name} ({_short(code.co_filename)})"
            stack.append(self._names[code])
            frame = frame.f_back
        return stack[::-1]


def _short(filename: str) -> str:
    """Returns the path below site-packages, else its last two parts."""
    for root in ("site-packages/", "dist-packages/"):
        if root in filename:
            return filename.rpartition(root)[2]
    return "/".join(Path(filename).parts[-2:])
