"""The tasks that an environment makes from its tiers and from seeds, checked as they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from ludus.core.errors import EnvError, EpisodeTimeout
from ludus.core.modules import told
from ludus.core.types import Task
from ludus.envs.base import construction_fault, tiers_of
from ludus.envs.checks.play import Player
from ludus.envs.checks.subject import Subject
from ludus.tasks.readers import check_unicode

NAME = "tasks"


async def own_tasks(
    subject: Subject, player: Player, num_tasks: int, levels: Sequence[str] = ()
) -> list[Task]:
    """Tasks of the first seeds, spread over the tiers from the easiest to the hardest; none where
    a finding tells what is wrong. `levels`: some of the tiers. Errors: EpisodeTimeout."""
    env_class = subject.env_class

    async def make() -> list[Task]:
        tiers: Sequence[Any] = levels or tiers_of(env_class) or [None]
        chosen = [tiers[i * len(tiers) // num_tasks] for i in range(num_tasks)]
        return [made(env_class, tier, seed) for seed, tier in enumerate(chosen)]

    try:
        tasks, again = [await player.call("tiers or task", make) for _ in range(2)]
    except NotImplementedError:
        own = env_class.__name__
        subject.error(
            NAME,
            f"{own} has no classmethod `task(tier, seed)`, which returns a Task: write it, or "
            f"check the environment on tasks of yours in Python: await check_env({own}, "
            "tasks=[...]), from ludus.envs.checks.check",
        )
        return []
    except EpisodeTimeout:
        raise
    except EnvError as error:
        subject.error(NAME, str(error))
        return []
    except Exception as error:
        subject.error(NAME, f"tiers or task raised {told(error, 200)}")
        return []
    if tasks != again:
        subject.error(NAME, "the same tier and seed give different tasks")
    if len({task.id for task in tasks}) < len(tasks):
        subject.error(NAME, "different seeds give tasks with the same id")
    return tasks


def made(env_class: Any, tier: str | None, seed: int) -> Task:
    """The task of a tier and a seed.

    Errors: EnvError where `task` raises, and for anything else than a task that JSON can hold;
    NotImplementedError without `task`.
    """
    call = f"task({tier!r}, {seed})"
    try:
        task: Any = env_class.task(tier, seed)
    except TypeError as error:
        raise EnvError(
            f"{call} raised TypeError: {error}; write `@classmethod def task(cls, tier, seed)`"
        ) from error
    except ValidationError as error:
        if (fault := construction_fault(error)) is None:
            raise EnvError(f"{call} raised {told(error, 200)}") from error
        raise EnvError(f"{call}: {fault}") from error
    except NotImplementedError:
        raise
    except Exception as error:
        raise EnvError(f"{call} raised {told(error, 200)}") from error
    if not isinstance(task, Task):
        raise EnvError(f"{call} returned {task!r:.80}; it has to return a Task")
    if tier is not None and task.tier is None:
        raise EnvError(f"{call} returned a task without a tier: give the Task `tier=tier`")
    try:
        check_unicode(task.id)
    except ValueError as error:
        raise EnvError(f"{call}: the id of the task {error}") from error
    try:
        task.model_dump_json()
    except ValueError as error:
        raise EnvError(f"{call}: `data` of the task has what JSON cannot hold: {error}") from error
    return task
