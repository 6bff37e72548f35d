"""Runs a part of a command in a forked process, so that foreign code cannot end the command.

    code = in_child(check, typer.echo, noise)      # check(tell) returns the exit code

`os._exit`, a crash in native code and a call of `exit` in a thread end the child alone, and are an
error here. What the child prints is passed on up to MAX_NOISE; what is beyond is counted. A child
that cannot act, because foreign code holds the interpreter (the GIL), is killed.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import selectors
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from ludus.core.errors import LudusError
from ludus.core.system.signals import exit_code
from ludus.core.system.with_parent import PR_SET_PDEATHSIG

MAX_NOISE = 20_000
"""Bytes of a child's output that are passed on."""

FORWARDED = (signal.SIGTERM, signal.SIGHUP)
"""Signals that are sent to the parent alone; Ctrl-C of a terminal reaches the child itself."""

POLL_S = 0.02
"""Seconds between two looks whether the child has ended."""

MAX_REST = 100
"""Reads of the pipes after the child's end: its own children may print for ever."""

BEAT_S = 0.25
"""Seconds between two beats of the child's heart, which needs the interpreter."""

GRACE_S = 10.0
"""Seconds that the child has to end after a signal, before it is killed."""

Tell = Callable[[str], object]


class Died(LudusError):
    """The child ended without a word; `code` is its exit code, negative of a signal."""

    def __init__(self, code: int) -> None:
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        super().__init__(f"ended its process {how}")
        self.code = code


class Stuck(LudusError):
    """The child did nothing for `seconds`, and was killed."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"held the interpreter (the GIL) for more than {seconds:g} s, so that no time limit "
            "could stop it: a computation in C that does not release it, such as a huge power"
        )


@dataclass(frozen=True, slots=True)
class Ended:
    """The exit code of the child's work, and the bytes that it printed."""

    code: int
    noise: int


class _Watch:
    """The parent's view of the child: its heartbeat, and how long it may still live."""

    def __init__(self, silent_s: float) -> None:
        self.silent_s, self.child, self._killed_at = silent_s, 0, float("inf")
        self._beats = mmap.mmap(-1, 1)
        self._seen, self._silence_s, self._looked = 0, 0.0, time.monotonic()
        self.signal: int | None = None  # the first that this process received

    def start_beating(self) -> None:
        """Beat in a thread; for the child."""

        def beat() -> None:
            while True:
                self._beats[0] = (self._beats[0] + 1) % 256
                time.sleep(BEAT_S)

        threading.Thread(target=beat, daemon=True).start()

    def pass_on(self, number: int, _: object) -> None:
        """A signal handler of the parent. Ctrl-C of a terminal reaches the child itself."""
        if number != signal.SIGINT:
            os.kill(self.child, number)
        self.signal = self.signal or number
        self._killed_at = min(self._killed_at, time.monotonic() + GRACE_S)

    def look(self) -> None:
        """Kill a child that was told to end and did not. Errors: Stuck for one without a beat,
        which is killed too."""
        now, beats = time.monotonic(), self._beats[0]
        # Both may have been stopped by Ctrl-Z: a look counts a second at most.
        since = min(now - self._looked, 1.0)
        self._silence_s = 0.0 if beats != self._seen else self._silence_s + since
        self._seen, self._looked = beats, now
        if now > self._killed_at:
            os.kill(self.child, signal.SIGKILL)
        if self._silence_s > self.silent_s:
            os.kill(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)
            raise Stuck(self.silent_s)


def in_child(
    work: Callable[[Tell], int],
    tell: Tell,
    noise: Callable[[bytes], object],
    silent_s: float = 60.0,
) -> Ended:
    """Run `work(tell)` in a forked process: what it tells is told here. To be called before this
    process has threads.

    Args:
        noise: receives what the child prints to its standard output and error.
        silent_s: seconds without a sign of life after which the child is killed.

    Errors: Died; Stuck; LudusError of `work`, with its exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    words, printed, watch = os.pipe(), os.pipe(), _Watch(silent_s)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if not child:
        os.close(words[0])
        os.close(printed[0])
        _work(work, words[1], printed[1], watch)
    os.close(words[1])
    os.close(printed[1])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *FORWARDED)}
    watch.child = child
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, watch.pass_on)
    try:
        code, last, size = _relay(watch, words[0], printed[0], tell, noise)
    finally:
        os.close(words[0])
        os.close(printed[0])
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if last is None and watch.signal is not None:
        stopped = LudusError("stopped")
        stopped.exit_code = 128 + watch.signal
        raise stopped
    if last is None:
        raise Died(code)
    if last["error"] is not None:
        error = LudusError(last["error"])
        error.exit_code = last["code"]
        raise error
    return Ended(last["code"], size)


def _work(work: Callable[[Tell], int], words: int, printed: int, watch: _Watch) -> NoReturn:
    """The child's life."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    watch.start_beating()
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))

    def send(message: object) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(words, data) :]

    code, error = 1, None
    try:
        code = work(lambda text: send({"told": text}))
    except LudusError as failure:
        code, error = failure.exit_code, str(failure)
    except KeyboardInterrupt as stop:
        code, error = exit_code(stop), str(stop) or "stopped"
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    with suppress(OSError):  # the parent was killed
        send({"code": code, "error": error})
    os._exit(code)  # threads that hang are left behind


def _relay(
    watch: _Watch, words: int, printed: int, tell: Tell, noise: Callable[[bytes], object]
) -> tuple[int, dict[str, Any] | None, int]:
    """Pass on what the child tells and prints until it ends. Its own children may hold the pipes
    for longer.

    Returns its exit code, its last word (None: there is none), and the size of what it printed.
    """
    last: dict[str, Any] | None = None
    line, size, code, rest = b"", 0, None, MAX_REST
    with selectors.DefaultSelector() as selector:
        for pipe in (words, printed):
            os.set_blocking(pipe, False)
            selector.register(pipe, selectors.EVENT_READ)
        while True:
            ready = [key.fd for key, _ in selector.select(0.0 if code is not None else POLL_S)]
            for pipe in ready:
                if not (data := os.read(pipe, 1 << 16)):
                    selector.unregister(pipe)
                elif pipe == printed:
                    noise(data[: max(MAX_NOISE - size, 0)])
                    size += len(data)
                else:
                    *lines, line = (line + data).split(b"\n")
                    for message in map(json.loads, lines):
                        if "told" in message:
                            tell(message["told"])
                        else:
                            last = message
            if code is not None:
                rest -= 1
                if not ready or not rest:
                    return code, last, size
            if code is None:
                done, status = os.waitpid(watch.child, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if done else None
            if code is None:
                watch.look()
                if not selector.get_map():
                    time.sleep(POLL_S)
