"""Rollout jobs: many episodes with the model of an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from pydantic import Field

from ludus.config.schema import RolloutConfig
from ludus.core.types import Message, Status, Task, ToolSpec, Trajectory, Wire
from ludus.models.endpoint.client import Endpoint
from ludus.rollout.episode import Episode, run_episode
from ludus.rollout.hosts.host import EnvFactory
from ludus.rollout.hosts.threads import EnvThread, run_pool
from ludus.rollout.sessions.session import TextSession, TokenRow
from ludus.rollout.tool_use import (
    EpisodeTools,
    RunTools,
    joined_functions,
    shortened_to_tokens,
)


class EpisodeRecord(Wire):
    """One episode: its conversation, and how it ended.

    `reward` is the sum of the step rewards, `score` the same scaled from the environment's range to
    0..1. Both are None where the episode could not be scored; a failure is never a reward of 0.
    `policy_versions` has the oldest version of each turn, None where the endpoint sent none; the
    list is None where the endpoint sent none at all. `rows` is None where the endpoint sent no
    token ids. A new row begins where the endpoint rendered the conversation in other ids than it
    had sampled.
    """

    id: int | str
    task_id: str = ""
    tier: str | None = None
    sample: int = 0
    reward: float | None = None
    score: float | None = None
    success: bool = False
    conversation: list[Message] = Field(default_factory=list)
    num_turns: int = 0
    status: Status = Status.ABORTED
    error: str | None = "it was not started"
    policy_versions: list[int | None] | None = None
    rows: list[TokenRow] | None = None
    seconds: float = 0.0

    @property
    def scored(self) -> bool:
        """True if the reward is a result of the model, not of a failure."""
        return self.status.trainable and self.reward is not None


class RolloutJob:
    """Plays many episodes, `config.concurrency` at a time.

    Consumes tasks, waits for the endpoint and the environments, is unblocked by the first episode
    to end. A deadline or `stop` ends the job early: finished episodes stay; episodes in progress
    get the status `error_timeout` or `aborted`, and keep their conversation.

    Args:
        work: tasks, each with the record of an episode that was not started.
        deadline_s: seconds for the whole job.
        tools: answer the calls of the episodes; whoever made them closes them.
        on_episode: called with each finished episode.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        envs: EnvFactory,
        config: RolloutConfig,
        work: Sequence[tuple[Task, EpisodeRecord]],
        *,
        seed: int = 0,
        deadline_s: float | None = None,
        tools: RunTools | None = None,
        on_episode: Callable[[EpisodeRecord], object] = lambda _: None,
    ) -> None:
        self.endpoint = endpoint
        self.episodes = [record for _, record in work]
        """The records, in the order of `work`. Complete at any time."""
        self.stopped: str | None = None
        """Reason of an early end: "deadline" or "cancelled"."""
        self._envs, self._config, self._seed = envs, config, seed
        self._deadline_s, self._on_episode, self._tools = deadline_s, on_episode, tools
        self._name = uuid.uuid4().hex[:16]
        """Makes ids of episodes unique: tools that keep state may be those of several jobs."""
        self._waiting = deque(enumerate(task for task, _ in work))
        self._in_progress: set[int] = set()
        self._pool: asyncio.Task[None] | None = None

    async def run(self) -> list[EpisodeRecord]:
        """Play all episodes. Errors: those that concern the job, such as a wrong configuration."""
        pool = run_pool(self._next(), self._play, self._config.concurrency)
        self._pool = asyncio.create_task(pool)
        try:
            async with asyncio.timeout(self._deadline_s) as timer:
                await self._pool
        except TimeoutError:
            if not timer.expired():
                raise
            self.stopped = "deadline"
        except asyncio.CancelledError:
            if self.stopped is None:  # the caller was cancelled
                self.stopped = "cancelled"
                raise
        finally:
            self._mark_interrupted()
        return self.episodes

    def _next(self) -> Iterator[tuple[int, Task]]:
        while self._waiting:
            yield self._waiting.popleft()

    def stop(self) -> None:
        """End the job; `run` returns the episodes so far."""
        if self.stopped is None:
            self.stopped = "cancelled"
            self._waiting.clear()
            if self._pool is not None:
                self._pool.cancel()

    async def _play(self, thread: EnvThread, item: tuple[int, Task]) -> None:
        index, task = item
        blank = self.episodes[index]
        trajectory = Trajectory(f"{self._name}/{blank.id}/{index}", "", task.id)
        seed_keys = (self._seed, str(blank.id), blank.sample)
        tools = self._tools_of(task, trajectory)

        def functions() -> Sequence[ToolSpec]:
            own = self._envs.tools() if self._config.format == "tools" else ()
            known = [] if self._tools is None else self._tools.functions
            offered = [f for f in known if tools is not None and f.name in tools.offered]
            return joined_functions(own, offered)

        session = TextSession(trajectory, self.endpoint, self._config, functions, seed_keys)
        started = time.monotonic()
        self._in_progress.add(index)
        try:
            await run_episode(thread, Episode(task, session, self._envs, self._config, tools=tools))
        finally:
            self.episodes[index] = _record_of(blank, session, time.monotonic() - started)
        self._in_progress.discard(index)
        self._on_episode(self.episodes[index])

    def _tools_of(self, task: Task, trajectory: Trajectory) -> EpisodeTools | None:
        if self._tools is None:
            return None
        offered, limits = self._tools.offered(task), self._config.tool_calls
        return EpisodeTools(self._tools, offered, limits, trajectory, shortened_to_tokens)

    def _mark_interrupted(self) -> None:
        """Give the episodes that were in progress the reason for their end."""
        status, error = Status.ABORTED, "the job was cancelled"
        if self.stopped == "deadline":
            limit = f"{self._deadline_s:g} s"
            status, error = (
                Status.ERROR_TIMEOUT,
                f"the job took longer than its deadline of {limit}",
            )
        fields = {"status": status, "error": error, "reward": None, "score": None, "success": False}
        for index in self._in_progress:
            self.episodes[index] = self.episodes[index].model_copy(update=fields)


def _record_of(blank: EpisodeRecord, session: TextSession, seconds: float) -> EpisodeRecord:
    trajectory = session.trajectory
    versions = [s.policy_version for s in trajectory.segments if s.sampled]
    return blank.model_copy(
        update={
            "reward": trajectory.reward,
            "score": session.score,
            "success": bool(trajectory.metrics.get("success")),
            "conversation": session.messages,
            "num_turns": trajectory.num_turns,
            "status": trajectory.status,
            "error": trajectory.error,
            "policy_versions": versions if any(v is not None for v in versions) else None,
            "rows": session.rows or None,
            "seconds": round(seconds, 3),
        }
    )
