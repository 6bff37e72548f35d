"""The episodes that are being played in this process, and the tokens sampled so far.

    place = EPISODES.begin(trajectory)
    EPISODES.end(place)
    EPISODES.snapshot()                       # from any thread
    current_episode()                         # "rl-000003/g0001/2", in the code that plays it

Beginning and ending cost about a microsecond; a snapshot reads the trajectories.
"""

from __future__ import annotations

import itertools
import time
from contextvars import ContextVar
from dataclasses import dataclass

from ludus.core.types import Trajectory


@dataclass(frozen=True, slots=True)
class Playing:
    """An episode in progress: its id, turns and sampled tokens so far, seconds since its start."""

    id: str
    num_turns: int
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Episodes in progress, oldest first, and the totals of this process. `num_tokens` counts the
    sampled tokens of all episodes, those in progress too."""

    playing: list[Playing]
    num_done: int
    num_tokens: int


class Episodes:
    """Counts episodes and their sampled tokens. Safe to read from another thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._playing: dict[int, tuple[Trajectory, float]] = {}
        self._num_done = self._num_tokens = 0

    def begin(self, trajectory: Trajectory) -> int:
        """Count an episode until `end` of the returned number."""
        number = next(self._numbers)
        self._playing[number] = trajectory, time.monotonic()
        _current.set(trajectory.id)
        return number

    def end(self, number: int) -> None:
        """End an episode."""
        trajectory, _ = self._playing.pop(number)
        self._num_done += 1
        self._num_tokens += trajectory.num_sampled_tokens

    def snapshot(self) -> Snapshot:
        """Returns the present state."""
        now, done = time.monotonic(), self._num_tokens
        playing = [
            Playing(t.id, t.num_turns, t.num_sampled_tokens, now - started)
            for t, started in list(self._playing.values())
        ]
        return Snapshot(playing, self._num_done, done + sum(p.num_tokens for p in playing))


_current: ContextVar[str | None] = ContextVar("episode", default=None)


def current_episode() -> str | None:
    """The id of the episode that the running task plays; None in another thread."""
    return _current.get()


EPISODES = Episodes()
"""The episodes of this process."""
