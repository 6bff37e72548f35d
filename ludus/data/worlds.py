"""Worlds of tasks: the state that an environment opens, to find equal tasks in two splits.

Two seeds may give the same world. `Env.world` describes it: the opening observation, or a fuller
state. Environments without cheap resets describe none: their tasks are compared by their data.
"""

from __future__ import annotations

from collections.abc import Sequence

from ludus.core.system.signals import run
from ludus.core.types import Spec, Task
from ludus.envs.base import Env
from ludus.rollout.hosts.host import LocalEnvs
from ludus.tasks.splits import task_key
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_TASKS = 50_000
"""Largest number of tasks to reset: 20 to 150 s of BabyAI, by level."""


class Worlds:
    """Keys of tasks (`ludus.tasks.splits.task_key`), from their worlds where these can be had.

    Args:
        env: environment of the tasks that name none.
        resets: False compares tasks of environments by their data.
    """

    def __init__(self, env: Spec | None, *, resets: bool = True) -> None:
        self._envs, self._resets = LocalEnvs(env), resets
        self._made: dict[str, Env] = {}

    def key(self, task: Task) -> str:
        """Returns the key of a task. A failed reset leaves the comparison to the task's data."""
        return self.keys([task])[0]

    def keys(self, tasks: Sequence[Task]) -> list[str]:
        """Returns the key of each task."""

        async def all_keys() -> list[str]:
            return [await self._key(task) for task in tasks]

        return run(all_keys())

    async def _key(self, task: Task) -> str:
        spec, world = self._envs.spec_of(task), None
        if spec is not None and self._resets:
            name = "" if task.env is None else spec.model_dump_json()
            try:
                if name not in self._made:
                    self._made[name] = self._envs.make(task)
                world = await self._made[name].world(task)
            except Exception as error:  # the run reports it when it plays the task
                log.debug("a task's world is unknown", task=task.id, error=str(error))
        return task_key(task, world, has_env=spec is not None)
