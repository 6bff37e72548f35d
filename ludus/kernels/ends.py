"""Limits of processor time, and ends of a run for which the code is not to blame.

A busy or paused machine makes every program slow, so the limit of a judged run is processor time,
which Linux enforces inside of the jail (SIGXCPU). Wall time only ends what hangs: programs
here have no call with which they could sleep.
"""

from __future__ import annotations

import math
import signal
from dataclasses import replace

from ludus.core.errors import ToolError
from ludus.sandbox.base import Limits, RunResult, RunStatus

WALL = 6
"""Seconds of wall time for each second of processor time that a run may take."""


def cpu_seconds(limits: Limits) -> int:
    """Processor seconds of a run; Linux counts whole ones."""
    return math.ceil(limits.run_s)


def waiting_longer(limits: Limits) -> Limits:
    """The limits with the wall time in which the processor time is surely spent."""
    return replace(limits, run_s=WALL * cpu_seconds(limits))


def check_blame(result: RunResult, what: str, limits: Limits) -> None:
    """Errors: ToolError where the end says nothing of the code: something outside of the sandbox
    killed its process, or the machine gave it too little time. `limits` without `waiting_longer`.
    """
    if result.status is RunStatus.TIME_LIMIT:
        raise ToolError(
            f"kernels: {what} got less than {cpu_seconds(limits)} s of the processor in "
            f"{WALL * cpu_seconds(limits)} s: the machine is too busy, or was paused"
        )
    if result.status is RunStatus.ERROR and result.exit_code == -signal.SIGKILL:
        raise killed(what)


def killed(what: str) -> ToolError:
    """The error of a process that something outside of the sandbox killed."""
    return ToolError(
        f"kernels: {what} was killed from outside of the sandbox (is the machine out of memory?)"
    )


def out_of_time(result: RunResult) -> bool:
    """True where a run has used its processor time."""
    return result.exit_code == -signal.SIGXCPU
