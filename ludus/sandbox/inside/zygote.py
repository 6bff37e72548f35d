"""Runs inside the jail: forks a slot for each concurrent call, and in it a fresh namespace a call.

zygote      in bubblewrap; has loaded the packages; forks slots
slot        serves one call after another; stays in the slot's cgroup
init        process 1 of a call's own namespaces: mounts, writes files, watches the time
program     the untrusted code: no capabilities, limits, system-call filter
"""

from __future__ import annotations

import gc
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, os.path.abspath(f"{os.path.dirname(__file__)}/../../.."))

from ludus.sandbox.inside.frames import receive_frame, send_frame
from ludus.sandbox.inside.init import Init
from ludus.sandbox.inside.kernel import NAMESPACES, PR_SET_PDEATHSIG, clone, libc

GRACE_S = 0.2
"""Seconds after a call's limit at which the slot ends a call whose init does not answer."""


def serve_zygote(sock: socket.socket, settings: Mapping[str, Any]) -> None:
    """Fork a slot for each socket that arrives; end with the host."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 1, 1)
        if not data:
            return
        if os.fork() == 0:
            sock.close()
            serve_slot(socket.socket(fileno=fds[0]), settings)
            os._exit(0)
        os.close(fds[0])


def serve_slot(sock: socket.socket, settings: Mapping[str, Any]) -> None:
    """Serve calls until the host closes the socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    sock.sendall(b"h")  # the kernel tells the host this process's id beside it
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 1, 2)
        frame = receive_frame(sock) if data else None
        if frame is None:
            return
        job, blobs = frame
        folder = None if settings["isolated"] else tempfile.mkdtemp(prefix="ludus-")
        try:
            pid = clone(NAMESPACES if settings["isolated"] else 0)
        except OSError as error:
            send_frame(sock, {"event": "end", "error": str(error)})
            continue
        if pid == 0:
            Init(sock, fds, settings, folder).run(job, blobs)
        for fd in fds:
            os.close(fd)
        send_frame(sock, supervise(pid, job))
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def supervise(pid: int, job: Mapping[str, Any]) -> dict[str, Any]:
    """Wait for init; end it where it exceeds the call's time."""
    handle = os.pidfd_open(pid)
    limit = job["run_s"] + (job["compile_s"] if job["compile"] else 0)
    late = not select.select([handle], [], [], None if job["session"] else limit + GRACE_S)[0]
    if late:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(handle)
    return {"event": "end", "late": late, "killed": os.WIFSIGNALED(status)}


def load(packages: Sequence[str]) -> list[str]:
    """Import the packages that calls shall find loaded; returns those that could be."""
    loaded = []
    for name in packages:
        try:
            __import__(name)
        except ImportError:
            continue
        loaded.append(name)
    if "numpy" in loaded:
        __import__("numpy.random")  # numpy itself loads it at its first use, in 40 ms
    return loaded


def load_prelude(modules: Mapping[str, str]) -> None:
    """Make modules of ludus' own from their source; programs import them by name."""
    for name, source in modules.items():
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(source, f"<{name}>", "exec"), module.__dict__)


def main() -> None:
    """Serve the host at the socket whose number is the argument."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    frame = receive_frame(sock)
    if frame is None:
        return
    settings = frame[0]
    os.environ.update(settings["environment"])
    sys.path.append(settings["packages_dir"])
    load_prelude(settings["prelude"])  # first: it may choose how a package is loaded
    loaded = load(settings["packages"])
    if settings.get("forward"):
        __import__("ludus.sandbox.inside.forward")
    gc.collect()
    gc.freeze()
    send_frame(sock, {"event": "ready", "loaded": loaded})
    serve_zygote(sock, settings)


if __name__ == "__main__":
    main()
