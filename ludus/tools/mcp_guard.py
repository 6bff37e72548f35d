"""Runs an MCP server for a client, and leaves no process behind: `mcp_guard.py LIMIT COMMAND...`.

A program of its own, of Python's standard library alone. The server reads the client's pipe; its
output passes through here. A line of stdout that is no JSON object (a forgotten `print`) is
dropped, as is what the server writes to stderr after MAX_NOISE bytes. The server and all that it
started are killed when

- the client closes the pipe or dies, and the server has not ended GRACE_S seconds later,
- the server ends,
- the server writes a line of more than LIMIT bytes, or bytes that are not UTF-8.

Processes that the server detached (setsid, double fork) are found too: this process is their
subreaper (Linux), so it becomes their parent.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 1.0
MAX_NOISE = 100_000
"""Bytes of the server's stderr that are passed on."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TOO_LONG, NOT_UTF8 = 3, 4
"""Exit codes where a line was too long, or not in UTF-8."""


def main() -> int:
    """Run the server; returns the exit code."""
    limit, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    parent = os.getppid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGTERM, end)
    if os.getppid() != parent:  # the client died before prctl
        return 1
    try:
        try:
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except FileNotFoundError:
            print(f"there is no program {command[0]!r}", file=sys.stderr)
            return 127
        except OSError as error:
            print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
            return 127
        return relay(server, limit)
    finally:
        kill_descendants()


def end(number: int, frame: object) -> None:
    """End at the first SIGTERM; one more comes for each thread of a client that is killed."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def relay(server: subprocess.Popen[bytes], limit: int) -> int:
    """Pass the server's output on until it ends; returns the exit code."""
    assert server.stdout is not None
    assert server.stderr is not None
    source, ended = server.stdout.fileno(), os.pidfd_open(server.pid)
    noise, messages = Noise(server.stderr.fileno()), Messages()
    poll = select.poll()
    poll.register(source, select.POLLIN)
    poll.register(noise.fd, select.POLLIN)
    poll.register(ended, select.POLLIN)
    poll.register(0, select.POLLRDHUP)  # and POLLHUP, which is always reported
    deadline, length = None, 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    while True:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        ready = dict(poll.poll(wait))
        if noise.fd in ready and not noise.pass_on():
            poll.unregister(noise.fd)
        if source in ready:
            data = os.read(source, 65536)
            if not data:
                poll.unregister(source)
            try:
                decoder.decode(data)
            except UnicodeDecodeError:
                return NOT_UTF8
            first, newline, _ = data.partition(b"\n")
            if length + len(first) > limit:
                return TOO_LONG
            length = len(data) - data.rfind(b"\n") - 1 if newline else length + len(data)
            write(messages.only(data))
        elif ended in ready:
            while noise.left > 0 and noise.pass_on():
                pass
            return server.wait()
        if 0 in ready:
            poll.unregister(0)
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() >= deadline:
            return 1


class Noise:
    """Passes a server's stderr on, up to MAX_NOISE bytes."""

    def __init__(self, fd: int) -> None:
        self.fd, self.left = fd, MAX_NOISE
        os.set_blocking(fd, False)

    def pass_on(self) -> bool:
        """Read what is there; False at the end, and where nothing is there."""
        try:
            data = os.read(self.fd, 65536)
        except BlockingIOError:
            return False
        if self.left > 0:
            self.left -= len(data)
            with contextlib.suppress(OSError):
                os.write(2, data)
            if self.left <= 0:
                tell(f"the MCP server wrote {MAX_NOISE:,} bytes to stderr; the rest is dropped")
        return bool(data)


class Messages:
    """Drops the lines that are no JSON objects, and says so once."""

    def __init__(self) -> None:
        self.begins, self.passes, self.told = True, True, False

    def only(self, data: bytes) -> bytes:
        """The messages in a piece of the output."""
        kept = []
        for line in re.findall(rb"[^\n]*\n|[^\n]+", data):
            if self.begins:
                self.passes = line.lstrip()[:1] == b"{"
                if not self.passes and line.strip() and not self.told:
                    self.told = True
                    shown = line[:80].decode("utf-8", "replace").rstrip()
                    tell(f"the MCP server writes lines to stdout that are no messages: {shown!r}")
            if self.passes:
                kept.append(line)
            self.begins = line.endswith(b"\n")
        return b"".join(kept)


def tell(text: str) -> None:
    """Say something to the client's user."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def write(data: bytes) -> None:
    """Errors: BrokenPipeError where the client is gone."""
    while data:
        data = data[os.write(1, data) :]


def kill_descendants() -> None:
    """Kill all children, and those that become children by that."""
    while children := list_children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def list_children() -> list[int]:
    """The processes whose parent this process is."""
    own = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{own}/task/{own}/children").read_text().split()]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        os._exit(1)
