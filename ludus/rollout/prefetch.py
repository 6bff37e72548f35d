"""Prefetching: play episodes ahead while the policy trains, within a staleness bound.

    take(step)     start groups until this step and the next `max_staleness` steps are covered
                   wait until as many groups are complete as the step trains on
                   wait briefly for groups that began `max_staleness` versions ago, then cut them
                   return the oldest groups

A cut episode stays in its group with the reason; the finished episodes of the group train. So no
finished episode is too old, and a straggler delays a step by a bounded time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from ludus.core.types import Group, Status, Task, Trajectory, by_role
from ludus.core.versions import mean_age
from ludus.rollout.collect import Collector
from ludus.rollout.episode import run_episode
from ludus.rollout.hosts.threads import EnvThread
from ludus.tasks.curriculum import Curriculum
from ludus.telemetry.occupancy import OCCUPANCY

MAX_WAIT = 0.2
"""Longest wait for episodes that are due to be cut, as a share of the last step's duration."""


@dataclass(slots=True, eq=False)
class _PendingGroup:
    """A group in progress. `began`: the policy version when its first episode started."""

    number: int
    group: Group
    episodes: list[asyncio.Task[None]] = field(default_factory=list)
    began: int | None = None

    @property
    def complete(self) -> bool:
        return all(episode.done() for episode in self.episodes)

    def members(self) -> list[tuple[Trajectory, asyncio.Task[None]]]:
        return list(zip(self.group.trajectories, self.episodes, strict=True))


class PrefetchSource:
    """Group source that plays ahead of the steps, in one event loop with the learner.

    Consumes tasks, waits for the sampler and the environments, is unblocked by the first complete
    group, produces the groups of each step, oldest first. Groups are numbered in the order of their
    tasks, and have the ids of the synchronous mode. Timing decides which groups a step gets.

    Args:
        collector_of: returns the collector for the groups of a step.
        tasks: the task sampler.
        steps: number of steps of the stage; no group is started beyond them.
        max_staleness: most versions published between the start of an episode and the step that
            trains on it; at least 1.
        around: context manager entered while a step waits for its groups.
    """

    def __init__(
        self,
        collector_of: Callable[[int], Collector],
        tasks: Curriculum,
        *,
        steps: int,
        groups_per_step: int,
        group_size: int,
        max_staleness: int,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        if max_staleness < 1:
            raise ValueError("max_staleness must be at least 1 for prefetching")
        self.max_staleness = max_staleness
        self._collector_of, self._tasks, self._around = collector_of, tasks, around
        self._steps, self._groups_per_step, self._group_size = steps, groups_per_step, group_size
        self._slots = asyncio.Semaphore(collector_of(0).config.concurrency)
        self._changed = asyncio.Event()
        self._pending: list[_PendingGroup] = []
        self._replay: list[tuple[int, Task]] = []
        self._next_number = self._version = 0
        self._failure: BaseException | None = None
        self._queue_depth = self._num_cut = 0
        self._ages: Counter[int] = Counter()
        self._last = _times()
        self._taken_at: float | None = None

    @property
    def finished(self) -> bool:
        return self._tasks.finished

    async def take(self, n: int, step: int, version: int) -> list[Group]:
        """Returns at least `n` groups that began at most `max_staleness` versions ago.

        Returns more groups where they would be too old for the next step. Groups whose episodes
        were all cut do not count towards `n`.

        Errors: those that concern the run and not one episode (diverged weights, a broken config).
        """
        started = asyncio.get_running_loop().time()
        last_s = 0.0 if self._taken_at is None else started - self._taken_at
        self._version, self._taken_at = version, started
        self._start_up_to(min(self.max_staleness + 1, self._steps - step) * self._groups_per_step)
        self._queue_depth = max(self._queue_depth, len(self._complete()))
        with self._around():
            await self._until(lambda: len(self._complete()) >= n)
            oldest = version - self.max_staleness
            due = [p for p in self._pending if p.began is not None and p.began <= oldest]
            await self._wait_for(due, last_s)
            await self._cut([pending for pending in due if not pending.complete])
        spare = [pending for pending in self._complete() if pending not in due]
        missing = n - sum(
            any(t.status.trainable for t in pending.group.trajectories) for pending in due
        )
        chosen = due + spare[: max(missing, 0)]
        self._pending = [pending for pending in self._pending if pending not in chosen]
        groups = [pending.group for pending in sorted(chosen, key=lambda p: p.number)]
        self._tasks.observe(groups)
        self._ages += token_ages(by_role(groups), version)
        return groups

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call.

        `rollout/staleness_*`: versions between sampling and training, over tokens;
        `rollout/queue_depth`: complete groups waiting when the step began; `rollout/cut`: episodes
        cut; `time/learner_idle_s`, `time/sampler_idle_s`: seconds in which it did not compute.
        """
        now = _times()
        spans = zip(now, self._last, strict=True)
        wall, trained, sampled = (after - before for after, before in spans)
        metrics = {
            **self._tasks.metrics(),
            "rollout/staleness_mean": mean_age(self._ages),
            "rollout/staleness_max": float(max(self._ages, default=0)),
            "rollout/queue_depth": float(self._queue_depth),
            "rollout/cut": float(self._num_cut),
            "time/learner_idle_s": wall - trained,
            "time/sampler_idle_s": wall - sampled,
        }
        self._last, self._queue_depth, self._num_cut, self._ages = now, 0, 0, Counter()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """State of the task sampler, and the tasks in progress: a resumed run plays those first."""
        in_progress = [(pending.number, pending.group.task) for pending in self._pending]
        again = [[n, task.model_dump(mode="json")] for n, task in in_progress + self._replay]
        ahead = {"next_number": self._next_number, "again": again}
        return {"tasks": self._tasks.state_dict(), "ahead": ahead}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; one without `ahead` was saved by a synchronous run."""
        self._tasks.load_state_dict(state["tasks"])
        ahead = state.get("ahead")
        if ahead is None:
            ahead = {"next_number": int(state["step"]) * self._groups_per_step, "again": []}
        self._next_number = int(ahead["next_number"])
        self._replay = [(number, Task.model_validate(task)) for number, task in ahead["again"]]

    async def close(self) -> list[Group]:
        """Stop all episodes. Returns the groups that began, each trajectory with the reason."""
        all_pending, self._pending = self._pending, []
        episodes = [episode for pending in all_pending for episode in pending.episodes]
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)
        begun = [pending for pending in all_pending if pending.began is not None]
        for pending in begun:
            for trajectory, episode in pending.members():
                cancelled = episode.cancelled() and trajectory.reward is None
                for role in (trajectory, *trajectory.others):
                    if cancelled:
                        role.status, role.error = Status.ABORTED, "the stage ended"
                    role.dropped = "played ahead of the end: no step was left to train on it"
        return [pending.group for pending in begun]

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready() and self._failure is None:
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    async def _wait_for(self, due: list[_PendingGroup], last_s: float) -> None:
        """Wait for the episodes of groups that are due, no longer than they are worth."""
        loop = asyncio.get_running_loop()
        began, episodes = loop.time(), [e for pending in due for e in pending.episodes]
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                while self._failure is None and (running := sum(not e.done() for e in episodes)):
                    limit.reschedule(began + longest_wait(last_s, running, len(episodes)))
                    self._changed.clear()
                    await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    def _complete(self) -> list[_PendingGroup]:
        """Complete groups, oldest first."""
        return [pending for pending in self._pending if pending.complete]

    def _start_up_to(self, count: int) -> None:
        while len(self._pending) < count:
            if self._replay:
                self._start(*self._replay.pop(0))
            else:
                self._start(self._next_number, next(self._tasks))
                self._next_number += 1

    def _start(self, number: int, task: Task) -> None:
        step, place = divmod(number, self._groups_per_step)
        collector = self._collector_of(step)
        pending = _PendingGroup(number, collector.lay_out(task, step, place, self._group_size))
        for trajectory in pending.group.trajectories:
            episode = asyncio.create_task(self._play(collector, pending, trajectory))
            episode.add_done_callback(self._on_done)
            pending.episodes.append(episode)
        self._pending.append(pending)

    async def _play(
        self, collector: Collector, pending: _PendingGroup, trajectory: Trajectory
    ) -> None:
        async with self._slots:  # first in, first out: episodes of the oldest group start first
            if pending.began is None:
                pending.began = self._version
            thread = EnvThread(inline=collector.inline)
            try:
                await run_episode(thread, collector.episode(pending.group.task, trajectory))
            finally:
                thread.close()

    def _on_done(self, episode: asyncio.Task[None]) -> None:
        if not episode.cancelled() and episode.exception() is not None:
            self._failure = self._failure or episode.exception()
        self._changed.set()

    async def _cut(self, overdue: list[_PendingGroup]) -> None:
        """Cancel the running episodes of overdue groups, and record the reason."""
        members = [member for pending in overdue for member in pending.members()]
        running = [(trajectory, episode) for trajectory, episode in members if not episode.done()]
        for _, episode in running:
            episode.cancel()
        await asyncio.gather(*(episode for _, episode in running), return_exceptions=True)
        for trajectory, episode in running:
            if episode.cancelled() and trajectory.reward is None:  # else it was being closed
                self._num_cut += 1
                for role in (trajectory, *trajectory.others):
                    role.status = Status.ABORTED
                    role.error = (
                        f"cut: still running {self.max_staleness} versions of the weights after "
                        "its group began (rl.max_staleness)"
                    )
        if self._failure is not None:
            raise self._failure


def longest_wait(last_s: float, running: int, due: int) -> float:
    """Seconds to wait before `running` of the `due` episodes are cut.

    Cutting them loses that share of a step, so waiting may cost as much: the share of the last
    step's `last_s` seconds, at most MAX_WAIT of it.
    """
    return last_s * min(MAX_WAIT, running / due)


def token_ages(groups: list[Group], version: int) -> Counter[int]:
    """Number of tokens of trainable trajectories, by versions between sampling and `version`."""
    ages: Counter[int] = Counter()
    for trajectory in (t for group in groups for t in group.trajectories if t.status.trainable):
        for sampled_by, num_tokens in (run for s in trajectory.segments for run in s.runs):
            ages[version - sampled_by] += num_tokens
    return ages


def _times() -> tuple[float, float, float]:
    """The time now, and the busy seconds of the learner and the sampler so far."""
    return time.perf_counter(), OCCUPANCY.total("train"), OCCUPANCY.total("sample")
