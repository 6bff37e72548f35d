"""Plays groups of episodes with a sampler."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ludus.config.policies import POLICY
from ludus.config.schema import RolloutConfig
from ludus.core.errors import EpisodeError
from ludus.core.seeds import derive_seed
from ludus.core.types import Group, Spec, Task, ToolSpec, Trajectory
from ludus.judges import JUDGES
from ludus.judges.base import close_all
from ludus.models.chat.by_task import TaskRenderers
from ludus.models.samplers.base import Sampler
from ludus.rollout.episode import Episode, run_episode
from ludus.rollout.hosts.host import LocalEnvs
from ludus.rollout.hosts.processes import RolloutProcesses, episodes_of
from ludus.rollout.hosts.threads import EnvThread, run_pool
from ludus.rollout.markers import MarkerSession
from ludus.rollout.roles import Player, Role, cast, new_trajectory
from ludus.rollout.sessions.agent_session import MAX_CALLS, AgentSession, Gateway
from ludus.rollout.sessions.call_options import AgentRenderers
from ludus.rollout.sessions.endpoint_session import EndpointSession
from ludus.rollout.sessions.session import TextSession, TokenSession, TurnSession
from ludus.rollout.tool_use import EpisodeTools, RunTools, argument_of, shortened_to_tokens
from ludus.tasks.mixture import part_of, settings_of
from ludus.tools.limits.limiter import Limits

if TYPE_CHECKING:
    from ludus.judges.base import Judge
    from ludus.models.endpoint.client import Endpoint
    from ludus.rollout.workflow import Agent


Finish = Callable[[int, Group], Coroutine[Any, Any, None]]


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
        agent: plays the episodes in place of the built-in agent.
        roles: of the agent's episodes, the first is the agent's own; none: one role.
        evaluated_roles: those of evaluations.
        endpoints: of roles; closed with the collector.
        make_envs, host_judge: host environments and the judges of tasks: in this process, or in
            those of a back end.
        gateway: gives the sessions of the agent an address.
        processes: play a part of what `collect` plays; closed with the collector.
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
    agent: Agent | None = None
    gateway: Gateway | None = None
    roles: Sequence[Role] = ()
    evaluated_roles: Sequence[Role] = ()
    endpoints: Sequence[Endpoint] = ()
    limits: Limits = field(default_factory=lambda: Limits({}, ()))
    make_envs: Callable[[Spec | None], LocalEnvs] = LocalEnvs
    host_judge: Callable[[Spec, Judge], Judge] = lambda spec, judge: judge
    processes: RolloutProcesses | None = None
    _judges: dict[str, Judge] = field(default_factory=dict, repr=False)
    _retries: Counter[str] = field(default_factory=Counter, repr=False)
    _agent_renderers: AgentRenderers | None = field(default=None, repr=False)

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
        if self.processes is not None:
            await self.processes.play(
                groups, self.stage, self.config, self._play_with, self.on_episode
            )
            return groups
        episodes = self._episodes(episodes_of(groups))
        await run_pool(episodes, run_episode, self.config.concurrency, inline=self.inline)
        return groups

    async def play(self, laid_out: Iterable[tuple[Task, Trajectory]]) -> None:
        """Play episodes that are laid out, in this process. Each is taken when it begins."""
        episodes = self._episodes(laid_out)
        await run_pool(episodes, run_episode, self.config.concurrency, inline=self.inline)

    def _episodes(self, laid_out: Iterable[tuple[Task, Trajectory]]) -> Iterator[Episode]:
        return (self.episode(task, trajectory) for task, trajectory in laid_out)

    async def _play_with(
        self, laid_out: Iterable[tuple[Task, Trajectory]], config: RolloutConfig
    ) -> None:
        await replace(self, config=config).play(laid_out)

    async def stream(
        self,
        tasks: Iterable[Task],
        step: int,
        group_size: int,
        finish: Finish,
        first_group: int = 0,
        backlog: int = 256,
    ) -> None:
        """Play as `collect`; run `finish` with the number of each complete group, and the group.

        The next episodes are played meanwhile. Where more than `backlog` groups are being
        finished, no episode begins. Only these groups, and those in progress, are in memory.

        Errors: the first that `finish` or an episode raises; it ends all others.
        """
        missing: dict[int, int] = {}
        room = asyncio.Semaphore(backlog)

        def episodes() -> Iterator[tuple[int, Group, Episode]]:
            for number, task in enumerate(tasks, first_group):
                group = self.lay_out(task, step, number, group_size)
                missing[number] = group_size
                for trajectory in group.trajectories:
                    yield number, group, self.episode(task, trajectory)

        async def finish_one(number: int, group: Group) -> None:
            try:
                await finish(number, group)
            finally:
                room.release()

        async def play(thread: EnvThread, item: tuple[int, Group, Episode]) -> None:
            number, group, episode = item
            await run_episode(thread, episode)
            missing[number] -= 1
            if not missing[number]:
                del missing[number]
                await room.acquire()
                finishing.create_task(finish_one(number, group))

        try:
            async with asyncio.TaskGroup() as finishing:
                await run_pool(episodes(), play, self.config.concurrency, inline=self.inline)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def lay_out(self, task: Task, step: int, number: int, group_size: int) -> Group:
        """A group to be played: its trajectories have ids, and nothing else."""
        group_id = f"{self.stage}-{step:06d}/g{number:04d}"
        players = cast(self.roles, group_id, self.seed)
        members = [
            new_trajectory(group_id, member, task.id, self.roles, players)
            for member in range(group_size)
        ]
        return Group(group_id, task, members)

    def episode(self, task: Task, trajectory: Trajectory) -> Episode:
        """Returns the episode that grows `trajectory`."""
        if (config := settings_of(self.config, part_of(task))) is not self.config:
            return replace(self, config=config)._episode(task, trajectory)
        return self._episode(task, trajectory)

    def _episode(self, task: Task, trajectory: Trajectory) -> Episode:
        envs, tools = self.make_envs(self.env), self._tools_of(task, trajectory)
        if self.agent is not None:
            return Episode(
                task,
                self._agent_session(trajectory),
                envs,
                self.config,
                self._judge_of(task),
                tools,
                agent=self.agent,
                on_error=self.on_error,
                on_end=self.on_episode,
                retries=self._retries,
            )
        session = self._session(task, trajectory, envs, tools)
        judge = self._judge_of(task)
        return Episode(
            task,
            session,
            envs,
            self.config,
            judge,
            tools,
            on_error=self.on_error,
            on_end=self.on_episode,
            retries=self._retries,
        )

    async def close(self) -> None:
        """Release the tools and the judges, in the event loop of the episodes."""
        if self.processes is not None:
            self.processes.close()
        if self.tools is not None:
            await self.tools.close()
        own = [] if self.judge is None else [self.judge]
        await close_all([*own, *self._judges.values()])
        self.limits.close()
        if self.agent is not None:
            await self.agent.close()
        if self.gateway is not None:
            self.gateway.close()
        for endpoint in self.endpoints:
            await endpoint.close()

    def _agent_session(self, trajectory: Trajectory) -> AgentSession:
        group_id = trajectory.group_id
        others = [self._role_session(other, group_id) for other in trajectory.others]
        return self._role_session(trajectory, group_id, others)

    def _role_session(
        self, grown: Trajectory, group_id: str, others: Sequence[AgentSession] = ()
    ) -> AgentSession:
        player = self._player_of(grown)
        seed = derive_seed(self.seed, grown.id)
        limit = self.config.max_turns if isinstance(self.config.max_turns, int) else MAX_CALLS
        if player.endpoint is not None:
            return EndpointSession(
                grown, player.endpoint, self.config, seed, limit, self.gateway, others
            )
        assert self.renderers is not None
        assert player.sampler_of is not None
        if self._agent_renderers is None:
            self._agent_renderers = AgentRenderers(self.renderers.default)
        return AgentSession(
            grown,
            player.sampler_of(group_id),
            self._agent_renderers,
            self.config,
            seed,
            limit,
            self.gateway,
            others,
            player.trains,
        )

    def _player_of(self, trajectory: Trajectory) -> Player:
        """The policy that plays a trajectory's role."""
        for role in self.roles:
            if role.name == trajectory.role:
                return role.of[trajectory.policy]
        own = self.sampler
        return Player(POLICY, None if own is None else lambda _: own, self.endpoint)

    def _session(
        self, task: Task, trajectory: Trajectory, envs: LocalEnvs, tools: EpisodeTools | None
    ) -> TurnSession:
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
            judge = JUDGES.build(task.judge, where, limits=self.limits)
            self._judges[key] = self.host_judge(task.judge, judge)
        return self._judges[key]

    def with_config(self, stage: str, **changes: object) -> Collector:
        """The same collector for another stage, with some rollout settings replaced."""
        config = self.config.model_copy(update=changes)
        return replace(self, stage=stage, config=config)
