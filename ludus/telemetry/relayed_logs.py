"""Log lines of a process beside the run's own: sent there, logged again here.

relay_logs(connection.send)             in the other process
log_again(record, rollout_process=8)    in the run's own, which has the display and the log file
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Any

from ludus.telemetry.logs import plain, use_handlers


class _Relay(QueueHandler):
    def __init__(self, send: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(SimpleQueue())  # the base class's; it stays empty
        self._send = send

    def prepare(self, record: logging.LogRecord) -> Any:
        """The record, with its message as text; values that another process cannot read are left
        out."""
        values = vars(super().prepare(record)).items()
        simple = {name: value for name, value in values if isinstance(value, str | int | float)}
        return logging.makeLogRecord(
            {**simple, "fields": plain(getattr(record, "fields", None) or {})}
        )

    def enqueue(self, record: logging.LogRecord) -> None:
        self._send(record)


def relay_logs(send: Callable[[logging.LogRecord], None]) -> None:
    """Give all records of this process to `send`, from any thread, in place of other handlers."""
    use_handlers([_Relay(send)], logging.INFO)


def log_again(record: logging.LogRecord, **fields: Any) -> None:
    """Log a record of another process here, with these fields too."""
    record.fields = {**record.fields, **fields}  # type: ignore[attr-defined]
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)
