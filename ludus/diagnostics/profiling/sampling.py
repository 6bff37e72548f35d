"""Sampling the stacks of this process: by py-spy where it may look, else by a thread of our own.

py-spy sees what every thread does without taking part; it needs the right to trace a process, which
containers often lack. The thread sees Python's frames through `sys._current_frames`; while it looks
nothing else of Python runs, for some tens of microseconds.
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

RATE = 100  # looks a second
START_S = 10.0  # seconds that py-spy may take to begin

WAITING = re.compile(r"\b(threading|queue|selectors|_base|thread)\.py\b|^WorkerThread\._work ")
"""Innermost frames of threads that wait for something to do."""


class StackSampler(Protocol):
    """Samples until it is stopped. `how` says by what means."""

    how: str

    def stop(self) -> Stacks: ...


def start_sampling() -> StackSampler:
    """The best way that this machine permits."""
    return PySpy.start() or ThreadSampler()


class PySpy:
    """py-spy, looking at this process from another."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path) -> None:
        self.how = f"sampled {RATE} times a second by py-spy"
        self._process = process
        self._out = out

    @classmethod
    def start(cls) -> PySpy | None:
        """None where py-spy is not installed, or may not look."""
        program = shutil.which("py-spy") or shutil.which(
            "py-spy", path=str(Path(sys.executable).parent)
        )
        if program is None:
            return None
        _allow_tracing()
        out = Path(tempfile.mkdtemp(prefix="ludus-profile-")) / "stacks.txt"
        look = f"record --nonblocking --threads --format raw --rate {RATE} --pid {os.getpid()}"
        process = subprocess.Popen(
            [program, *look.split(), "--output", str(out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is the run's
        )
        assert process.stdout is not None
        watch = threading.Timer(START_S, process.kill)
        watch.start()
        began = any(b"Sampling process" in line for line in process.stdout)
        watch.cancel()
        if began:
            return cls(process, out)
        process.communicate()
        shutil.rmtree(out.parent, ignore_errors=True)
        return None

    def stop(self) -> Stacks:
        """What it saw."""
        self._process.send_signal(signal.SIGINT)
        self._process.communicate()
        text = self._out.read_text(encoding="utf-8") if self._out.exists() else ""
        shutil.rmtree(self._out.parent, ignore_errors=True)
        stacks: Stacks = Counter()
        for line in text.splitlines():
            frames, _, count = line.rpartition(" ")
            stacks[tuple(frames.split(";"))] += int(count)
        return working(stacks)


def working(stacks: Stacks) -> Stacks:
    """The stacks without those of threads that waited; the main thread's stay: it is awaited."""
    return Counter(
        {
            stack: count
            for stack, count in stacks.items()
            if "MainThread" in stack[0] or not WAITING.search(stack[-1])
        }
    )


def _allow_tracing() -> None:
    """Linux lets a child trace its parent only if the parent says so."""
    if sys.platform == "linux":
        import ctypes

        set_ptracer, anyone = 0x59616D61, ctypes.c_ulong(-1)
        ctypes.CDLL(None).prctl(set_ptracer, anyone, 0, 0, 0)


class ThreadSampler:
    """A thread that looks at the others."""

    def __init__(self) -> None:
        self.how = f"sampled {RATE} times a second by a thread, Python's frames only"
        self._stacks: Stacks = Counter()
        self._names: dict[CodeType, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="ludus-profile", daemon=True)
        self._thread.start()

    def stop(self) -> Stacks:
        """What it saw."""
        self._stop.set()
        self._thread.join()
        return working(self._stacks)

    def _look(self) -> None:
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
                self._names[code] = (
                    f"{getattr(code, 'co_qualname', code.co_name)} ({_short(code.co_filename)})"
                )
            stack.append(self._names[code])
            frame = frame.f_back
        return stack[::-1]


def _short(filename: str) -> str:
    """The path below the folder of packages; else its last two parts."""
    for root in ("site-packages/", "dist-packages/"):
        if root in filename:
            return filename.rpartition(root)[2]
    return "/".join(Path(filename).parts[-2:])
