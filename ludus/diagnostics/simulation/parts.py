"""Parts of a simulated run: its setup, episodes, steps, counts, environment workers."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from ludus.diagnostics.simulation.costs import Costs
from ludus.diagnostics.simulation.replica import Replica, Turn
from ludus.diagnostics.simulation.spec import Layout
from ludus.diagnostics.simulation.workload import Sizes, Workload


@dataclass(frozen=True, slots=True)
class Setup:
    """A run on its hardware.

    Args:
        cores: on which all processes compute: learner, samplers, driver and environment workers;
            in the layout `local`, learner and sampler. Infinite: each has cores of its own.
        sticks_by_name: an episode's sampler is drawn, else it is the one with the fewest episodes.
        shares_weights: the sampler stands still while the learner changes the weights.
        deadline_s: a longer answer of an environment ends the attempt; another begins, at most
            `max_retries` times.
    """

    groups_per_step: int
    group_size: int
    concurrency: int
    max_staleness: int
    layout: Layout
    samplers: int
    workers: int
    costs: Costs
    workload: Workload
    lockstep: bool = False
    cores: float = float("inf")
    sticks_by_name: bool = False
    shares_weights: bool = False
    steps: int = 6
    warmup: int = 2
    seed: int = 0
    max_events: float = float("inf")
    deadline_s: float = float("inf")
    max_retries: int = 0
    ends: bool = False
    """No episode is begun for steps after the last, as at the end of a real stage."""

    @property
    def episodes_per_step(self) -> int:
        return self.groups_per_step * self.group_size


@dataclass(slots=True, eq=False)
class Group:
    """Episodes of a task, the `number`-th of the run. `began`: the version when the first of them
    started; `attempts`: how often one of them began."""

    left: int
    number: int = 0
    attempts: int = 0
    began: int | None = None
    due: bool = False
    episodes: list[Episode] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Episode:
    """An episode in progress. `version`: that of the weights which computed its cached context;
    `waits`: seconds of each answer of its environment without a core."""

    group: Group
    sizes: Sizes
    turn: int = 0
    cached: float = 0.0
    version: int = 0
    replica: Replica | None = None
    waits: Iterator[float] = field(default_factory=lambda: iter(()))
    running: Turn | None = None
    cut: bool = False
    done: bool = False
    started: float | None = None
    retries: int = 0
    ages: float = 0.0
    """Versions at the start of each turn, summed over the turns."""


@dataclass(frozen=True, slots=True)
class Step:
    """A simulated step: seconds of its parts; what it trained."""

    started: float
    rollout_s: float
    train_s: float
    sync_s: float
    episodes: int
    tokens: float
    sampled: float
    staleness: float
    cut: int

    @property
    def seconds(self) -> float:
        return self.rollout_s + self.train_s + self.sync_s


@dataclass(slots=True)
class Counts:
    """Totals so far: seconds in use by pool, and episodes."""

    time: float = 0.0
    sampler_s: float = 0.0
    learner_s: float = 0.0
    worker_s: float = 0.0
    sampled: float = 0.0
    prefilled: float = 0.0
    started: int = 0
    finished: int = 0
    cut: int = 0
    open_s: float = 0.0
    """Seconds of open episodes, summed over them."""
    episode_s: float = 0.0
    """Seconds of the episodes that finished."""


class Workers:
    """Cores for environments: first come, first served."""

    def __init__(self, number: int) -> None:
        self._free = [0.0] * number
        self.busy_s = 0.0

    def run(self, now: float, seconds: float) -> float:
        """Returns the time at which work that arrives now is done."""
        if not seconds:
            return now
        end = max(now, self._free[0]) + seconds
        heapq.heapreplace(self._free, end)
        self.busy_s += seconds
        return end
