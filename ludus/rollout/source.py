"""Group sources: they supply the groups of a training step. See also `prefetch` and `replay`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from ludus.core.errors import TrainingError
from ludus.core.types import Group, Task
from ludus.tasks.curriculum import Curriculum
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)


class Collect(Protocol):
    """Plays tasks: `Collector.collect` with a group size."""

    def __call__(
        self, tasks: Sequence[Task], step: int, *, first_group: int
    ) -> Awaitable[list[Group]]:
        """Returns one group for each task, numbered in the step from `first_group` on."""
        ...


class GroupSource(Protocol):
    """Supplies the judged groups of each step. Owns the task sampler and its state.

    `max_staleness` is the largest number of versions between the weights that sampled a group and
    the published weights. 0 is synchronous training.
    """

    max_staleness: int

    @property
    def finished(self) -> bool:
        """True if the task sampler has nothing more to teach: the stage ends."""
        ...

    async def take(self, n: int, step: int, version: int) -> list[Group]:
        """Returns about `n` groups for `step`; `version` is that of the published weights.

        Errors: those that concern the run and not one episode (diverged weights, a broken config).
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of the groups taken since the last call, and of the task sampler."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """State of the source and its task sampler, ready for JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. Its `step` is the number of complete steps."""
        ...

    async def close(self) -> list[Group]:
        """Stop all episodes. Returns groups that no step trained on, with reasons in `dropped`."""
        ...


class SyncSource:
    """Plays the tasks of a step while the learner waits.

    Args:
        around: context manager entered while the tasks are played.
        verify: called with the groups after that.
    """

    def __init__(
        self,
        tasks: Curriculum,
        collect: Collect,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        verify: Callable[[list[Group]], Awaitable[None]] | None = None,
    ) -> None:
        self.max_staleness = 0
        self._tasks, self._collect, self._around, self._verify = tasks, collect, around, verify
        self._step, self._num_taken = -1, 0

    @property
    def finished(self) -> bool:
        return self._tasks.finished

    async def take(self, n: int, step: int, version: int) -> list[Group]:
        """Play the next `n` tasks. Further calls in one step continue its group numbers."""
        if step != self._step:
            self._step, self._num_taken = step, 0
        tasks = [next(self._tasks) for _ in range(n)]
        with self._around():
            groups = await self._collect(tasks, step, first_group=self._num_taken)
        if self._verify is not None:
            await self._verify(groups)
        self._num_taken += n
        self._tasks.observe(groups)
        return groups

    def metrics(self) -> dict[str, float]:
        return self._tasks.metrics()

    def state_dict(self) -> dict[str, Any]:
        return {"tasks": self._tasks.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tasks.load_state_dict(state["tasks"])

    async def close(self) -> list[Group]:
        return []


class DynamicSampling:
    """Takes further groups in place of groups without a signal.

    DAPO's dynamic sampling, Yu et al. 2025 (arXiv:2503.14476), section 3.2. Groups without a signal
    are returned too, so that they are recorded.

    Args:
        count_useful: the number of groups that can train.
        max_rounds: the most takes in one step.
    """

    def __init__(
        self, source: GroupSource, count_useful: Callable[[list[Group]], int], max_rounds: int
    ) -> None:
        self.max_staleness = source.max_staleness
        self.state_dict, self.load_state_dict = source.state_dict, source.load_state_dict
        self.close = source.close
        self._source, self._count_useful, self._max_rounds = source, count_useful, max_rounds
        self._rounds = 0

    @property
    def finished(self) -> bool:
        return self._source.finished

    async def take(self, n: int, step: int, version: int) -> list[Group]:
        """Take until `n` groups carry a signal, at most `max_rounds` times."""
        groups: list[Group] = []
        missing, self._rounds = n, 0
        while missing > 0 and self._rounds < self._max_rounds:
            fresh = await self._source.take(missing, step, version)
            groups += fresh
            missing -= self._count_useful(fresh)
            self._rounds += 1
        if missing > 0:
            log.info("too few groups with signal", step=step, rounds=self._rounds, missing=missing)
        return groups

    def metrics(self) -> dict[str, float]:
        """The source's metrics, and `rollout/rounds`: takes in the last step."""
        return {**self._source.metrics(), "rollout/rounds": float(self._rounds)}


def require_fresh(groups: Sequence[Group], version: int, max_staleness: int) -> None:
    """Refuse tokens of weights that nobody published, or older than `max_staleness` versions.

    Demonstrations carry no version and pass. Errors: TrainingError.
    """
    for trajectory in (t for group in groups for t in group.trajectories):
        for sampled_by, _ in (run for segment in trajectory.segments for run in segment.runs):
            if version - max_staleness <= sampled_by <= version:
                continue
            allowed = f" (rl.max_staleness = {max_staleness})" if max_staleness else ""
            raise TrainingError(
                f"trajectory {trajectory.id} was sampled by version {sampled_by} of the weights, "
                f"but version {version} was published{allowed}: the sampler is stale"
            )
