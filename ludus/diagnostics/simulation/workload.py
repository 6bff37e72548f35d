"""Sizes and latencies of simulated episodes: given, or drawn from a finished run's episodes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ludus.diagnostics.simulation.spec import Distribution

ONE = Distribution(constant=1.0)
NONE = Distribution(constant=0.0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """An episode: tokens before the first turn; turns; tokens that a turn samples, and those
    between two turns; seconds that a turn waits for its environment without a core, and
    (`answer_s`, of a recorded episode) with one."""

    prompt: float
    turns: int
    sampled: float
    observed: float
    latency: float = 0.0
    answer_s: float = 0.0

    @property
    def length(self) -> float:
        """Tokens of the episode."""
        return self.prompt + self.turns * self.sampled + (self.turns - 1) * self.observed


@dataclass(frozen=True, slots=True)
class Workload:
    """Draws episodes.

    Args:
        episodes: of a run, drawn with equal probability; empty: by the distributions.
        latency: of a turn, drawn for each turn; None: that of the drawn episode.
        answers: latencies of the turns of a group's n-th episode, where a run's own are known.
        reset_s, step_s: CPU seconds of the environment.
        context: most tokens of an episode.
        max_turns: most turns of an episode.
    """

    episodes: Sequence[Sizes] = ()
    prompt: float = 1.0
    turns: Distribution = ONE
    sampled: Distribution = ONE
    observed: float = 0.0
    latency: Distribution | None = None
    answers: Callable[[int, int], Iterator[float]] | None = None
    reset_s: float = 0.0
    step_s: float = 0.0
    context: float = math.inf
    max_turns: int = 1_000_000

    def draw(self, rng: random.Random) -> Sizes:
        """Returns an episode's sizes."""
        if self.episodes:
            return self.episodes[int(rng.random() * len(self.episodes))]
        sampled = max(draw(self.sampled, rng), 1.0)
        room = (self.context - self.prompt + self.observed) / (sampled + self.observed)
        turns = min(round(draw(self.turns, rng)), self.max_turns, max(room, 1.0))
        return Sizes(self.prompt, max(int(turns), 1), sampled, self.observed)

    def waits(
        self, sizes: Sizes, rng: random.Random, group: int = 0, attempt: int = 0
    ) -> Iterator[float]:
        """Yields the seconds that each turn waits for its environment, without a core.

        Args:
            group: the number of its group in the run.
            attempt: how many episodes of the group have begun before, those that begin again too.
        """
        if self.answers is not None:
            yield from self.answers(group, attempt)
        while True:
            yield sizes.latency if self.latency is None else draw(self.latency, rng)

    def mean(self) -> Sizes:
        """Returns means over the episodes."""
        some = self.episodes or [self.draw(rng) for rng in map(random.Random, range(1000))]
        num, turns = len(some), sum(e.turns for e in some)
        return Sizes(
            sum(e.prompt for e in some) / num,
            max(round(turns / num), 1),
            sum(e.sampled * e.turns for e in some) / turns,
            sum(e.observed * e.turns for e in some) / turns,
            sum(e.latency * e.turns for e in some) / turns,
        )


def draw(distribution: Distribution, rng: random.Random) -> float:
    """Returns a random value."""
    if distribution.constant is not None:
        return distribution.constant
    assert distribution.p50 is not None
    return rng.lognormvariate(math.log(distribution.p50), distribution.sigma)
