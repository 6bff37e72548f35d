"""Checks of what an environment's class says about itself."""

from __future__ import annotations

import difflib
from typing import Any

from ludus.core.errors import EpisodeTimeout
from ludus.core.modules import told
from ludus.envs.base import Env, expert_knows_more, limits_of
from ludus.envs.checks.play import Player
from ludus.envs.checks.subject import Subject

NEAR = 0.85
"""Similarity of two names, from 0 to 1, from which one may be the other misspelt."""


async def check_declarations(subject: Subject, player: Player) -> None:
    """Limits that contradict each other, names that may be misspelt, and worlds."""
    env = await player.new()
    (low, high), success_at = limits_of(env)
    if not low <= success_at <= high:
        subject.error("declarations", f"success_at {success_at:g} is outside of score_range")
    if env.max_turns < 1:
        subject.error("declarations", f"max_turns is {env.max_turns}; an episode needs a turn")
    args = subject.spec.args if subject.spec is not None else {}
    for task in subject.tasks:
        expert_knows_more(subject.env_class, task, args)
    await player.close_env(env)
    for name, meant in _misspelt(subject.env_class):
        text = f"`{name}` of {subject.env_class.__name__} is no name of Env: if you mean `{meant}`"
        subject.note("declarations", f"{text}, rename it, for it has no effect")
    if subject.env_class.world is not Env.world:
        await _check_worlds(subject, player)


def _misspelt(env_class: Any) -> list[tuple[str, str]]:
    """Names of the user's own classes that are nearly those of Env, which they do not define."""
    own = {name for cls in env_class.__mro__ if _is_own(cls) for name in vars(cls)}
    free = [name for name in dir(Env) if not name.startswith("_") and name not in own]
    found = []
    for name in sorted(own):
        if not name.startswith("_") and not hasattr(Env, name):
            alike = [each for each in free if _one_letter(name.lower(), each)]
            near = alike or difflib.get_close_matches(name, free, 1, NEAR)
            found += [(name, each) for each in near[:1]]
    return found


def _one_letter(a: str, b: str) -> bool:
    """True for names of one length that differ in at most one letter."""
    return len(a) == len(b) and sum(x != y for x, y in zip(a, b, strict=True)) <= 1


def _is_own(cls: type) -> bool:
    return not (cls.__module__ == "ludus" or cls.__module__.startswith("ludus.")) and issubclass(
        cls, Env
    )


async def _check_worlds(subject: Subject, player: Player) -> None:
    """A run calls `world` for each task, to find held-out tasks that are training tasks."""
    task, worlds = subject.tasks[0], list[object]()
    for _ in range(2):
        env = await player.new()
        try:
            worlds.append(await player.call("world", lambda env=env: env.world(task)))  # type: ignore[misc]
        except EpisodeTimeout:
            raise
        except Exception as error:
            subject.error("world", f"{task.id}: world raised {told(error, 200)}")
            return
        finally:
            await player.close_env(env)
    first, second = worlds
    if first is not None and not isinstance(first, str):
        subject.error("world", f"world returned {first!r:.80}; it has to return a text or None")
    elif first != second:
        text = "equal tasks have to have equal worlds, or held-out tasks may be training tasks"
        subject.error("world", f"{task.id}: two calls of world differ: {text}")
