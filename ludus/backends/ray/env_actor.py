"""An environment worker: an actor that hosts the environments of many episodes, and judges."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ludus.backends.ray.cluster import facts
from ludus.backends.ray.station import Station, Stationed
from ludus.core.errors import EnvError
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
from ludus.envs.base import limits_of
from ludus.judges import JUDGES
from ludus.judges.base import Judge
from ludus.rollout.hosts.host import HostedEnv, LocalEnvs
from ludus.rollout.hosts.threads import EnvThread


@dataclass(frozen=True, slots=True)
class Opening:
    """The start of an episode, and the limits of its environment."""

    observation: Observation
    max_turns: int
    score_range: tuple[float, float]
    success_at: float


@dataclass(slots=True)
class _Episode:
    env: HostedEnv
    thread: EnvThread = field(default_factory=EnvThread)


class EnvActor(Stationed):
    """Hosts environments, each of a session. Errors of all methods: those of `HostedEnv`."""

    def __init__(self) -> None:
        self._station = Station(self)
        self._ending: set[asyncio.Task[None]] = set()
        self._episodes: dict[str, _Episode] = {}
        self._judges: dict[str, Judge] = {}
        self._envs: dict[str, LocalEnvs] = {}

    async def facts(self) -> dict[str, str]:
        return facts()

    async def reset(
        self, session: str, spec: Spec | None, task: Task, deadline_s: float
    ) -> Opening:
        """Construct the environment of a task and start its episode."""
        key = "" if spec is None else spec.model_dump_json()
        envs = self._envs.setdefault(key, LocalEnvs(spec))
        thread = EnvThread()
        env = envs.host(task, thread, deadline_s)
        if env is None:
            raise EnvError(f"task {task.id} has no environment")
        self._episodes[session] = _Episode(env, thread)
        observation = await env.reset(task)
        score_range, success_at = limits_of(env.env)
        return Opening(observation, env.max_turns, score_range, success_at)

    async def step(self, session: str, action: Message) -> StepResult:
        return await self._env(session).step(action)

    async def call(self, session: str, call: ToolCall) -> StepResult:
        return await self._env(session).call(call)

    async def scores(self, session: str) -> dict[str, float]:
        return await self._env(session).scores()

    async def explanation(self, session: str) -> str:
        return await self._env(session).explanation()

    async def judge(self, session: str, spec: Spec, task: Task, trajectory: Trajectory) -> Score:
        """Score a trajectory. Errors: those of the judge."""
        key = spec.model_dump_json()
        if key not in self._judges:
            self._judges[key] = JUDGES.build(spec, "judge")
        return await self._judges[key](task, trajectory)

    def end_soon(self, session: str) -> None:
        """Close a session's environment in the background. Idempotent."""
        task = asyncio.get_running_loop().create_task(self._end(session))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self, session: str) -> None:
        episode = self._episodes.pop(session, None)
        if episode is not None:
            try:
                await episode.env.close()
            finally:
                episode.thread.close()

    def _env(self, session: str) -> HostedEnv:
        try:
            return self._episodes[session].env
        except KeyError:
            raise EnvError("the environment was used before reset") from None
