"""`--break TAG` of a command: switches tags on, prints where they wait, reports those not reached.

The processes of a run know the tags from their environment, and report by lines of a file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ludus.config.schema import RunConfig
from ludus.core.debugging.breakpoints import HERE
from ludus.core.debugging.breaks import EVENTS, FOLDER, TAGS, WAITING
from ludus.core.debugging.debugger import DEBUGGER, DEBUGGERS
from ludus.core.errors import ConfigError, did_you_mean
from ludus.core.modules import require

PATIENT_S = 1e6
"""Time limits while breakpoints are on: a user looks at variables for minutes."""

POLL_S = 0.2
_TAG = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def check_tags(tags: Sequence[str], debugger: str | None = None) -> None:
    """Errors: ConfigError for a text that is no tag, or an unknown debugger; MissingDependency."""
    for tag in tags:
        if not _TAG.fullmatch(tag):
            raise ConfigError(
                f"--break {tag!r:.100}: a tag is of letters, digits and `_-.:`, at most 64"
            )
    if debugger is None:
        return
    if debugger not in DEBUGGERS:
        raise ConfigError(f"--debugger: {debugger!r} is none{did_you_mean(debugger, DEBUGGERS)}")
    if not tags:
        raise ConfigError("--debugger: nothing stops for it without --break TAG")
    if debugger == "debugpy":
        require("debugpy", "debug", "--debugger debugpy")


@contextmanager
def switched_on(
    tags: Sequence[str],
    say: Callable[[str], object],
    *,
    debugger: str | None = None,
    here: bool = False,
) -> Iterator[None]:
    """Switch tags on in this process and those that it starts.

    Args:
        say: called with a line for each breakpoint that waits, and for tags that were not reached.
        debugger: pdb (default) or debugpy.
        here: pdb uses the terminal of this process.

    Errors: as `check_tags`.
    """
    check_tags(tags, debugger)
    if not tags:
        yield
        return
    folder = Path(tempfile.mkdtemp(prefix="ludus-break-"))  # a socket's path must be short
    (folder / WAITING).touch()
    names = {TAGS: ",".join(tags), FOLDER: str(folder), DEBUGGER: debugger or DEBUGGERS[0]}
    if here:
        names[HERE] = str(os.getpid())
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    events = _Events(folder / EVENTS, say)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        told = events.close()
        shutil.rmtree(folder, ignore_errors=True)  # what still waits goes on
        met = {text for event, text in told if event != "waits"}
        for tag in dict.fromkeys(tags):
            if ("reached", tag) not in told:
                say(f"--break {tag}: never reached{did_you_mean(tag, met)}")


class _Events:
    """Reads the lines of the processes as they come, and prints where a breakpoint waits."""

    def __init__(self, path: Path, say: Callable[[str], object]) -> None:
        path.touch()
        self._path, self._say = path, say
        self._told: set[tuple[str, str]] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._path.open(encoding="utf-8") as file:
            last = False
            while not last:
                last = self._ended.wait(POLL_S)
                for line in file:
                    event, text = json.loads(line)
                    self._told.add((event, text))
                    if event == "waits":
                        self._say(text)

    def close(self) -> set[tuple[str, str]]:
        """Read the last lines; returns all, as event and text."""
        self._ended.set()
        self._thread.join()
        return self._told


def patient(config: RunConfig) -> RunConfig:
    """The configuration without time limits of episodes, steps, calls and demonstrations."""
    rollout = config.rollout
    calls = rollout.tool_calls.model_copy(update={"deadline_s": PATIENT_S})
    limits = {"episode_deadline_s": PATIENT_S, "step_deadline_s": PATIENT_S, "tool_calls": calls}
    changes: dict[str, object] = {"rollout": rollout.model_copy(update=limits)}
    if config.demonstrations is not None:
        update = {"timeout_s": PATIENT_S}
        changes["demonstrations"] = config.demonstrations.model_copy(update=update)
    return config.model_copy(update=changes)
