"""Structured logs: an event and its fields, as text on a terminal or as JSON.

    log = get_logger(__name__)
    log.info("step done", step=3, success=0.4)

    12:03:04 INFO  step done step=3 success=0.4                          on a terminal
    {"time": "...", "level": "info", "logger": "ludus.loop.loop", "event": "step done", ...}

`LOG_LEVEL` (debug, info, warning, error, critical) sets the lowest level shown, `LOG_FORMAT`
(human, json) the format. `log.jsonl` in the run's folder always receives info and above. The module
uses the standard library's logging, so warnings and errors of other packages arrive in the same
places.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludus.core.errors import ConfigError, LudusError, did_you_mean, printable

if TYPE_CHECKING:
    from rich.console import Console

LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("human", "json")

NOISY = (
    "absl", "asyncio", "datasets", "filelock", "fsspec", "git", "httpcore", "httpx",
    "huggingface_hub", "torch", "transformers", "urllib3", "wandb",
)  # fmt: skip
"""Packages limited to warnings and errors at any `LOG_LEVEL`."""

_MARK = "_ludus_handler"


class EventLogger:
    """A logger whose keyword arguments are the event's fields."""

    __slots__ = ("_fields", "_logger")

    def __init__(self, logger: logging.Logger, fields: Mapping[str, Any] | None = None) -> None:
        self._logger = logger
        self._fields = dict(fields or {})

    def bind(self, **fields: Any) -> EventLogger:
        """Returns a logger that adds these fields to every event."""
        return EventLogger(self._logger, {**self._fields, **fields})

    def debug(self, event: str, /, **fields: Any) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        self._log(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: Any) -> None:
        """Log an error with the traceback of the current exception."""
        self._log(logging.ERROR, event, fields, exc_info=True)

    def detail(self, event: str, /, **fields: Any) -> None:
        """Log an event to the run's file only: nobody needs it while the run goes on."""
        self._log(logging.INFO, event, fields, file_only=True)

    def record(self, event: str, /, **fields: Any) -> None:
        """Log a warning to the run's file only: the user was told it in another form."""
        self._log(logging.WARNING, event, fields, file_only=True)

    def _log(
        self,
        level: int,
        event: str,
        fields: dict[str, Any],
        exc_info: bool = False,
        file_only: bool = False,
    ) -> None:
        if self._logger.isEnabledFor(level):
            extra = {"fields": {**self._fields, **fields}, "file_only": file_only}
            self._logger.log(level, event, exc_info=exc_info, extra=extra, stacklevel=3)


def get_logger(name: str) -> EventLogger:
    """The event logger of a module: `get_logger(__name__)`."""
    return EventLogger(logging.getLogger(name))


def setup_logging(run_dir: Path | None = None, console: Console | None = None) -> None:
    """Send logs to stderr, by `LOG_LEVEL` and `LOG_FORMAT`, and to `run_dir/log.jsonl`.

    Another call replaces the earlier handlers. `console` is the console of a live display: log
    lines appear above the display.

    Raises:
        ConfigError: `LOG_LEVEL` or `LOG_FORMAT` has an unknown value.
        LudusError: the log file cannot be opened.
    """
    level = _choice("LOG_LEVEL", LEVELS, "info").upper()
    handlers = [_screen(_choice("LOG_FORMAT", FORMATS, "human"), console)]
    handlers[0].setLevel(level)
    handlers[0].addFilter(lambda record: not getattr(record, "file_only", False))
    if run_dir is not None:
        handlers.append(_file(run_dir / "log.jsonl"))
    use_handlers(handlers, logging.getLevelName(level))
    # transformers has its own log handler, with its own verbosity setting.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if loaded := sys.modules.get("transformers.utils.logging"):
        loaded.set_verbosity_error()


def use_handlers(handlers: Sequence[logging.Handler], level: int) -> None:
    """Send records to these handlers alone: those of ludus from `level` or info on."""
    shutdown_logging()
    root = logging.getLogger()
    for handler in handlers:
        setattr(handler, _MARK, True)
        root.addHandler(handler)
    logging.getLogger("ludus").setLevel(min(level, logging.INFO))
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)


def check_settings() -> None:
    """Errors: ConfigError where `LOG_LEVEL` or `LOG_FORMAT` has an unknown value."""
    _choice("LOG_LEVEL", LEVELS, "info")
    _choice("LOG_FORMAT", FORMATS, "human")


def shutdown_logging() -> None:
    """Remove, flush and close the handlers of `setup_logging`."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if hasattr(handler, _MARK)]:
        root.removeHandler(handler)
        handler.close()


def _choice(variable: str, allowed: tuple[str, ...], default: str) -> str:
    value = os.environ.get(variable, "").strip()
    if value.lower() in allowed:
        return value.lower()
    if value:
        near = did_you_mean(value.lower(), allowed)
        hint = near if "did you mean" in near else ""
        raise ConfigError(f"{variable} must be one of {', '.join(allowed)}, got {value!r}{hint}")
    return default


def _screen(style: str, console: Console | None) -> logging.Handler:
    """A handler for stderr: JSON, coloured lines on a terminal, or plain dated lines elsewhere."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    live = console is not None and console.is_terminal
    if style == "json":
        handler = _AboveDisplay(console) if console is not None and live else handler
        handler.setFormatter(JsonFormatter())
    elif live or (console is None and sys.stderr.isatty()):
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(
            console=console or Console(stderr=True),
            show_path=False,
            log_time_format="%H:%M:%S",
            rich_tracebacks=True,
            keywords=[],
        )
        handler.setFormatter(HumanFormatter("%(message)s"))
    else:
        handler.setFormatter(HumanFormatter("%(asctime)s %(levelname)-7s %(message)s"))
    return handler


def _file(path: Path) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _RunLog(path, encoding="utf-8")
    except OSError as error:
        raise LudusError(f"{path}: the log cannot be opened: {error.strerror}") from error
    handler.setFormatter(JsonFormatter())
    handler.setLevel(logging.DEBUG)
    return handler


class _AboveDisplay(logging.Handler):
    """Prints whole lines above a console's live display."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        from rich.text import Text

        try:
            self._console.print(Text(self.format(record)), soft_wrap=True)
        except Exception:
            self.handleError(record)


class _RunLog(logging.FileHandler):
    """The run's log file. On a full disk, lines go to the screen only."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):  # closing flushes the buffer; the disk may be full
            super().close()


class JsonFormatter(logging.Formatter):
    """One line of valid JSON per event: time (UTC), level, logger, event, then its fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": plain(record.name),
            "event": plain(record.getMessage()),
        }
        for key, value in plain(fields_of(record)).items():
            line[f"{key}_" if key in line or key == "exception" else key] = value
        if record.exc_text or record.exc_info:
            trace = record.exc_text or self.formatException(record.exc_info)  # type: ignore[arg-type]
            line["exception"] = plain(trace)
        return json.dumps(line, ensure_ascii=False, allow_nan=False)


class HumanFormatter(logging.Formatter):
    """The event, then its fields as key=value, with control characters escaped."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        fields = [f"{key}={_field_text(value)}" for key, value in fields_of(record).items()]
        return printable(" ".join([super().formatMessage(record), *fields]))


def fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """The fields of an event; other packages may give their records anything of that name."""
    fields = getattr(record, "fields", None) or {}
    return fields if isinstance(fields, Mapping) else {"fields": fields}


def _field_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if text and text.isprintable() and " " not in text else repr(text)


def plain(value: Any) -> Any:
    """Returns a JSON-compatible value; non-finite floats become "NaN", "Infinity"."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else spelled(value)
    if isinstance(value, str):  # lone surrogates cannot be encoded
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value)


def spelled(value: float) -> str:
    """Returns a non-finite float as a text that `float` reads back."""
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
