"""Finds code that blocks the event loop of the rollouts: a judge that calls `time.sleep`, say.

While the loop is blocked, no episode continues and no deadline can fire. A thread checks the loop:

    after WARN_S            a warning names the function
    after the deadline      EpisodeTimeout is raised in that function, in the main thread only
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ludus.core.errors import EpisodeTimeout
from ludus.core.sources import is_foreign
from ludus.telemetry.logs import get_logger

WARN_S = 10.0
"""Seconds without a turn of the event loop before a warning."""

log = get_logger(__name__)


class LoopWatch:
    """Watches the running event loop until `close`.

    Args:
        deadline: seconds after which the blocking function is interrupted.
    """

    def __init__(self, deadline: float) -> None:
        self.num_users = 0
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._beaten = time.monotonic()
        self._warned = self._interrupted = 0.0  # the beat before the last warning; a time
        self._blocking: FrameType | None = None  # interrupted at the next signal
        self._closed = threading.Event()
        # SIGURG interrupts a system call such as a sleep, and is ignored by default.
        self._interrupts = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGURG) is signal.SIG_DFL
        )
        if self._interrupts:
            signal.signal(signal.SIGURG, self._on_signal)
        threading.Thread(target=self._watch, name="ludus-loop-watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        if self._interrupts:
            signal.signal(signal.SIGURG, signal.SIG_DFL)

    def _beat(self) -> None:
        self._beaten = time.monotonic()

    def _watch(self) -> None:
        patience = min(WARN_S, self._deadline)
        while not self._closed.wait(patience / 10):
            try:
                self._loop.call_soon_threadsafe(self._beat)
            except RuntimeError:  # the loop has closed
                return
            if time.monotonic() - self._beaten > patience:
                self._act()

    def _act(self) -> None:
        """Warn once for each time that the loop is blocked; interrupt after each deadline."""
        beaten, now = self._beaten, time.monotonic()
        frame = _own_frame(sys._current_frames().get(self._thread_id))
        if frame is None:
            return
        if self._warned != beaten:
            self._warned = beaten
            log.warning(f"the event loop is blocked: {_told(frame, now - beaten)}")
        if self._interrupts and now - max(beaten, self._interrupted) > self._deadline:
            self._interrupted, self._blocking = now, frame
            signal.pthread_kill(self._thread_id, signal.SIGURG)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Errors: EpisodeTimeout, if the blocking function still runs."""
        blocking, self._blocking = self._blocking, None
        while blocking is not None and frame is not None:
            if frame is blocking:
                seconds = time.monotonic() - self._beaten
                told = _told(blocking, seconds)
                raise EpisodeTimeout(f"interrupted, since it blocked the event loop: {told}")
            frame = frame.f_back


_watches: dict[asyncio.AbstractEventLoop, LoopWatch] = {}


@contextmanager
def watched_loop(deadline: float | None) -> Iterator[None]:
    """Watch the running event loop; None: not at all. Users at the same time share a watch."""
    if deadline is None:
        yield
        return
    loop = asyncio.get_running_loop()
    if loop not in _watches:
        _watches[loop] = LoopWatch(deadline)
    watch = _watches[loop]
    watch.num_users += 1
    try:
        yield
    finally:
        watch.num_users -= 1
        if not watch.num_users:
            del _watches[loop]
            watch.close()


def _own_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost frame of a user's code that the event loop called; None: ludus or a
    package computes by itself, or a debugger waits."""
    own = None
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.name == "bdb.py":
            return None
        if path.parent.name == "asyncio" and frame.f_code.co_name == "_run":
            return own
        if own is None and path.suffix == ".py" and not is_foreign(path.resolve()):
            own = frame
        frame = frame.f_back
    return None


def _told(frame: FrameType, seconds: float) -> str:
    place = f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
    return (
        f"{frame.f_code.co_qualname} [{place}] has not returned for {seconds:.0f} s, and all "
        "episodes wait: await an asynchronous call, or use `await asyncio.to_thread(...)`"
    )
