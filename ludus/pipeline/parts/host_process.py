"""The process of a host: started, watched, and ended with all that it started."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ludus.backends.hosts import HostJob
from ludus.core.system.processes import MARK, Process, descendants, end, identify, marked, started

GRACE_S = 10.0
"""Seconds that the process has to end its workers."""

_PREFIX = re.compile(r"\x1b\[[0-9;]*m(?:\(\S+ pid=[^)]*\))?")
_ERROR = re.compile(r"(?!ray\.exceptions\.)(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt): \S")
NUM_ERRORS = 3


class HostProcess:
    """A running host. Its workers, and theirs, end with it.

    Args:
        what: its name in the run's record of processes.
    """

    def __init__(self, job: HostJob, what: str) -> None:
        self.job = job
        with job.log.open("ab") as log:
            self._process = subprocess.Popen(
                job.command,
                stdin=subprocess.PIPE,  # it ends when this process has gone
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **job.environment},
                start_new_session=True,  # Ctrl-C reaches it through us
            )
        started(self._process.pid, what)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def errors(self) -> str:
        """The last errors in its log, and the log's path."""
        try:
            lines = self.job.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        plain = (_PREFIX.sub("", line).strip() for line in lines)
        found = [line[:300] for line in plain if _ERROR.match(line)]
        last = list(dict.fromkeys(found))[-NUM_ERRORS:]
        return "\n    ".join([f"see {self.job.log}", *last])

    def close(self) -> None:
        """End the process and all that it started. Idempotent."""
        own = identify(self._process.pid)
        family = descendants([own]) if own else []
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        mark = os.environ.get(MARK)
        # Ray's workers change their titles, which overwrites the mark: they are of the family.
        left = [*family, *(marked(mark) if mark else [])]
        strangers = {os.getpid(), *(p.pid for p in _others(self._process.pid))}
        with suppress(PermissionError):
            end([p for p in left if p.pid not in strangers], signal.SIGKILL, GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self.job.temporary is not None:
            shutil.rmtree(self.job.temporary, ignore_errors=True)


def _others(host: int) -> list[Process]:
    """The children of this process besides the host, such as an environment's worker, which have
    the run's mark too."""
    own = identify(os.getpid())
    everyone = descendants([own]) if own else []
    of_host = identify(host)
    theirs = {p.pid for p in descendants([of_host])} if of_host else set()
    return [p for p in everyone if p.pid != host and p.pid not in theirs]


@contextmanager
def running(job: HostJob, what: str) -> Iterator[HostProcess]:
    """Start a host's process; end it after the block."""
    process = HostProcess(job, what)
    try:
        yield process
    finally:
        process.close()
