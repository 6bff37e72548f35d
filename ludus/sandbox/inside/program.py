"""Becomes the untrusted program: limits, system-call filter, then a command or Python code."""

from __future__ import annotations

import atexit
import builtins
import gc
import linecache
import os
import resource
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ludus.sandbox.inside.frames import exactly
from ludus.sandbox.inside.kernel import PR_SET_DUMPABLE, drop_capabilities, filter_calls, libc

MAX_OPEN_FILES = 256
REFUSED = 125
"""Exit code where the limits could not be set."""


def start_program(
    settings: Mapping[str, Any],
    work: str,
    job: Mapping[str, Any],
    command: Sequence[str],
    streams: tuple[int, int, int],
    channel: int | None = None,
) -> NoReturn:
    """Become the untrusted program.

    Args:
        streams: stdin, stdout and stderr.
        channel: a session's socket, whose code an interpreter runs.
    """
    kept = [] if channel is None else [channel]
    confine(settings, work, job, streams, kept=kept, warm=not command)
    try:
        if command:
            os.execvp(command[0], [*command])
        if channel is None:
            run_warm(work)
        serve_interpreter(socket.socket(fileno=channel), work)
    except OSError as error:
        os.write(2, f"{command[0] if command else 'python'}: {error.strerror}\n".encode())
        os._exit(127)


def confine(
    settings: Mapping[str, Any],
    work: str,
    job: Mapping[str, Any],
    streams: tuple[int, int, int],
    *,
    kept: Sequence[int],
    warm: bool,
) -> None:
    """Give up all that the program shall not have; ends the process where that fails.

    Args:
        streams: stdin, stdout and stderr.
        kept: further files that stay open.
        warm: the process goes on with what the zygote has loaded.
    """
    try:
        for target, fd in enumerate(streams):
            os.dup2(fd, target)
        first = 3
        for fd in sorted(kept):
            os.closerange(first, fd)
            first = fd + 1
        os.closerange(first, 1 << 16)
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update({**settings["environment"], "HOME": work})
        if "become" in settings:  # in gVisor; in the jail init has done it
            drop_capabilities(settings["become"][0])
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # the kernel ends the program, not its init
        limit_resources(job, isolated=settings["isolated"], warm=warm)
        if settings["isolated"]:
            filter_calls(bytes.fromhex(settings["filter"]))
    except BaseException as error:
        os.write(2, f"sandbox: {error}\n".encode())
        os._exit(REFUSED)


def limit_resources(job: Mapping[str, Any], *, isolated: bool, warm: bool) -> None:
    """Set the limits of a process; its children inherit them."""
    memory = job["memory_mb"] << 20
    if warm:  # what the zygote has loaded is not the call's
        with open("/proc/self/statm") as file:
            memory += int(file.read().split()[0]) * resource.getpagesize()
    limits = {
        resource.RLIMIT_DATA if job["reserves"] else resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: job["disk_mb"] << 20,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_RTPRIO: 0,
    }
    if isolated:  # else it counts all processes of the user
        limits[resource.RLIMIT_NPROC] = job["num_processes"]
    for name, value in limits.items():
        soft, hard = resource.getrlimit(name)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        if (soft, hard) != (value, value):  # gVisor refuses to set some, even to what they are
            resource.setrlimit(name, (value, value))


# Python in a process that is loaded already


def run_warm(work: str) -> NoReturn:
    """Run `main.py` as Python would, and end."""
    namespace, code = _fresh_main(work), 1
    try:
        with open("main.py", "rb") as file:
            text = file.read()
        code = _execute(text, "main.py", namespace)
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as at exit
        atexit._run_exitfuncs()
    finally:
        os._exit(_flush() or code)


def serve_interpreter(channel: socket.socket, work: str) -> NoReturn:
    """Run code after code in one namespace; answer `0` or `1` after each."""
    namespace, number = _fresh_main(work), 0
    while True:
        try:
            text = exactly(channel, struct.unpack("=I", exactly(channel, 4))[0])
        except (EOFError, OSError):
            os._exit(0)
        number += 1
        name, source = f"<run {number}>", text.decode("utf-8", "replace")
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        code = _execute(text, name, namespace)
        _flush()
        channel.sendall(b"1" if code else b"0")


def _fresh_main(work: str) -> dict[str, Any]:
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __file__="main.py")
    sys.modules["__main__"] = main
    sys.path.insert(0, work)
    sys.argv = ["main.py"]
    gc.enable()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # else all calls would draw the same numbers
    return main.__dict__


def _execute(text: bytes, name: str, namespace: dict[str, Any]) -> int:
    """Run code; returns the exit code. A traceback shows the code's own frames only."""
    try:
        exec(compile(text, name, "exec"), namespace)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 1
    return 0


def _flush() -> int:
    """Write what is buffered; returns Python's exit code for a failure, or 0."""
    code = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            code = 120
    return code
