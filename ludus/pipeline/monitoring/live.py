"""`live.json` in a run's folder: the running step, written once a second for `ludus view`.

    {"stage": "rl", "step": 3, "steps": 200, "step_s": 4.1, "episodes": 40, "by_turn": [0, 12, 9],
     "tokens": 5120, "tokens_per_s": 1312.5, "busy": {"sample": 1, "env_wait": 3, ...}, ...}

The file is replaced atomically and not flushed to disk: it is of no use after a power cut. It is
removed when the run ends, so an old file is that of a killed process.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludus.core.files import atomic_write
from ludus.core.types import Trajectory
from ludus.pipeline.monitoring.progress import Observer
from ludus.telemetry.episodes import EPISODES, Snapshot
from ludus.telemetry.occupancy import OCCUPANCY, PARTS

EVERY_S = 1.0
MAX_TURNS = 64
"""Bars of the histogram; the last one counts all longer episodes too."""
MAX_SLOWEST = 8


@dataclass(slots=True)
class _Mark:
    """Totals at a moment."""

    at: float = field(default_factory=time.monotonic)
    tokens: int = 0
    episodes: int = 0
    seconds: dict[Any, float] = field(default_factory=OCCUPANCY.seconds)


class LiveRecord:
    """Writes the file while an inner observer gets the same events. A failed write is not an error
    of the run: the file is for display only."""

    def __init__(self, path: Path, inner: Observer, *, every_s: float = EVERY_S) -> None:
        self._path, self._inner, self._every_s = path, inner, every_s
        self._stage, self._step, self._steps = "", 0, 0
        self._began = self._last = _mark(EPISODES.snapshot())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name="live", daemon=True)
        self._thread.start()

    def stage(self, name: str, total: int, start: int = 0) -> None:
        self._stage, self._steps, self._step = name, total, start
        self._began = _mark(EPISODES.snapshot())
        self._inner.stage(name, total, start)

    def tick(self) -> None:
        self._step += 1
        self._inner.tick()

    def episode(self, trajectory: Trajectory) -> None:
        self._inner.episode(trajectory)

    def step(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        self._stage, self._step = stage, step + 1
        self._began = _mark(EPISODES.snapshot())
        self._inner.step(stage, step, metrics)

    def note(self, text: str) -> None:
        self._inner.note(text)

    def close(self) -> None:
        """Stop writing, remove the file, close the inner observer."""
        self._stopped.set()
        self._thread.join(5)
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        self._inner.close()

    def _keep_writing(self) -> None:
        while not self._stopped.wait(self._every_s):
            with suppress(OSError):
                atomic_write(self._path, json.dumps(self.state()), flush=False)

    def state(self) -> dict[str, Any]:
        """Returns the content of the file; rates are since the call before."""
        snapshot, began, last = EPISODES.snapshot(), self._began, self._last
        now = self._last = _mark(snapshot)
        turns = Counter(min(p.num_turns, MAX_TURNS - 1) for p in snapshot.playing)
        counts = OCCUPANCY.counts()
        rate = (now.tokens - last.tokens) / max(now.at - last.at, 1e-9)
        return {
            "pid": os.getpid(),
            "time": round(time.time(), 3),
            "stage": self._stage,
            "step": self._step,
            "steps": self._steps,
            "step_s": round(now.at - began.at, 3),
            "playing": len(snapshot.playing),
            "done": now.episodes - began.episodes,
            "by_turn": [turns[n] for n in range(max(turns, default=-1) + 1)],
            "tokens": max(0, now.tokens - began.tokens),
            "tokens_per_s": round(max(0.0, rate), 1),
            "busy": {part: counts[part] for part in PARTS if part != "idle"},
            "seconds": {p: round(now.seconds[p] - began.seconds[p], 3) for p in PARTS},
            "slowest": [
                {"id": p.id, "turns": p.num_turns, "tokens": p.num_tokens, "s": round(p.seconds, 1)}
                for p in snapshot.playing[:MAX_SLOWEST]
            ],
        }


def _mark(snapshot: Snapshot) -> _Mark:
    return _Mark(tokens=snapshot.num_tokens, episodes=snapshot.num_done)
