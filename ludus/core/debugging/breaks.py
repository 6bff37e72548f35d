"""The state that the breakpoints of a run share with its command, by a folder: the tags
that are on, what happened, and whether breakpoints still wait."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

TAGS = "LUDUS_BREAK"
"""Environment variable with the tags that are switched on, separated by commas."""

FOLDER = "LUDUS_BREAK_FOLDER"
"""Environment variable with the folder in which breakpoints report to the command: lines in
`EVENTS`. They wait for a debugger while it holds the file `WAITING`."""

EVENTS, WAITING = "events", "waiting"


def report(event: str, text: str) -> bool:
    """Tell the command. Returns False without one. Lines of several processes do not mix."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return False
    with suppress(OSError):
        file = os.open(Path(folder) / EVENTS, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, f"{json.dumps([event, text])}\n".encode())
        finally:
            os.close(file)
        return True
    return False


def waits() -> bool:
    """True if breakpoints wait for a debugger; False once the command lets them go on."""
    folder = os.environ.get(FOLDER)
    return not folder or (Path(folder) / WAITING).exists()


def let_go() -> None:
    """End all waiting in this run, and all sessions of pdb; no breakpoint stops any more."""
    if folder := os.environ.get(FOLDER):
        with suppress(OSError):
            (Path(folder) / WAITING).unlink(missing_ok=True)


def in_an_editor() -> bool:
    """True where an editor has started this process under debugpy, or is attached."""
    # Another thread may be importing it: then it has no functions yet, and no client.
    connected = getattr(sys.modules.get("debugpy"), "is_client_connected", None)
    return connected is not None and bool(connected())
