"""Tells the URLs of `notify` of a run's end; a small process beside the run.

    python -m ludus.telemetry.notifier PARENT

The parent writes JSON lines to stdin: first what to watch, at the end the outcome.

    {"run": "tiny-1", "folder": "runs/tiny-1", "urls": ["json://..."], "resume": "ludus train ..."}
    {"state": "completed", "error": null}

Where the parent ends without an outcome (killed, out of memory), the run died, and that is told.
Each URL that fails is a line of stdout, and of the run's log. URLs are never printed.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ludus.config.secrets import masked

SEND_S = 20.0
"""Seconds that all URLs together may take."""

POLL_S = 0.5
TAIL_BYTES = 200_000
"""Read of `metrics.jsonl`, from its end."""

NUMBERS = (
    "evaluate/success", "rollout/success", "rollout/reward", "train/loss", "time/elapsed_s",
    "budget/cost",
)  # fmt: skip
"""Metrics that a message has, where the last line of a stage has them."""

KINDS = {"completed": "success", "interrupted": "warning"}
"""Of apprise's notifications; any other state is a failure."""


def main() -> None:
    """Wait for the run's end, then tell of it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are for the run
        signal.signal(number, signal.SIG_IGN)
    lines = Lines(int(sys.argv[1]))
    watched = lines.next()
    if watched is None:
        return
    outcome = lines.next() or {"state": "died", "error": None}
    faults = send(watched["urls"], *message(watched, outcome), kind_of(outcome["state"]))
    for fault in faults:
        _log(Path(watched["folder"]), fault)
        with suppress(OSError):
            print(fault, flush=True)
    os._exit(0)  # a URL that hangs is abandoned


class Lines:
    """JSON lines of stdin, until the parent ends. Its other children may hold the pipe open."""

    def __init__(self, parent: int) -> None:
        self._parent, self._data = parent, b""

    def next(self) -> dict[str, Any] | None:
        """Returns the next line; None where the parent ended before it was complete."""
        while b"\n" not in self._data:
            alive = os.getppid() == self._parent
            while select.select([0], [], [], POLL_S if alive else 0)[0]:
                piece = os.read(0, 65536)
                self._data += piece
                if not piece and b"\n" not in self._data:
                    return None
                if b"\n" in self._data:
                    break
            else:
                if not alive:
                    return None
        line, _, self._data = self._data.partition(b"\n")
        return dict(json.loads(line))


def kind_of(state: str) -> str:
    """The type of the notification of a state."""
    return KINDS.get(state, "failure")


def message(watched: dict[str, Any], outcome: dict[str, Any]) -> tuple[str, str]:
    """Returns title and text of the message."""
    state = outcome["state"]
    title = f"ludus: run {watched['run']} {'is complete' if state == 'completed' else state}"
    said = str(outcome.get("error") or "")
    if state == "died":
        said = "its process ended without a word: killed, or out of memory"
    text = [f"run {watched['run']} on {socket.gethostname()}: {state}", said[:1000]]
    text += headline(Path(watched["folder"]) / "metrics.jsonl")
    if state != "completed":
        text.append(f"resume with: {watched['resume']}")
    return title, "\n".join(line for line in text if line)


def headline(metrics: Path) -> list[str]:
    """Returns a line for each stage, with its last step and its main metrics."""
    stages: dict[str, str] = {}
    for line in _tail(metrics):
        try:
            values = json.loads(line)
            shown = [f"{name} {float(values[name]):.4g}" for name in NUMBERS if name in values]
            stage, step = values["stage"], values["step"]
            place = stage if stage.startswith("evaluate/") else f"{stage} step {step + 1}"
            stages[stage] = f"{place}: {', '.join(shown)}"
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return list(stages.values())


def _tail(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().splitlines()
    except OSError:
        return []


def send(urls: Sequence[str], title: str, text: str, kind: str) -> list[str]:
    """Send a message to each URL, all at once; returns what went wrong, URLs masked."""
    results: dict[int, str] = {}
    threads = [
        threading.Thread(target=_send_one, args=(url, title, text, kind, results, number))
        for number, url in enumerate(urls)
    ]
    deadline = time.monotonic() + SEND_S
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"no answer within {SEND_S:g} s"
    faults = [(number, results.get(number, late)) for number in range(len(urls))]
    return [f"{masked(urls[number])}: {fault}" for number, fault in faults if fault]


def _send_one(
    url: str, title: str, text: str, kind: str, results: dict[int, str], number: int
) -> None:
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # its lines have the URL
    try:
        import apprise

        target = apprise.Apprise.instantiate(url)
        if not target:
            results[number] = "apprise cannot read this URL"
            return
        sent = target.notify(body=text, title=title, notify_type=apprise.NotifyType(kind))
        results[number] = "" if sent else "the message was not accepted"
    except Exception as error:
        results[number] = f"apprise raised {type(error).__name__}"


def _log(folder: Path, fault: str) -> None:
    """Add a line to the run's log."""
    from ludus.telemetry.logs import get_logger, setup_logging, shutdown_logging

    with suppress(Exception):
        os.environ["LOG_LEVEL"] = "critical"  # on the screen: the run tells of it there
        setup_logging(folder)
        get_logger(__name__).warning("a notification was not sent", fault=fault)
        shutdown_logging()


if __name__ == "__main__":
    main()
