"""Stops at a breakpoint: waits for a debugger, pdb over a Unix socket or debugpy on a port.

`python -m ludus.core.debugging.debugger SOCKET` connects the terminal to a waiting pdb.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pdb
import select
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ludus.core.debugging.breaks import FOLDER, TAGS, in_an_editor, let_go, report, waits

DEBUGGER = "LUDUS_DEBUGGER"
"""Environment variable: pdb or debugpy; default: pdb."""

DEBUGGERS = ("pdb", "debugpy")

POLL_S = 0.2

WAIT_S = 3600.0
"""Seconds for which a breakpoint waits for a debugger: a run that nobody watches goes on."""

_lock = threading.Lock()
_numbers = itertools.count(1)
_port: int | None = None
_sessions = threading.local()


def stop(tag: str, frame: FrameType) -> None:
    """Wait for a debugger, and stop in `frame`. Does nothing once breakpoints are let go."""
    place = f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
    where = f"breakpoint {tag} ({place}) in process {os.getpid()}"
    if in_an_editor():
        _suspend(frame)
    elif not waits():
        return
    elif os.environ.get(DEBUGGER) == "debugpy":
        _stop_with_debugpy(where, frame)
    else:
        _stop_with_pdb(where, frame)


def announce(text: str) -> None:
    """Tell the user: through the command where there is one, else on stderr."""
    if not report("waits", text):
        sys.stderr.write(f"{text}\n")  # at once: `print` of two threads may mix their lines
        sys.stderr.flush()


def _wait_until(attached: Callable[[], bool], where: str) -> bool:
    """Returns False where nobody attached: breakpoints were let go, or WAIT_S have passed."""
    deadline = time.monotonic() + WAIT_S
    while not attached():
        if not waits():
            return False
        if time.monotonic() > deadline:
            announce(f"{where}: no debugger within {WAIT_S:g} s: all breakpoints are off now")
            let_go()
            os.environ.pop(TAGS, None)  # where there is no command
            return False
    return True


# debugpy


def _stop_with_debugpy(where: str, frame: FrameType) -> None:
    global _port
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # else it warns of frozen modules
    import debugpy

    def attached() -> bool:
        time.sleep(POLL_S)
        return bool(debugpy.is_client_connected())

    with _lock:
        if _port is None:
            _port = int(debugpy.listen(("127.0.0.1", 0))[1])
    announce(f"{where} waits: attach a debugger (debugpy) to 127.0.0.1:{_port}")
    if _wait_until(attached, where):
        _suspend(frame)


def _suspend(frame: FrameType) -> None:
    """Stop in `frame` for the debugpy client that is attached."""
    import pydevd  # part of debugpy, whose own `breakpoint` would stop in the caller's frame

    pydevd.settrace(
        suspend=True,
        trace_only_current_thread=True,
        patch_multiprocessing=False,
        stop_at_frame=frame,
    )


# pdb


def _stop_with_pdb(where: str, frame: FrameType) -> None:
    session: SocketPdb | None = getattr(_sessions, "session", None)
    if session is not None and not session.closed:
        session.stop_in(frame)
    elif (connection := _accept(where)) is not None:
        session = _sessions.session = SocketPdb(connection)
        session.set_trace(frame)


def _accept(where: str) -> socket.socket | None:
    """Wait for a client on a socket of its own, which only this user can open."""
    with contextlib.ExitStack() as opened, socket.socket(socket.AF_UNIX) as listening:
        folder = os.environ.get(FOLDER) or opened.enter_context(
            tempfile.TemporaryDirectory(prefix="ludus-break-")
        )
        path = f"{folder}/{os.getpid()}-{next(_numbers)}.sock"
        try:
            listening.bind(path)
        except OSError as error:  # a TMPDIR of over 80 characters
            announce(f"{where} cannot wait: {path}: {error}")
            return None
        listening.listen(1)
        python = "python" if shutil.which("python") == sys.executable else sys.executable
        announce(f"{where} waits:\n  {python} -m ludus.core.debugging.debugger {path}")
        attached = _wait_until(lambda: _is_readable(listening), where)
        with contextlib.suppress(OSError):  # the command has removed its folder
            os.unlink(path)
        return listening.accept()[0] if attached else None


def _is_readable(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], POLL_S)[0])


class _Stream:
    """A connection as a file, which is empty once the client is gone or breakpoints are let go."""

    encoding = "utf-8"

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""

    def readline(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            while b"\n" not in self._received and waits():
                if _is_readable(self._connection):
                    if not (piece := self._connection.recv(65536)):
                        break
                    self._received += piece
        line, end, self._received = self._received.partition(b"\n")
        return (line + end).decode("utf-8", "replace")

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._connection.sendall(text.encode("utf-8", "backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Every `write` is sent at once."""

    def close(self) -> None:
        self._connection.close()


class SocketPdb(pdb.Pdb):
    """pdb for a client of a socket. `quit`, or a client that leaves, lets the program go on."""

    def __init__(self, connection: socket.socket) -> None:
        stream: Any = _Stream(connection)
        self._stream, self.closed = stream, False
        super().__init__(stdin=stream, stdout=stream, nosigint=True, readrc=False)
        self.use_rawinput = False

    def _cmdloop(self) -> None:
        self.cmdloop()  # Ctrl-C is the run's: pdb's own loop would swallow it

    def stop_in(self, frame: FrameType) -> None:
        """Stop in a frame while this debugger traces already: `set_trace` would stop in itself."""
        frame.f_trace = self.trace_dispatch
        self.set_next(frame)
        sys.settrace(self.trace_dispatch)

    def do_continue(self, arg: str) -> bool | None:
        """Continue; without breakpoints left, the client is sent away."""
        if not self.get_all_breaks():
            self.closed = True
            self._stream.close()
        return super().do_continue(arg)

    do_c = do_cont = do_continue

    def do_quit(self, arg: str) -> bool | None:
        """Remove all breakpoints, and continue."""
        self.clear_all_breaks()
        return self.do_continue(arg)

    do_q = do_exit = do_EOF = do_quit

    def do_clear(self, arg: str) -> bool | None:
        """Remove breakpoints; all of them without asking, as pdb would ask in the terminal."""
        if arg:
            return super().do_clear(arg)
        self.clear_all_breaks()
        return None

    do_cl = do_clear

    def _refuse(self, arg: str) -> None:
        self.error("not over a socket")  # they would end the program, or read its terminal

    do_run = do_restart = do_interact = _refuse


# The client


def main() -> int:
    """Connect the terminal to a waiting pdb."""
    if len(sys.argv) != 2:
        print("usage: python -m ludus.core.debugging.debugger SOCKET", file=sys.stderr)
        return 2
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(sys.argv[1])
        except OSError as error:
            print(f"{sys.argv[1]}: no breakpoint waits there: {error.strerror}", file=sys.stderr)
            return 1
        threading.Thread(target=_send_lines, args=(connection,), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt, ConnectionResetError):
            while piece := connection.recv(65536):
                sys.stdout.write(piece.decode("utf-8", "replace"))
                sys.stdout.flush()
    sys.stdout.flush()
    os._exit(0)  # the other thread still reads the terminal


def _send_lines(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        for line in sys.stdin:
            connection.sendall(line.encode())
        connection.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    sys.exit(main())
