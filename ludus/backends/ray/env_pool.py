"""The environment workers of a run: episodes' environments in other processes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ludus.backends.ray.channel import ActorLost, Channel
from ludus.backends.ray.deaths import Deaths, Replacements
from ludus.backends.ray.env_actor import Opening
from ludus.core.errors import EnvError, EnvLost, EpisodeTimeout
from ludus.core.types import (
    Message,
    Observation,
    Score,
    Spec,
    StepResult,
    Task,
    ToolCall,
    Trajectory,
)
from ludus.envs.base import PREPARE_S
from ludus.judges.base import Judge, check_all, close_all
from ludus.rollout.hosts.host import HostedEnv, LocalEnvs
from ludus.rollout.hosts.threads import EnvThread
from ludus.telemetry.occupancy import busy

WAIT_S = 60.0
"""Seconds that a judge waits for a worker to be alive."""

GRACE_S = 10.0
"""Seconds beyond a step's deadline after which the worker itself counts as hanging."""


@dataclass(eq=False)
class Worker:
    """One environment worker and the number of its open episodes."""

    index: int
    channel: Channel
    open: int = 0


class EnvPool:
    """Distributes episodes over environment workers; replaces workers that die.

    An episode whose worker dies has lost its environment: it fails with EnvLost, and is played
    again as any episode whose infrastructure failed. It never counts as a reward of 0.

    Args:
        spawn: starts the worker of an index.
        max_deaths: workers that may die before the run stops.
    """

    def __init__(
        self, actors: list[Any], spawn: Callable[[int], Awaitable[Any]], max_deaths: int
    ) -> None:
        self.workers = [_worker(i, actor) for i, actor in enumerate(actors)]
        self._spawn = spawn
        self._deaths = Deaths("environment workers", max_deaths)
        self._replacements = Replacements(self._replace, self._deaths)
        self._sessions = itertools.count()

    @property
    def num_deaths(self) -> int:
        return self._deaths.num

    def take(self) -> tuple[Worker, str]:
        """Returns the live worker with the fewest episodes, and the name of a new session.

        Errors: EnvLost where none is alive at present.
        """
        alive = [worker for worker in self.workers if worker.channel.lost is None]
        if not alive:
            raise EnvLost("all environment workers have died and are being replaced")
        worker = min(alive, key=lambda worker: worker.open)
        worker.open += 1
        return worker, str(next(self._sessions))

    def lost(self, worker: Worker, reason: ActorLost) -> EnvLost:
        """Start the replacement of a dead worker, once; returns the error of its episodes.

        Errors: LudusError where too many died.
        """
        if self.workers[worker.index] is worker:
            self._replacements.begin(worker.index, reason)
        return EnvLost(str(reason))

    async def _replace(self, index: int) -> None:
        self.workers[index] = _worker(index, await self._spawn(index))

    async def wait_for_worker(self, deadline_s: float) -> None:
        """Wait until a worker is alive, at most `deadline_s`. Errors: LudusError where none can
        be started."""
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while all(worker.channel.lost is not None for worker in self.workers):
                    for worker in self.workers:
                        self.lost(worker, worker.channel.lost or ActorLost("a worker died"))
                    await self._replacements.wait()

    def close(self) -> None:
        """End the replacements, and refuse further calls."""
        self._replacements.close()
        for worker in self.workers:
            worker.channel.fail(ActorLost(f"environment worker {worker.index} was shut down"))


def _worker(index: int, actor: Any) -> Worker:
    return Worker(index, Channel(actor, f"environment worker {index}"))


class PooledJudge:
    """A judge in the workers of a pool. `judge` is the same in this process, for its checks.

    Where a worker dies, another one judges. Errors: those of the judge; EnvLost where no worker
    stays alive.
    """

    def __init__(self, spec: Spec, judge: Judge, pool: EnvPool) -> None:
        self._spec, self._judge, self._pool = spec, judge, pool

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        while True:
            await self._pool.wait_for_worker(WAIT_S)
            worker, session = self._pool.take()
            try:
                score: Score = await worker.channel.call(
                    "judge", session, self._spec, task, trajectory
                )
                return score
            except ActorLost as lost:
                self._pool.lost(worker, lost)
            finally:
                worker.open -= 1

    async def check(self) -> None:
        """Check the servers that the judge needs."""
        await check_all([self._judge])

    async def close(self) -> None:
        """Release what the judge of this process holds; the workers' judges end with them."""
        await close_all([self._judge])


class WorkerEnvs(LocalEnvs):
    """Constructs environments in the workers of a pool."""

    def __init__(self, spec: Spec | None, pool: EnvPool) -> None:
        super().__init__(spec)
        self._pool = pool

    def host(self, task: Task, thread: EnvThread, step_deadline_s: float) -> HostedEnv | None:
        """Errors: EnvError where the task's own spec is wrong."""
        if super().host(task, thread, step_deadline_s) is None:  # checks the spec
            return None
        return PooledEnv(self._pool, self.spec, step_deadline_s)


class PooledEnv(HostedEnv):
    """An environment in a worker. The worker keeps its deadlines and checks its results.

    Errors: those of `HostedEnv`; EnvLost where the worker dies or hangs.
    """

    def __init__(self, pool: EnvPool, spec: Spec | None, step_deadline_s: float) -> None:
        self._pool, self._spec, self._limit_s = pool, spec, step_deadline_s
        self._place: tuple[Worker, str] | None = None
        self._opening: Opening | None = None
        self.seconds = 0.0

    @property
    def env(self) -> Any:
        """The limits of the environment, which itself is in the worker; available after `reset`."""
        if self._opening is None:
            raise EnvError("the environment was used before reset")
        opening = self._opening
        return SimpleNamespace(score_range=opening.score_range, success_at=opening.success_at)

    @property
    def max_turns(self) -> int:
        if self._opening is None:
            raise EnvError("the environment was used before reset")
        return self._opening.max_turns

    async def reset(self, task: Task) -> Observation:
        await self._pool.wait_for_worker(self._limit_s)
        self._place = self._pool.take()
        limit_s = self._limit_s + PREPARE_S
        self._opening = await self._ask("reset", self._spec, task, self._limit_s, limit_s=limit_s)
        assert self._opening is not None
        return self._opening.observation

    async def step(self, action: Message) -> StepResult:
        result: StepResult = await self._ask("step", action)
        return result

    async def call(self, call: ToolCall) -> StepResult:
        result: StepResult = await self._ask("call", call)
        return result

    async def scores(self) -> dict[str, float]:
        scores: dict[str, float] = await self._ask("scores")
        return scores

    async def explanation(self) -> str:
        text: str = await self._ask("explanation")
        return text

    async def close(self) -> None:
        """Close the environment, without waiting for it."""
        if self._place is None:
            return
        (worker, session), self._place = self._place, None
        worker.open -= 1
        if worker.channel.lost is None:
            worker.channel.tell("end_soon", session)

    async def _ask(self, method: str, *args: Any, limit_s: float | None = None) -> Any:
        if self._place is None:
            raise EnvError("the environment was used before reset")
        worker, session = self._place
        deadline_s = (limit_s or self._limit_s) + GRACE_S
        started = time.perf_counter()
        try:
            with busy("env_wait"):
                async with asyncio.timeout(deadline_s) as timer:
                    return await worker.channel.call(method, session, *args)
        except ActorLost as lost:
            raise self._pool.lost(worker, lost) from None
        except TimeoutError:
            if not timer.expired():
                raise
            raise EpisodeTimeout(
                f"environment worker {worker.index} did not answer {method} within {deadline_s:g} s"
            ) from None
        finally:
            self.seconds += time.perf_counter() - started
