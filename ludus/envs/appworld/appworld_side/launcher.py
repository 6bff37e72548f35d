"""A process that has loaded AppWorld and forks its helpers: worlds, evaluators, generators.

It gets a letter (the helper's kind) and a socket for each helper on its own socket, whose number is
its argument. It ends with the host, and its helpers end with it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable

from appworld.apps import get_all_apps
from appworld.common.utils import import_apis_module

from ludus.envs.appworld.appworld_side.evaluator import serve_evaluator
from ludus.envs.appworld.appworld_side.frames import send
from ludus.envs.appworld.appworld_side.generator import serve_generator
from ludus.envs.appworld.appworld_side.world import serve_world

PR_SET_PDEATHSIG = 1

HELPERS: dict[bytes, Callable[[socket.socket], None]] = {
    b"w": serve_world,
    b"e": serve_evaluator,
    b"g": serve_generator,
}


def main() -> None:
    """Load the engine, then fork a helper for each socket that arrives."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for app in get_all_apps():
        import_apis_module(app)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the host, which ends this process
    send(control, "ready")
    while True:
        kind, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not kind:
            return
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            try:
                HELPERS[kind](socket.socket(fileno=fds[0]))
            finally:
                os._exit(0)
        os.close(fds[0])


if __name__ == "__main__":
    main()
