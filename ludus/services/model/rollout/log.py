"""Log of a roll-out: JSON lines, appended, replayed to the same decisions.

An event is written before it counts, and its decisions with it. A service that is killed and starts
again replays the log and goes on where it was; a last line that was cut off is removed. Decisions
are flushed to the disk (fsync); events survive the end of the process, not a power cut.

Two locks keep other services out: of the log itself, whatever links they use, and of its name
(`<log>.lock`), so that none begins another roll-out where a log was removed or replaced.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from ludus.core.errors import ConfigError, LudusError
from ludus.core.files import InUse, lock, lock_itself, open_regular
from ludus.services.model.rollout.events import (
    FORMAT,
    LAST_TIME,
    Decision,
    Event,
    Header,
    Line,
    RolloutSettings,
)
from ludus.services.model.rollout.replay import MAX_LINE, Replay, replay
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

HEADER_START = f'{{"kind": "rollout", "format": {FORMAT}, "t": '.encode()
"""Of each log. A first line that was cut off after it is certainly a log's."""


class LogLost(LudusError):
    """The log cannot be written: the roll-out stands still."""


class RolloutLog:
    """A roll-out with its log open for appending."""

    def __init__(
        self, path: Path, replayed: Replay, handle: int, held: ExitStack, t: float
    ) -> None:
        self.path = path
        self.header, self.controller = replayed.header, replayed.controller
        self.decisions = replayed.decisions
        self.lost = ""
        """The reason why the log cannot be written any more; empty if it can."""
        self._file, self._held = handle, held
        # A log from a time when the clock was ahead goes on from its last time.
        self._began = max(t, self.controller.now), time.monotonic()

    @classmethod
    def open(
        cls, path: Path, champion: str, challenger: str, settings: RolloutSettings, t: float
    ) -> Self:
        """Begin a roll-out, or continue the one of an existing log.

        Errors: ConfigError if the log is in use, cannot be written, or is of another roll-out;
        DataError if it is damaged.
        """
        settings.check()
        place = Path(os.path.realpath(path))
        header = Header(
            format=FORMAT,
            t=t,
            champion=champion,
            challenger=challenger,
            salt=secrets.token_hex(16),
            settings=settings,
        )
        with ExitStack() as held:
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                handle = open_regular(place, os.O_RDWR | os.O_CREAT | os.O_APPEND)
                held.callback(os.close, handle)
                lock_itself(handle, place)
                held.enter_context(lock(place.with_name(f"{place.name}.lock")))
                if _is_new(path, handle):
                    os.truncate(handle, 0)
                    _write(handle, [header])
                replayed = replay(path)
                _same_rollout(path, replayed.header, header)
                os.truncate(handle, replayed.num_bytes)
                if cut := replayed.num_cut_off:
                    log.warning("a last line that was cut off is removed", log=path, bytes=cut)
                _write(handle, replayed.missing, flush=True)
            except InUse as used:
                raise ConfigError(f"--rollout-log {path}: {used}") from None
            except OSError as error:
                raise _cannot_write(path, error) from None
            replayed.decisions += replayed.missing
            return cls(path, replayed, handle, held.pop_all(), t)

    def now(self) -> float:
        """Unix time of an event: the clock's at the start, and the seconds since.

        A clock that is set, ahead or back, while the service runs changes neither the length of a
        step nor the age of an answer.
        """
        began, counted = self._began
        return min(LAST_TIME, began + time.monotonic() - counted)

    def apply(self, event: Event) -> list[Decision]:
        """Write an event and its decisions. Returns the decisions.

        Errors: LogLost if the log cannot be written, now or before.
        """
        if self.lost:
            raise LogLost(self.lost)
        decisions = []
        try:
            self._append([event])
            decisions = self.controller.apply(event)
            self._append(decisions, flush=True)
        except OSError as error:
            self.lost = f"{self.path}: {error.strerror}"
            log.error("the log of the roll-out cannot be written", error=self.lost)
            raise LogLost(self.lost) from None
        self.decisions += decisions
        for decision in decisions:
            log.info("roll-out", action=decision.action, share=decision.share, why=decision.reason)
        return decisions

    def close(self) -> None:
        """Close the log; later events are refused."""
        self.lost = f"{self.path} is closed"
        self._held.close()

    def _append(self, lines: Sequence[Line], *, flush: bool = False) -> None:
        _write(self._file, lines, flush=flush)


def _write(handle: int, lines: Sequence[Line], *, flush: bool = False) -> None:
    data = _encoded(lines)
    while data:
        data = data[os.write(handle, data) :]
    if lines and flush:
        os.fsync(handle)


def _encoded(lines: Sequence[Line]) -> bytes:
    texts = (json.dumps(line.model_dump(mode="json"), ensure_ascii=False) for line in lines)
    return "".join(f"{text}\n" for text in texts).encode()


def _is_new(path: Path, handle: int) -> bool:
    """True if there is no log yet: an empty file, or a log cut off in its first line.

    Errors: ConfigError for a file without a line that may be of something else.
    """
    start = os.pread(handle, MAX_LINE, 0)
    if b"\n" in start or len(start) == MAX_LINE:
        return False
    if start and not start.startswith(HEADER_START):
        raise ConfigError(
            f"--rollout-log {path} has no complete line of a roll-out, and may be another file: "
            "name a new file, or remove this one"
        )
    return True


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--rollout-log {path}: cannot be written: {error.strerror}")


def _same_rollout(path: Path, recorded: Header, given: Header) -> None:
    """Errors: ConfigError if a log belongs to other models or settings."""
    for name in ("champion", "challenger", "settings"):
        was, now = getattr(recorded, name), getattr(given, name)
        if was == now:
            continue
        if isinstance(was, RolloutSettings):
            name = next(key for key in was.model_dump() if getattr(was, key) != getattr(now, key))
            was, now = getattr(was, name), getattr(now, name)
        raise ConfigError(
            f"--rollout-log {path} is of another roll-out: {name} was {was}, now {now}; "
            "name another file, or give what it had"
        )
