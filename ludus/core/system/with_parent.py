"""Runs a program that ends with its parent.

    python -m ludus.core.system.with_parent PARENT PROGRAM...

The program takes this process's place (exec) and gets SIGTERM when the parent's thread that
started it ends, also where the parent is killed (Linux; elsewhere it only ends as told).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process by the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before
        sys.exit(1)
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
