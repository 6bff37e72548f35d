"""Checks that a task gives the same episode each time, in this process and in another."""

from __future__ import annotations

from ludus.core.errors import EnvError, counted
from ludus.core.types import Spec, Task
from ludus.envs.checks.differences import HASHED, SEEDED, difference, expert_change
from ludus.envs.checks.play import (
    WORDS,
    EpisodeProcessDied,
    Player,
    Turn,
    actions_of,
    play_in_process,
)
from ludus.envs.checks.subject import Subject

ENOUGH = 3
"""Tasks whose episodes are equal, opening to end, from which it is no chance."""

PROCESS_START_S = 60.0
"""Time allowance for the imports of a new process, in addition to the episode's."""


async def check_determinism(subject: Subject, player: Player) -> None:
    """Play each task twice with the same actions, and one in another process."""
    differ: list[str] = []
    episodes: list[list[Turn]] = []
    tasks = subject.tasks if not player.slow or subject.spec is None else ()
    for number, task in enumerate(tasks):
        if player.late:
            break
        first = await player.episode(task)
        second = await player.episode(task, actions_of(first))
        episodes.append(first)
        if first != second:
            differ.append(f"{task.id}: {difference(first, second)}")
        else:
            subject.played[number] = actions_of(first)
    if differ:
        subject.repeats = False
        subject.error(
            "determinism",
            f"{len(differ)} of {counted(len(tasks), 'task')}, played twice with the same actions, "
            f"{'differs' if len(differ) == 1 else 'differ'}; {differ[0]}. {SEEDED}",
        )
        return
    _check_seeds(subject, episodes)
    if subject.spec is not None:
        await _same_in_another_process(subject, player, subject.spec)


def _check_seeds(subject: Subject, episodes: list[list[Turn]]) -> None:
    """Tell where the tasks of a tier are one and the same task under several ids."""
    kinds: dict[str | None, list[tuple[Task, list[Turn]]]] = {}
    for task, turns in zip(subject.tasks, episodes, strict=False):
        kinds.setdefault(task.tier, []).append((task.model_copy(update={"id": ""}), turns))
    for tier, alike in kinds.items():
        first, episode = alike[0]
        same_data = all((task, turns[0]) == (first, episode[0]) for task, turns in alike)
        # Words without an expert may fail in all worlds alike.
        same_play = len(alike) >= ENOUGH and all(turns == episode for _, turns in alike)
        same_play = same_play and actions_of(episode)[:1] != [WORDS.format(0)]
        if len(alike) > 1 and (same_data or same_play):
            of = f" of tier {tier}" if tier is not None else ""
            have = "have the same data and the same opening" if same_data else "play alike"
            subject.note(
                "tasks",
                f"the {len(alike)} tasks{of} {have}: RL would learn one task by heart; let `task` "
                "put the seed into `data`, and `reset` use it",
            )


async def _same_in_another_process(subject: Subject, player: Player, spec: Spec) -> None:
    task, limit = subject.tasks[0], subject.timeout_s + PROCESS_START_S
    first = await player.episode(task) if not player.slow else subject.first[: player.max_turns + 1]
    actions = actions_of(first)
    try:
        second = play_in_process(spec, task, actions if player.slow else None, limit)
        if (own := actions_of(second)) != actions:  # of the expert there
            second = play_in_process(spec, task, actions, limit)
    except EpisodeProcessDied:
        raise
    except EnvError as error:
        text = f"{task.id}, played in another process, raised {error}. {HASHED}"
        subject.error("determinism", text)
        return
    if first != second:
        # A slow one was not played twice in this process.
        cures = f"{SEEDED}. {HASHED}" if player.slow else HASHED
        text = f"{task.id} differs in another process: {difference(first, second)}. {cures}"
        subject.error("determinism", text)
    elif own != actions and subject.played.get(0) == actions:
        text = f"{task.id}, played in another process: {expert_change(actions, own)}. {HASHED}"
        subject.note("expert", text)
