"""Server-sent events: the running step, and news of runs and steps.

    event: live     data: the run's `live.json`, or null
    event: news     data: null; a run began or ended, or a step was recorded
                    of a log's page: the log has grown
    event: failure  data: {"type": ..., "message": ...}; the store cannot be read

One reader polls for all streams.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from ludus.core.errors import LudusError, printable
from ludus.services.viewer.ab_rollouts import RolloutLogs
from ludus.services.viewer.source import Source

EVERY_S = 1.0
KEEP_ALIVE_S = 15.0
MAX_STREAMS = 256

State = tuple[Any, Any, Any]
Topic = tuple[str | None, str | None]
"""A run, or a log of a roll-out; (None, None): all runs."""

NOTHING: State = (None, None, None)


@dataclass
class Events:
    """Streams of events. `stop` ends all of them."""

    source: Source
    logs: RolloutLogs
    num_streams: int = 0
    _stopped: bool = False
    _polled: dict[Topic, tuple[float, State]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def stop(self) -> None:
        self._stopped = True

    async def stream(self, run: str | None, log: str | None = None) -> AsyncIterator[str]:
        """Yields events until the client leaves or the service stops."""
        self.num_streams += 1
        try:
            last = NOTHING
            said = 0.0
            while not self._stopped:
                state = await asyncio.to_thread(self._poll, (run, log))
                for name, old, new in zip(("failure", "news", "live"), last, state, strict=True):
                    if old != new and not (new is None and name == "failure"):
                        said = time.monotonic()
                        yield _event(name, new if name != "news" else None)
                last = state
                if time.monotonic() - said > KEEP_ALIVE_S:
                    said = time.monotonic()
                    yield ": here\n\n"
                await self._pause()
        finally:
            self.num_streams -= 1

    async def _pause(self) -> None:
        for _ in range(5):
            if not self._stopped:
                await asyncio.sleep(EVERY_S / 5)

    def _poll(self, topic: Topic) -> State:
        """Failure, news and live, at most EVERY_S old."""
        with self._lock:
            if len(self._polled) > MAX_STREAMS:
                self._polled.clear()
            at, state = self._polled.get(topic, (0.0, NOTHING))
            if time.monotonic() - at < 0.8 * EVERY_S and at:
                return state
            state = self._state(*topic)
            self._polled[topic] = time.monotonic(), state
            return state

    def _state(self, run: str | None, log: str | None) -> State:
        if log is not None:
            return None, self.logs.pulse(log), None
        live = self.source.live(run) if run else None
        try:
            return None, self.source.pulse(), live
        except LudusError as error:
            kind = type(error).__name__
            return {"type": kind, "message": printable(str(error))}, None, live


def _event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
