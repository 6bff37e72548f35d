"""Runs a part of a command in a forked process, so that foreign code cannot end the command.

    code = in_child(check, typer.echo, noise)      # check(tell) returns the exit code

`os._exit`, a crash in native code and a call of `exit` in a thread end the child alone, and are an
error here. What the child prints is passed on up to MAX_NOISE; what is beyond is counted.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import sys
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

Tell = Callable[[str], object]


class Died(LudusError):
    """The child ended without a word; `code` is its exit code, negative of a signal."""

    def __init__(self, code: int) -> None:
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        super().__init__(f"ended its process {how}")
        self.code = code


@dataclass(frozen=True, slots=True)
class Ended:
    """The exit code of the child's work, and the bytes that it printed."""

    code: int
    noise: int


def in_child(work: Callable[[Tell], int], tell: Tell, noise: Callable[[bytes], object]) -> Ended:
    """Run `work(tell)` in a forked process: what it tells is told here. To be called before this
    process has threads.

    Args:
        noise: receives what the child prints to its standard output and error.

    Errors: Died; LudusError of `work`, with its exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    words, printed = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if not child:
        os.close(words[0])
        os.close(printed[0])
        _work(work, words[1], printed[1])
    os.close(words[1])
    os.close(printed[1])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *FORWARDED)}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in FORWARDED:
        if handlers[number] is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: os.kill(child, number))
    try:
        code, last, size = _relay(child, words[0], printed[0], tell, noise)
    finally:
        os.close(words[0])
        os.close(printed[0])
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if last is None:
        raise Died(code)
    if last["error"] is not None:
        error = LudusError(last["error"])
        error.exit_code = last["code"]
        raise error
    return Ended(last["code"], size)


def _work(work: Callable[[Tell], int], words: int, printed: int) -> NoReturn:
    """The child's life."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
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
    child: int, words: int, printed: int, tell: Tell, noise: Callable[[bytes], object]
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
                done, status = os.waitpid(child, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if done else None
            if not selector.get_map() and code is None:
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
