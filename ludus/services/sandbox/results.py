"""The end of a run in SandboxFusion's form."""

from __future__ import annotations

from pydantic import BaseModel

from ludus.sandbox.base import RunResult, RunStatus

KILLED = -9
"""`return_code` of a run that exceeded its memory or output."""


class CommandResult(BaseModel):
    """A command's end. `limit` is ludus' own: the limit that ended it, if not the time."""

    status: str
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    limit: str | None = None


def command_result(result: RunResult) -> CommandResult:
    """A run's end."""
    ended = CommandResult(
        status="Finished",
        execution_time=result.seconds,
        return_code=result.exit_code,
        stdout=result.stdout,
        stderr=result.stderr,
    )
    if result.status is RunStatus.TIME_LIMIT:
        ended.status = "TimeLimitExceeded"
    elif result.status in (RunStatus.MEMORY_LIMIT, RunStatus.OUTPUT_LIMIT):
        ended.limit = result.status.value
        ended.return_code = KILLED if result.exit_code is None else result.exit_code
    return ended
