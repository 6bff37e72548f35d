"""Playing groups: bounded concurrency, deadlines, retries, and every exclusion recorded."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ludus.config.schema import RolloutConfig
from ludus.core.errors import EnvError, EpisodeError, LudusError
from ludus.core.seeds import derive_seed
from ludus.core.types import Group, Spec, Status, Task, Trajectory
from ludus.envs import ENVS
from ludus.judges import JUDGES
from ludus.models.chat.renderer import Renderer
from ludus.models.samplers.base import Sampler
from ludus.rollout.agent import Agent
from ludus.rollout.host import HostedEnv
from ludus.rollout.threads import EnvThread
from ludus.tasks.mixture import part_of
from ludus.telemetry.logs import get_logger

if TYPE_CHECKING:
    from ludus.judges.base import Judge

log = get_logger(__name__)


@dataclass(slots=True)
class Collector:
    """Plays the episodes of many tasks, `config.concurrency` at a time.

    Consumes tasks, waits for the sampler and the environments, is unblocked by whichever episode
    ends first, produces groups in the order of their tasks. Ids and seeds of trajectories derive
    from (`seed`, `stage`, step, group, member) alone.

    Args:
        renderers: by part of a mixture, where parts have tools of their own.
        on_episode: called with each finished trajectory, for progress displays.
        on_error: called with the error that ended an attempt, for debugging.
        inline: play in the calling thread, without deadlines: for debuggers.
    """

    sampler: Sampler
    renderer: Renderer
    config: RolloutConfig
    env: Spec | None
    judge: Judge | None = None
    renderers: Mapping[str, Renderer] = field(default_factory=dict)
    seed: int = 0
    stage: str = "rl"
    on_episode: Callable[[Trajectory], None] | None = None
    on_error: Callable[[EpisodeError], object] | None = None
    inline: bool = False
    _judges: dict[str, Judge] = field(default_factory=dict, repr=False)

    async def collect(
        self, tasks: Sequence[Task], step: int, group_size: int, first_group: int = 0
    ) -> list[Group]:
        """Play `group_size` episodes of each task. Groups are numbered from `first_group` on.

        Infrastructure failures are tried again up to `config.max_retries` times; an episode that
        still failed stays in its group with its status and error, to be excluded later.
        """
        groups: list[Group] = []
        episodes: deque[tuple[Task, Trajectory]] = deque()
        for number, task in enumerate(tasks, first_group):
            group = self.lay_out(task, step, number, group_size)
            groups.append(group)
            episodes.extend((task, trajectory) for trajectory in group.trajectories)
        num_seats = min(self.config.concurrency, len(episodes))
        seats = [asyncio.create_task(self._seat(episodes)) for _ in range(num_seats)]
        try:
            await asyncio.gather(*seats)
        finally:
            for seat in seats:
                seat.cancel()
            await asyncio.gather(*seats, return_exceptions=True)
        return groups

    def lay_out(self, task: Task, step: int, number: int, group_size: int) -> Group:
        """A group that is yet to be played: names and nothing else."""
        group_id = f"{self.stage}-{step:06d}/g{number:04d}"
        members = [
            Trajectory(f"{group_id}/e{member:03d}", group_id, task.id)
            for member in range(group_size)
        ]
        return Group(group_id, task, members)

    async def play(self, seat: EnvThread, task: Task, trajectory: Trajectory) -> None:
        """Play one episode in a seat; whatever goes wrong inside it ends up in the trajectory."""
        self.sampler.open(trajectory.id)
        try:
            await self._episode(seat, task, trajectory)
        finally:
            self.sampler.close(trajectory.id)
        if self.on_episode is not None:
            self.on_episode(trajectory)

    async def _seat(self, episodes: deque[tuple[Task, Trajectory]]) -> None:
        """Play one episode after the other.

        The next session opens in the same breath in which the last one closes, so that the sampler
        never sees this seat empty while there is work left.
        """
        seat = EnvThread(inline=self.inline)
        try:
            while episodes:
                await self.play(seat, *episodes.popleft())
        finally:
            seat.close()

    async def _episode(self, seat: EnvThread, task: Task, trajectory: Trajectory) -> None:
        for attempt in range(1 + self.config.max_retries):
            if attempt:
                log.warning(
                    "episode tried again",
                    trajectory=trajectory.id,
                    attempt=attempt + 1,
                    status=trajectory.status.value,
                    error=trajectory.error,
                )
                self.sampler.close(trajectory.id)
                self.sampler.open(trajectory.id)
                trajectory.segments, trajectory.scores, trajectory.metrics = [], {}, {}
                trajectory.error, trajectory.reward = None, None
            started = time.monotonic()
            await self._attempt(seat, task, trajectory)
            trajectory.metrics["seconds"] = time.monotonic() - started
            trajectory.metrics["retries"] = float(attempt)
            if not trajectory.status.retryable:
                return

    async def _attempt(self, seat: EnvThread, task: Task, trajectory: Trajectory) -> None:
        deadline = None if self.inline else self.config.episode_deadline_s
        env: HostedEnv | None = None
        try:
            env = self._host(task, seat)
            renderer = self.renderers.get(part_of(task) or "", self.renderer)
            agent = Agent(self.sampler, renderer, self.config, self._judge_of(task), self.on_error)
            async with asyncio.timeout(deadline) as timer:
                await agent.play(task, env, trajectory, derive_seed(self.seed, trajectory.id))
        except EnvError as error:
            trajectory.status, trajectory.error = Status.ERROR_ENV, str(error)
        except TimeoutError:
            if not timer.expired():
                raise
            trajectory.status = Status.ERROR_TIMEOUT
            trajectory.error = (
                f"the episode took longer than rollout.episode_deadline_s = {deadline:g} s"
            )
        except asyncio.CancelledError:
            trajectory.status, trajectory.error = Status.ABORTED, "the run was stopped"
            raise
        finally:
            if env is not None:
                await env.close()

    def _judge_of(self, task: Task) -> Judge | None:
        """The task's own judge, or else the run's."""
        if task.judge is None:
            return self.judge
        name = task.judge.model_dump_json()
        if name not in self._judges:
            self._judges[name] = JUDGES.build(task.judge, f"the judge of task {task.id}")
        return self._judges[name]

    def _host(self, task: Task, seat: EnvThread) -> HostedEnv | None:
        """The task's environment, not yet made. Errors: EnvError where the task names a wrong one.

        Plug-ins are imported and their arguments checked here, in one thread, for each episode: no
        two episodes share an argument that they might change.
        """
        spec = _env_of(task, self.env)
        if spec is None:
            return None
        try:
            target, args = ENVS.load(spec.name), ENVS.check(spec, "env")
        except LudusError as error:
            if spec is self.env:
                raise
            raise EnvError(f"task {task.id}: {error}") from error
        return HostedEnv(
            lambda: target(**args),
            seat,
            self.config.step_deadline_s,
            blocking=_blocks(target, task, args),
        )

    def with_config(self, stage: str, **changes: object) -> Collector:
        """The same collector for another stage, with some rollout settings replaced."""
        config = self.config.model_copy(update=changes)
        return replace(self, stage=stage, config=config)


def _env_of(task: Task, default: Spec | None) -> Spec | None:
    """The task's own environment, with the configured one's arguments beneath its own."""
    if task.env is None or default is None or task.env.name != default.name:
        return task.env or default
    return Spec(name=task.env.name, args={**default.args, **task.env.args})


def _blocks(target: Any, task: Task, args: dict[str, Any]) -> bool:
    if hasattr(target, "blocks"):
        return bool(target.blocks(task, **args))
    return bool(getattr(target, "blocking", True))
