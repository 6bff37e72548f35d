"""Playing ahead: episodes go on while the policy learns, within a bound on their weights' age.

    take(step)     launch groups until those of this step and of the `max_staleness` next are there
                   wait until as many groups are complete as the step trains on
                   wait a little for what began `max_staleness` versions ago, then cut it
                   hand out the oldest

What was cut is in its group with the reason, and what its group has finished trains. So no finished
episode is too old, and a straggler holds nobody up for longer than the bound.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from ludus.core.types import Group, Status, Task, Trajectory
from ludus.rollout.collect import Collector
from ludus.rollout.threads import EnvThread
from ludus.tasks.curriculum import Curriculum
from ludus.telemetry.occupancy import OCCUPANCY

PATIENCE = 0.2
"""How long a step waits for those that it would have to cut, as a share of the last step's time."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A group under way. `began`: the version of the weights when its first episode began."""

    number: int
    group: Group
    episodes: list[asyncio.Task[None]] = field(default_factory=list)
    began: int | None = None

    @property
    def landed(self) -> bool:
        return all(episode.done() for episode in self.episodes)

    def members(self) -> list[tuple[Trajectory, asyncio.Task[None]]]:
        return list(zip(self.group.trajectories, self.episodes, strict=True))


class Prefetch:
    """Groups played ahead of the steps that train on them, in one event loop with the learner.

    Consumes tasks, waits for the sampler and the environments, is unblocked by whichever group is
    complete first, produces the groups of each step, oldest first. Groups are numbered in the order
    of their tasks and named as without playing ahead; which of them a step gets depends on time.

    Args:
        collector_of: plays the episodes that were meant for a step.
        tasks: where tasks come from.
        steps: of the stage; nothing is launched for steps that will not come.
        max_staleness: how many versions may be published between the beginning of an episode and
            the step that trains on it; at least 1.
        around: a context for the time in which a step's groups are waited for.
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
            raise ValueError("max_staleness is at least 1 where episodes are played ahead")
        self.max_staleness = max_staleness
        self._collector_of = collector_of
        self._tasks = tasks
        self._steps = steps
        self._groups_per_step = groups_per_step
        self._group_size = group_size
        self._around = around
        self._seats = asyncio.Semaphore(collector_of(0).config.concurrency)
        self._changed = asyncio.Event()
        self._flights: list[_Flight] = []
        self._again: list[tuple[int, Task]] = []
        self._next_number = 0
        self._version = 0
        self._failure: BaseException | None = None
        self._depth = self._num_cut = 0
        self._last = _times()
        self._taken_at: float | None = None

    async def take(self, wanted: int, step: int, version: int) -> list[Group]:
        """At least `wanted` groups, each begun at most `max_staleness` versions before `version`.

        More where more of them would be too old for the next step. A group of which everything was
        cut comes on top.

        Errors: whatever concerns the run and not one episode (diverged weights, a broken config).
        """
        started = asyncio.get_running_loop().time()
        patience = 0.0 if self._taken_at is None else PATIENCE * (started - self._taken_at)
        self._version, self._taken_at = version, started
        self._launch_up_to(min(self.max_staleness + 1, self._steps - step) * self._groups_per_step)
        self._depth = max(self._depth, len(self._landed()))
        with self._around():
            await self._until(lambda: len(self._landed()) >= wanted)
            oldest = version - self.max_staleness
            due = [f for f in self._flights if f.began is not None and f.began <= oldest]
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._until(lambda: all(flight.landed for flight in due))
            await self._cut([flight for flight in due if not flight.landed])
        spare = [flight for flight in self._landed() if flight not in due]
        missing = wanted - sum(_useful(flight.group) for flight in due)
        chosen = due + spare[: max(missing, 0)]
        self._flights = [flight for flight in self._flights if flight not in chosen]
        groups = [flight.group for flight in sorted(chosen, key=lambda f: f.number)]
        self._tasks.observe(groups)
        return groups

    def metrics(self) -> dict[str, float]:
        """Of the step since the last call.

        `rollout/queue_depth`: complete groups that waited when the step began; `rollout/cut`:
        episodes that were cut; `time/learner_idle_s`, `time/sampler_idle_s`: seconds in which it
        did not compute, whatever else did.
        """
        now = _times()
        spans = zip(now, self._last, strict=True)
        wall, trained, sampled = (after - before for after, before in spans)
        found = {
            "rollout/queue_depth": float(self._depth),
            "rollout/cut": float(self._num_cut),
            "time/learner_idle_s": wall - trained,
            "time/sampler_idle_s": wall - sampled,
        }
        self._last, self._depth, self._num_cut = now, 0, 0
        return found

    def state_dict(self) -> dict[str, Any]:
        """The tasks that are under way, ready for JSON: a resumed run plays them again, first."""
        under_way = [(flight.number, flight.group.task) for flight in self._flights] + self._again
        return {
            "next_number": self._next_number,
            "again": [[number, task.model_dump(mode="json")] for number, task in under_way],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, with the task sampler's state of that moment."""
        self._next_number = int(state["next_number"])
        self._again = [(number, Task.model_validate(task)) for number, task in state["again"]]

    async def close(self) -> list[Group]:
        """Stop what is under way. Returns what was played in vain, each episode with the reason."""
        flights, self._flights = self._flights, []
        episodes = [episode for flight in flights for episode in flight.episodes]
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)
        begun = [flight for flight in flights if flight.began is not None]
        for flight in begun:
            for trajectory, episode in flight.members():
                if episode.cancelled():
                    trajectory.status, trajectory.error = Status.ABORTED, "the stage ended"
                trajectory.dropped = "played ahead of the end: no step was left to train on it"
        return [flight.group for flight in begun]

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready() and self._failure is None:
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    def _landed(self) -> list[_Flight]:
        """Complete groups, oldest first."""
        return [flight for flight in self._flights if flight.landed]

    def _launch_up_to(self, count: int) -> None:
        while len(self._flights) < count:
            if self._again:
                self._launch(*self._again.pop(0))
            else:
                self._launch(self._next_number, next(self._tasks))
                self._next_number += 1

    def _launch(self, number: int, task: Task) -> None:
        step, place = divmod(number, self._groups_per_step)
        collector = self._collector_of(step)
        flight = _Flight(number, collector.lay_out(task, step, place, self._group_size))
        for trajectory in flight.group.trajectories:
            episode = asyncio.create_task(self._play(collector, flight, trajectory))
            episode.add_done_callback(self._note)
            flight.episodes.append(episode)
        self._flights.append(flight)

    async def _play(self, collector: Collector, flight: _Flight, trajectory: Trajectory) -> None:
        async with self._seats:  # first come, first served: the oldest group's episodes come first
            if flight.began is None:
                flight.began = self._version
            seat = EnvThread(inline=collector.inline)
            try:
                await collector.play(seat, flight.group.task, trajectory)
            finally:
                seat.close()

    def _note(self, episode: asyncio.Task[None]) -> None:
        if not episode.cancelled() and episode.exception() is not None:
            self._failure = self._failure or episode.exception()
        self._changed.set()

    async def _cut(self, flights: list[_Flight]) -> None:
        """End the episodes that still run, and leave the reason with them."""
        members = [member for flight in flights for member in flight.members()]
        running = [(trajectory, episode) for trajectory, episode in members if not episode.done()]
        for _, episode in running:
            episode.cancel()
        await asyncio.gather(*(episode for _, episode in running), return_exceptions=True)
        for trajectory, episode in running:
            if episode.cancelled():
                self._num_cut += 1
                trajectory.status = Status.ABORTED
                trajectory.error = (
                    f"cut: it still ran {self.max_staleness} versions of the weights after its "
                    "group began (rl.max_staleness)"
                )
        if self._failure is not None:
            raise self._failure


def _useful(group: Group) -> bool:
    """Whether anything in it can train."""
    return any(trajectory.status.trainable for trajectory in group.trajectories)


def _times() -> tuple[float, float, float]:
    """The time now, and the seconds so far in which the learner and the sampler computed."""
    return time.perf_counter(), OCCUPANCY.total("train"), OCCUPANCY.total("sample")
