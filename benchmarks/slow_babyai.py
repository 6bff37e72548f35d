"""BabyAI whose steps take a log-normal time without processor time, for `cluster_plan.py`.

The latencies of an episode are random numbers of its own: they depend on its task and on how many
episodes of that task have begun before, and on nothing else. So a simulation can draw the same ones
(`Latencies.of`): a few late answers decide the length of a step, and prediction and run have these
in common.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Iterator
from statistics import NormalDist
from typing import ClassVar

from quiet import QuietLoop

from ludus.core.types import Message, Observation, StepResult, Task
from ludus.envs.babyai.env import BabyAI


class Latencies:
    """Log-normal seconds: median `p50`, 99th percentile `p99`; others for each `seed`."""

    def __init__(self, p50: float = 0.05, p99: float = 5.0, seed: int = 0) -> None:
        self.p50, self.sigma = p50, math.log(p99 / p50) / NormalDist().inv_cdf(0.99)
        self.seed = seed

    def of(self, task: str, attempt: int) -> Iterator[float]:
        """Yields the latencies of the turns of a task's n-th episode, counted from 0."""
        numbers = random.Random(f"{self.seed}/{task}/{attempt}")
        while True:
            yield numbers.lognormvariate(math.log(self.p50), self.sigma)


class SlowBabyAI(BabyAI):
    """Waits for a latency before each step."""

    begun: ClassVar[Counter[str]] = Counter()

    def __init__(self, p50: float = 0.05, p99: float = 5.0, seed: int = 0) -> None:
        super().__init__()
        self._latencies = Latencies(p50, p99, seed)
        self._waits: Iterator[float] = iter(())

    async def reset(self, task: Task) -> Observation:
        self._waits = self._latencies.of(task.id, self.begun[task.id])
        self.begun[task.id] += 1
        return await super().reset(task)

    async def step(self, action: Message) -> StepResult:
        if isinstance(asyncio.get_running_loop(), QuietLoop):  # demonstrations need not wait
            await asyncio.sleep(next(self._waits))
        return await super().step(action)
