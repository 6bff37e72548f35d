"""Log of a roll-out: JSON lines, appended, replayed to the same decisions.

An event is written before it counts, and its decisions with it. A service that is killed and starts
again replays the log and goes on where it was; a last line that was cut off is removed. Decisions
are flushed to the disk (fsync); events survive the end of the process, not a power cut.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

from ludus.core.errors import ConfigError, LudusError
from ludus.core.files import InUse, lock
from ludus.services.model.rollout.events import (
    FORMAT,
    Decision,
    Event,
    Header,
    Line,
    RolloutSettings,
)
from ludus.services.model.rollout.replay import Replay, replay
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)


class LogLost(LudusError):
    """The log cannot be written: the roll-out stands still."""


class RolloutLog:
    """A roll-out with its log open for appending."""

    def __init__(self, path: Path, replayed: Replay, locked: IO[str]) -> None:
        self.path = path
        self.header, self.controller = replayed.header, replayed.controller
        self.decisions = replayed.decisions
        self.lost = ""
        """The reason why the log cannot be written any more; empty if it can."""
        self._locked = locked
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    @classmethod
    def open(
        cls, path: Path, champion: str, challenger: str, settings: RolloutSettings, t: float
    ) -> Self:
        """Begin a roll-out, or continue the one of an existing log.

        Errors: ConfigError if the log is in use, cannot be written, or is of another roll-out;
        DataError if it is damaged.
        """
        settings.check()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            locked = lock(path.with_name(f"{path.name}.lock"))
        except InUse as used:
            raise ConfigError(f"--rollout-log {path}: {used}") from None
        except OSError as error:
            raise _cannot_write(path, error) from None
        try:
            header = Header(
                format=FORMAT,
                t=t,
                champion=champion,
                challenger=challenger,
                salt=secrets.token_hex(16),
                settings=settings,
            )
            if _is_new(path):
                path.write_bytes(_encoded([header]))
            replayed = replay(path)
            _same_rollout(path, replayed.header, header)
            os.truncate(path, replayed.num_bytes)
            opened = cls(path, replayed, locked)
            opened._append(replayed.missing, flush=True)
        except OSError as error:
            locked.close()
            raise _cannot_write(path, error) from None
        except BaseException:
            locked.close()
            raise
        opened.decisions += replayed.missing
        return opened

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
        os.close(self._file)
        self._locked.close()

    def _append(self, lines: Sequence[Line], *, flush: bool = False) -> None:
        data = _encoded(lines)
        while data:
            data = data[os.write(self._file, data) :]
        if lines and flush:
            os.fsync(self._file)


def _encoded(lines: Sequence[Line]) -> bytes:
    texts = (json.dumps(line.model_dump(mode="json"), ensure_ascii=False) for line in lines)
    return "".join(f"{text}\n" for text in texts).encode()


def _is_new(path: Path) -> bool:
    """True if there is no log: no file, an empty one, or one cut off in its first line."""
    if not path.exists():
        return True
    with open(path, "rb") as file:
        start = file.read(100_000)
    return b"\n" not in start and b'{"kind": "rollout"'.startswith(start[:18])


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
