"""Plays groups of episodes with a sampler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ludus.config.schema import RolloutConfig
from ludus.core.errors import EpisodeError
from ludus.core.seeds import derive_seed
from ludus.core.types import Group, Spec, Task, ToolSpec, Trajectory
from ludus.judges import JUDGES
from ludus.judges.base import close_all
from ludus.models.chat.by_task import TaskRenderers
from ludus.models.samplers.base import Sampler
from ludus.rollout.episode import Episode, run_episode
from ludus.rollout.host import LocalEnvs
from ludus.rollout.markers import MarkerSession
from ludus.rollout.session import Session, TextSession, TokenSession
from ludus.rollout.threads import run_pool
from ludus.rollout.tool_use import EpisodeTools, RunTools, argument_of, shortened_to_tokens
from ludus.tasks.mixture import part_of, settings_of
from ludus.tools.limits.limiter import Limits

if TYPE_CHECKING:
    from ludus.judges.base import Judge
    from ludus.models.endpoint.client import Endpoint


@dataclass(slots=True)
class Collector:
    """Plays the episodes of many tasks, `config.concurrency` at a time.

    Consumes tasks, waits for the sampler and the environments, is unblocked by the first episode to
    end, produces groups in the order of their tasks. Ids and seeds of trajectories derive only from
    (`seed`, `stage`, step, group, member).

    Args:
        judge: scores episodes whose task names no judge; None: the sum of the step rewards.
        sampler, renderers: None with an endpoint.
        limits: rate limits of endpoints, for the judges of tasks; closed with the collector.
        tools: the run's tools; with `rollout.format: code`, one of them runs the code.
        endpoint: samples from text in place of `sampler`; the trajectories have no token ids.
        on_episode: called with each finished trajectory, for progress displays.
        on_error: called with the error that ended an attempt, for debugging.
        inline: play in the calling thread, without deadlines: for debuggers.
    """

    sampler: Sampler | None
    renderers: TaskRenderers | None
    config: RolloutConfig
    env: Spec | None
    judge: Judge | None = None
    seed: int = 0
    stage: str = "rl"
    on_episode: Callable[[Trajectory], None] | None = None
    on_error: Callable[[EpisodeError], object] | None = None
    inline: bool = False
    endpoint: Endpoint | None = None
    tools: RunTools | None = None
    limits: Limits = field(default_factory=lambda: Limits({}, ()))
    _judges: dict[str, Judge] = field(default_factory=dict, repr=False)

    async def collect(
        self, tasks: Sequence[Task], step: int, group_size: int, first_group: int = 0
    ) -> list[Group]:
        """Play `group_size` episodes of each task. Groups are numbered from `first_group` on.

        An episode that failed stays in its group, with its status and error.
        """
        groups = [
            self.lay_out(task, step, number, group_size)
            for number, task in enumerate(tasks, first_group)
        ]
        episodes = deque(self.episode(g.task, t) for g in groups for t in g.trajectories)
        await run_pool(episodes, run_episode, self.config.concurrency, inline=self.inline)
        return groups

    def lay_out(self, task: Task, step: int, number: int, group_size: int) -> Group:
        """A group to be played: its trajectories have ids, and nothing else."""
        group_id = f"{self.stage}-{step:06d}/g{number:04d}"
        members = [
            Trajectory(f"{group_id}/e{member:03d}", group_id, task.id)
            for member in range(group_size)
        ]
        return Group(group_id, task, members)

    def episode(self, task: Task, trajectory: Trajectory) -> Episode:
        """Returns the episode that grows `trajectory`."""
        if (config := settings_of(self.config, part_of(task))) is not self.config:
            return replace(self, config=config)._episode(task, trajectory)
        return self._episode(task, trajectory)

    def _episode(self, task: Task, trajectory: Trajectory) -> Episode:
        envs = LocalEnvs(self.env)
        tools = self._tools_of(task, trajectory)
        session = self._session(task, trajectory, envs, tools)
        judge = self._judge_of(task)
        callbacks = self.on_error, self.on_episode
        return Episode(task, session, envs, self.config, judge, tools, *callbacks)

    async def close(self) -> None:
        """Release the tools and the judges, in the event loop of the episodes."""
        if self.tools is not None:
            await self.tools.close()
        own = [] if self.judge is None else [self.judge]
        await close_all([*own, *self._judges.values()])
        self.limits.close()

    def _session(
        self, task: Task, trajectory: Trajectory, envs: LocalEnvs, tools: EpisodeTools | None
    ) -> Session:
        offered = (
            [f for f in self.tools.functions if f.name in tools.offered]
            if (self.tools is not None and tools is not None)
            else []
        )
        if self.endpoint is not None:

            def functions() -> Sequence[ToolSpec]:
                if self.config.format != "tools":
                    return offered
                own: Sequence[ToolSpec] = ()
                if envs.spec_of(task) is not None:
                    prototype = envs.prototype
                    own = prototype.members().get(part_of(task) or "", prototype).tools()
                return [*own, *offered]

            keys = (self.seed, trajectory.id, 0)
            return TextSession(trajectory, self.endpoint, self.config, functions, keys)
        assert self.sampler is not None
        assert self.renderers is not None
        seed = derive_seed(self.seed, trajectory.id)
        parts = trajectory, self.sampler, self.renderers.of(task), self.config, seed
        if self.config.format == "code" and self.tools is not None and tools is not None:
            argument = argument_of(self.config.markers.tool, self.tools.functions)
            return MarkerSession(*parts, tools, argument)
        return TokenSession(*parts)

    def _tools_of(self, task: Task, trajectory: Trajectory) -> EpisodeTools | None:
        if self.tools is None:
            return None
        shorten = shortened_to_tokens if self.renderers is None else self.renderers.default.shorten
        names, limits = self.tools.offered(task), self.config.tool_calls
        return EpisodeTools(self.tools, names, limits, trajectory, shorten)

    def _judge_of(self, task: Task) -> Judge | None:
        """The task's own judge, or the run's."""
        if task.judge is None:
            return self.judge
        key = task.judge.model_dump_json()
        if key not in self._judges:
            where = f"the judge of task {task.id}"
            self._judges[key] = JUDGES.build(task.judge, where, limits=self.limits)
        return self._judges[key]

    def with_config(self, stage: str, **changes: object) -> Collector:
        """The same collector for another stage, with some rollout settings replaced."""
        config = self.config.model_copy(update=changes)
        return replace(self, stage=stage, config=config)
