"""Plays groups of episodes with a sampler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ludus.config.schema import RolloutConfig
from ludus.core.errors import EpisodeError
from ludus.core.seeds import derive_seed
from ludus.core.types import Group, Spec, Task, ToolSpec, Trajectory
from ludus.judges import JUDGES
from ludus.models.chat.renderer import Renderer
from ludus.models.samplers.base import Sampler
from ludus.rollout.episode import Episode, run_episode
from ludus.rollout.host import LocalEnvs
from ludus.rollout.session import Session, TextSession, TokenSession
from ludus.rollout.threads import run_pool
from ludus.tasks.mixture import part_of

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
        sampler, renderer: None with an endpoint.
        renderers: by part of a mixture, where parts have their own tools.
        endpoint: samples from text in place of `sampler`; the trajectories have no token ids.
        on_episode: called with each finished trajectory, for progress displays.
        on_error: called with the error that ended an attempt, for debugging.
        inline: play in the calling thread, without deadlines: for debuggers.
    """

    sampler: Sampler | None
    renderer: Renderer | None
    config: RolloutConfig
    env: Spec | None
    judge: Judge | None = None
    renderers: Mapping[str, Renderer] = field(default_factory=dict)
    seed: int = 0
    stage: str = "rl"
    on_episode: Callable[[Trajectory], None] | None = None
    on_error: Callable[[EpisodeError], object] | None = None
    inline: bool = False
    endpoint: Endpoint | None = None
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
        envs = LocalEnvs(self.env)
        return Episode(
            task,
            self._session(task, trajectory, envs),
            envs,
            self.config,
            self._judge_of(task),
            self.on_error,
            self.on_episode,
        )

    def _session(self, task: Task, trajectory: Trajectory, envs: LocalEnvs) -> Session:
        part = part_of(task)
        if self.endpoint is not None:

            def tools() -> Sequence[ToolSpec]:
                return envs.prototype.members().get(part or "", envs.prototype).tools()

            keys = (self.seed, trajectory.id, 0)
            return TextSession(trajectory, self.endpoint, self.config, tools, keys)
        renderer = self.renderers.get(part or "", self.renderer)
        assert self.sampler is not None
        assert renderer is not None
        seed = derive_seed(self.seed, trajectory.id)
        return TokenSession(trajectory, self.sampler, renderer, self.config, seed)

    def _judge_of(self, task: Task) -> Judge | None:
        """The task's own judge, or the run's."""
        if task.judge is None:
            return self.judge
        key = task.judge.model_dump_json()
        if key not in self._judges:
            self._judges[key] = JUDGES.build(task.judge, f"the judge of task {task.id}")
        return self._judges[key]

    def with_config(self, stage: str, **changes: object) -> Collector:
        """The same collector for another stage, with some rollout settings replaced."""
        config = self.config.model_copy(update=changes)
        return replace(self, stage=stage, config=config)
