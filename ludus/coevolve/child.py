"""A role's training in a second process, for `side_by_side`.

The process (`ludus.coevolve.__main__`) holds no lock but its run's, and does not record the stage:
the parent does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ludus.core.errors import LudusError
from ludus.core.system.processes import started


class Child:
    """A process that trains a role.

    Args:
        recipe: the resolved recipe in the co-evolution's folder.
        log: receives what the process prints.
    """

    def __init__(self, recipe: Path, role: str, iteration: int, log: Path) -> None:
        self._name, self._log = f"{role} of iteration {iteration}", log
        command = [sys.executable, "-m", "ludus.coevolve"]
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [*command, str(recipe), role, str(iteration), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C is for the parent, which passes it on
            )
        started(self._process.pid, f"training of {self._name}")

    def wait(self) -> None:
        """Wait for its end. Errors: LudusError with its last line where it failed."""
        if (code := self._process.wait()) != 0:
            lines = self._log.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise LudusError(
                f"{self._name} failed with exit code {code}: {lines[-1]} ({self._log})"
            )

    def stop(self) -> None:
        """Let it save its last step and end; does nothing where it has ended."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()


@contextmanager
def beside(child: Child | None) -> Iterator[None]:
    """Wait for the child at the end of the body; stop it where the body fails."""
    if child is None:
        yield
        return
    try:
        yield
        child.wait()
    except BaseException:
        child.stop()
        raise
