"""Log lines of a process beside the run's own: sent there, logged again here.

    relay_logs(connection.send)             in the other process
    log_again(line, rollout_process=8)      in the run's own, which has the display and the log file

A line has texts and numbers only: what the other process logged may not exist here.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ludus.telemetry.logs import fields_of, plain, use_handlers


@dataclass(frozen=True, slots=True)
class LogLine:
    """A log record on its way between processes, as JSON of its attributes."""

    attributes: str

    @classmethod
    def of(cls, record: logging.LogRecord) -> LogLine:
        """The line of a record, with its message and traceback as texts."""
        traceback = record.exc_text
        if record.exc_info:
            traceback = logging.Formatter().formatException(record.exc_info)
        attributes = {
            "name": record.name,
            "levelno": record.levelno,
            "levelname": record.levelname,
            "created": record.created,
            "msg": record.getMessage(),
            "exc_text": traceback,
            "file_only": bool(getattr(record, "file_only", False)),
            "fields": dict(fields_of(record)),
        }
        return cls(json.dumps(plain(attributes)))


class Relay(logging.Handler):
    """Sends the lines of its process; of one that was forked from it, it shows warnings at most."""

    def __init__(self, send: Callable[[LogLine], None]) -> None:
        super().__init__()
        self._send, self._pid = send, os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        if os.getpid() == self._pid:
            try:
                self._send(LogLine.of(record))
            except Exception:
                self.handleError(record)
        elif logging.lastResort is not None and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)


def relay_logs(send: Callable[[LogLine], None]) -> None:
    """Give all log lines of this process to `send`, from any thread, in place of other handlers."""
    use_handlers([Relay(send)], logging.INFO)


def log_again(line: LogLine, **fields: Any) -> None:
    """Log a line of another process here, with these fields too.

    It goes to the handlers of this process' root logger: filters and handlers of its own logger
    have seen it there.
    """
    record = logging.makeLogRecord(json.loads(line.attributes))
    vars(record)["fields"] |= fields
    if logging.getLogger(record.name).isEnabledFor(record.levelno):
        with suppress(Exception):  # of a user's filter: a log line ends no run
            logging.getLogger().handle(record)
