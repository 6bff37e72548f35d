"""Train one role of a co-evolution: the second process of `side_by_side` (see `child`).

It ends with its parent: the kernel sends it SIGTERM, and it saves its last step.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from ludus.coevolve.flow import Coevolution
from ludus.coevolve.storage import Storage
from ludus.config.coevolve import CoevolveConfig
from ludus.config.load import load_as
from ludus.core.errors import LudusError
from ludus.pipeline.launch import Stopped
from ludus.pipeline.monitoring.progress import Display

_PR_SET_PDEATHSIG = 1


def _end_with(parent: int) -> None:
    """Ask the kernel for SIGTERM at the parent's end; end at once where it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(143)


def main(recipe: str, role: str, iteration: str, parent: str) -> None:
    """Train the role's run up to its exported model."""
    _end_with(int(parent))
    path = Path(recipe)
    display = Display()
    flow = Coevolution(load_as(CoevolveConfig, path), Storage(path.parent), display)
    try:
        flow.train_role("curriculum" if role == "curriculum" else "executor", int(iteration))
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(stopped.exit_code)
    except LudusError as error:
        print(f"ludus: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    finally:
        display.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
