"""Order of training tasks, with a state that resumes exactly."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

from ludus.core.errors import CheckpointError, DataError
from ludus.core.names import metric_part
from ludus.core.types import Group, Task
from ludus.tasks.splits import fingerprint


class Curriculum(Protocol):
    """Chooses the next task; may learn from the results. `finished` ends the stage."""

    @property
    def finished(self) -> bool: ...

    def __next__(self) -> Task: ...

    def observe(self, groups: Sequence[Group]) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def metrics(self) -> dict[str, float]: ...


class TaskSampler:
    """Visits every task once an epoch, in a new seeded order each epoch, without end.

    The order of an epoch sorts the tasks by a hash of (seed, epoch, index): a uniform permutation,
    the same on every platform and in every version of Python.
    """

    def __init__(self, tasks: Sequence[Task], seed: int = 0, shuffle: bool = True) -> None:
        if not tasks:
            raise DataError("a task sampler needs at least one task")
        self.tasks = list(tasks)
        self.seed, self.shuffle = seed, shuffle
        self.epoch, self.index = 0, 0
        self._order = self._permutation(0)
        self._rewards: dict[str, float] = {}
        listed = "".join(f"{len(task.id)}:{task.id}{fingerprint(task)}" for task in self.tasks)
        self._fingerprint = hashlib.sha256(listed.encode()).hexdigest()[:32]

    def __iter__(self) -> TaskSampler:
        return self

    def __next__(self) -> Task:
        if self.index == len(self.tasks):
            self.epoch, self.index = self.epoch + 1, 0
            self._order = self._permutation(self.epoch)
        task = self.tasks[self._order[self.index]]
        self.index += 1
        return task

    @property
    def finished(self) -> bool:
        """False: the tasks never end."""
        return False

    def start_batch(self) -> None:
        """A new batch of tasks begins."""

    def observe(self, groups: Sequence[Group]) -> None:
        """Record the mean reward of each tier in the groups just played, by its name in metrics."""
        rewards: dict[str, list[float]] = defaultdict(list)
        for group in groups:
            for trajectory in group.trajectories:
                if trajectory.status.trainable and trajectory.reward is not None:
                    rewards[metric_part(group.task.tier or "all")].append(trajectory.reward)
        self._rewards = {tier: sum(got) / len(got) for tier, got in sorted(rewards.items())}

    def metrics(self) -> dict[str, float]:
        """`tasks/epoch`: epochs so far; `tasks/reward_TIER`: mean reward of the last groups."""
        epoch = self.epoch + self.index / len(self.tasks)
        return {
            "tasks/epoch": epoch,
            **{f"tasks/reward_{tier}": reward for tier, reward in self._rewards.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """All state, ready for JSON."""
        return {
            "tasks": self._fingerprint,
            "num_tasks": len(self.tasks),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "index": self.index,
            "rewards": dict(self._rewards),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state`.

        Errors: CheckpointError if `state` has other tasks, another seed or another order.
        """
        own_state = self.state_dict()
        if state["tasks"] != own_state["tasks"]:
            raise CheckpointError(
                f"the saved task order is of another task list ({state['num_tasks']} tasks; this "
                f"run has {len(self.tasks)}): resume with the configuration of the saved run"
            )
        if ("curriculum" in state) != ("curriculum" in own_state):
            saved, own = ("a", "none") if "curriculum" in state else ("no", "one")
            raise CheckpointError(
                f"the saved task order has {saved} tasks.curriculum, this run has {own}: resume "
                "with the configuration of the saved run"
            )
        for key in ("seed", "shuffle"):
            if state[key] != own_state[key]:
                raise CheckpointError(
                    f"the saved task order has {key} {state[key]}, this run has {own_state[key]}: "
                    "resume with the configuration of the saved run"
                )
        self.epoch, self.index = int(state["epoch"]), int(state["index"])
        self._order = self._permutation(self.epoch)
        self._rewards = dict(state["rewards"])

    def _permutation(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.tasks)))

        def key(index: int) -> bytes:
            return hashlib.sha256(f"{self.seed}:{epoch}:{index}".encode()).digest()

        return sorted(range(len(self.tasks)), key=key)
