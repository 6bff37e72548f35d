"""Replay of a roll-out's log: its events lead to its decisions, or it is refused with the line.

`replay` reads a whole log. `LogFollower` reads on while a service appends.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from ludus.config.messages import explain, show
from ludus.core.errors import DataError
from ludus.core.files import open_regular
from ludus.services.model.rollout.controller import Controller
from ludus.services.model.rollout.events import FORMAT, Decision, Ended, Header, Scored

MAX_LINE = 100_000
"""Bytes. A line of a log has a few hundred."""

TAIL = 1_000_000
DECISION_START = b'\n{"kind": "decision"'

Content = Header | Ended | Scored | Decision
KINDS: dict[str, type[Content]] = {
    "rollout": Header,
    "ended": Ended,
    "scored": Scored,
    "decision": Decision,
}
_LINE: TypeAdapter[Content] = TypeAdapter(Annotated[Content, Field(discriminator="kind")])


@dataclass
class Replay:
    """A log and what its events lead to."""

    header: Header
    controller: Controller
    decisions: list[Decision]
    missing: list[Decision] = field(default_factory=list)
    """Decisions that follow from the last event, and are not written."""
    num_events: int = 0
    num_bytes: int = 0
    """Length of the log without a last line that was cut off."""
    num_cut_off: int = 0
    """Bytes of that last line."""

    @classmethod
    def begin(cls, line: Content, place: str) -> Replay:
        """A replay from the first line. Errors: DataError if it is none of a log."""
        if not isinstance(line, Header):
            raise DataError(f"{place}: the first line of a log of a roll-out is its header")
        if line.format != FORMAT:
            raise DataError(f"{place}: format {line.format}; this version reads {FORMAT}")
        controller = Controller(line.settings)
        return cls(line, controller, [], [controller.start(line.t)])

    def follow(self, line: Content, place: str) -> None:
        """Count the next line. Errors: DataError if it does not follow from those before."""
        if isinstance(line, Header):
            raise DataError(f"{place}: a second header: one log is one roll-out")
        if isinstance(line, Decision):
            if not self.missing or not _same(self.missing[0], line):
                told = _told(self.missing[0]) if self.missing else "no decision"
                raise DataError(f"{place}: {_told(line)} is recorded, the events give {told}")
            self.decisions.append(self.missing.pop(0))
            return
        if self.missing:
            told = _told(self.missing[0])
            raise DataError(f"{place}: the events give {told} before this line")
        self.missing = self.controller.apply(line)
        self.num_events += 1


def replay(path: Path) -> Replay:
    """Replay a log.

    Errors: DataError with the line, if the log is damaged, or has another decision than follows
    from its events; OSError.
    """
    found: Replay | None = None
    with _opened(path) as file:
        for number, end, line in _lines(file, path):
            found = _next(found, line, f"{path}:{number}")
            found.num_bytes = end
        size = os.fstat(file.fileno()).st_size
    if found is None:
        raise DataError(f"{path} has no complete line of a roll-out")
    found.num_cut_off = size - found.num_bytes
    return found


def _next(found: Replay | None, line: Content, place: str) -> Replay:
    if found is None:
        return Replay.begin(line, place)
    found.follow(line, place)
    return found


def _lines(
    file: IO[bytes], path: Path, number: int = 0, end: int = 0
) -> Iterator[tuple[int, int, Content]]:
    """Number, end in bytes, and content of each complete line after the first `number`."""
    while raw := file.readline(MAX_LINE):
        if not raw.endswith(b"\n"):
            if len(raw) < MAX_LINE:
                return  # cut off by the end of the service
            raise DataError(f"{path}:{number + 1}: not a line of a roll-out: too long")
        number, end = number + 1, end + len(raw)
        try:
            yield number, end, _LINE.validate_json(raw)
        except ValidationError:
            raise DataError(f"{path}:{number}: not a line of a roll-out: {_fault(raw)}") from None


def _fault(raw: bytes) -> str:
    """The fault of a line, in words."""
    try:
        content = json.loads(raw.decode().rstrip())
    except json.JSONDecodeError as error:
        return f"no JSON from column {error.colno} on"
    except (ValueError, RecursionError):  # no UTF-8, a number of too many digits, nested too deeply
        return "no JSON"
    if not isinstance(content, dict):
        return "no JSON object"
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        return f"kind must be one of {', '.join(KINDS)}, got {show(kind)}"
    try:
        KINDS[kind].model_validate(content)
    except ValidationError as error:
        return explain(error, KINDS[kind], noun="a field")[0][1]
    return "no JSON"  # Python reads more than JSON: a lone surrogate


def _same(decision: Decision, recorded: Decision) -> bool:
    """Reasons are words, which may differ from version to version."""
    names = ("t", "action", "share")
    return all(getattr(decision, name) == getattr(recorded, name) for name in names)


def _told(decision: Decision) -> str:
    return f"{decision.action} to {100 * decision.share:g} % at {decision.t:.3f}"


def first_line(path: Path) -> Content:
    """Errors: DataError if it is no line of a log; OSError."""
    with _opened(path) as file:
        for _, _, line in _lines(file, path):
            return line
    raise DataError(f"{path} has no complete line of a roll-out")


def last_decision(path: Path) -> Decision | None:
    """The last decision of the last TAIL bytes; None if they have none. Errors: OSError."""
    with _opened(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
        whole = file.read(TAIL).rpartition(b"\n")[0]
    start = whole.rfind(DECISION_START)
    with suppress(ValidationError):
        line = _LINE.validate_json(whole[max(0, start) :].strip().partition(b"\n")[0])
        return line if isinstance(line, Decision) else None
    return None


class LogFollower:
    """A log that is read on while a service appends to it.

    Args:
        on_line: called after each line that counts.
    """

    def __init__(
        self, path: Path, on_line: Callable[[Replay, Content], object] = lambda replayed, line: None
    ) -> None:
        self.path = path
        self._on_line = on_line
        self.replayed: Replay | None = None
        self.problem = ""
        """The reason why nothing more is read; empty if there is none."""
        self.size = 0
        """Bytes of the log when it was read last."""
        self._file: tuple[Any, ...] = ()
        self._number = 0

    @property
    def num_read(self) -> int:
        """Bytes read so far: whole lines."""
        return self.replayed.num_bytes if self.replayed else 0

    def read_on(self, seconds: float) -> bool:
        """Read for that long. Returns True if it was not enough to reach the end.

        Returns False too where the log is damaged: `problem` says so.

        Errors: OSError; Replaced if another file has the name now, or it has become shorter.
        """
        deadline = time.monotonic() + seconds
        with _opened(self.path) as file:
            found = os.fstat(file.fileno())
            identity = (found.st_dev, found.st_ino)
            if self._file and (self._file != identity or found.st_size < self.num_read):
                raise Replaced(f"{self.path} was replaced")
            self._file, self.size = identity, found.st_size
            if self.problem:
                return False
            file.seek(self.num_read)
            try:
                for number, end, line in _lines(file, self.path, self._number, self.num_read):
                    self.replayed = _next(self.replayed, line, f"{self.path}:{number}")
                    self.replayed.num_bytes, self._number = end, number
                    self._on_line(self.replayed, line)
                    if number % 64 == 0 and time.monotonic() > deadline:
                        return True
            except DataError as error:
                self.problem = str(error)
        return False


class Replaced(DataError):
    """The log is another one than before: it has to be read from its start."""


def _opened(path: Path) -> IO[bytes]:
    """Open a log to read it. Errors: OSError, also for what is no regular file."""
    return os.fdopen(open_regular(path), "rb")
