"""BabyAI whose steps take a log-normal time without processor time, for `cluster_plan.py`."""

from __future__ import annotations

import asyncio
import math
import random
from statistics import NormalDist

from quiet import QuietLoop

from ludus.core.types import Message, StepResult
from ludus.envs.babyai.env import BabyAI

LATENCY = random.Random()
"""Not seeded: a few late answers decide the length of a step, and each run has others."""


class SlowBabyAI(BabyAI):
    """Seconds of a step: median `p50`, 99th percentile `p99`."""

    def __init__(self, p50: float = 0.05, p99: float = 5.0) -> None:
        super().__init__()
        self.p50, self.sigma = p50, math.log(p99 / p50) / NormalDist().inv_cdf(0.99)

    async def step(self, action: Message) -> StepResult:
        if isinstance(asyncio.get_running_loop(), QuietLoop):  # demonstrations need not wait
            await asyncio.sleep(self.latency())
        return await super().step(action)

    def latency(self) -> float:
        return LATENCY.lognormvariate(math.log(self.p50), self.sigma)
