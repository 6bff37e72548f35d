"""Checks that a task gives the same episode each time, in this process and in another."""

from __future__ import annotations

from ludus.core.errors import counted
from ludus.core.types import Spec
from ludus.envs.checks.differences import HASHED, SEEDED, difference, expert_change
from ludus.envs.checks.play import Player, actions_of, play_in_process
from ludus.envs.checks.subject import Subject

PROCESS_START_S = 60.0
"""Time allowance for the imports of a new process, in addition to the episode's."""


async def check_determinism(subject: Subject, player: Player) -> None:
    """Play each task twice with the same actions, and one in another process."""
    differ: list[str] = []
    tasks = subject.tasks if not player.slow or subject.spec is None else ()
    for task in tasks:
        first = await player.episode(task)
        second = await player.episode(task, actions_of(first))
        if first != second:
            differ.append(f"{task.id}: {difference(first, second)}")
        else:
            subject.played[task.id] = actions_of(first)
    if differ:
        subject.repeats = False
        subject.error(
            "determinism",
            f"{len(differ)} of {counted(len(tasks), 'task')}, played twice with the same actions, "
            f"{'differs' if len(differ) == 1 else 'differ'}; {differ[0]}. {SEEDED}",
        )
    elif subject.spec is not None:
        await _same_in_another_process(subject, player, subject.spec)


async def _same_in_another_process(subject: Subject, player: Player, spec: Spec) -> None:
    task, limit = subject.tasks[0], subject.timeout_s + PROCESS_START_S
    first = await player.episode(task) if not player.slow else subject.first[: player.max_turns + 1]
    actions = actions_of(first)
    second = play_in_process(spec, task, actions if player.slow else None, limit)
    if (own := actions_of(second)) != actions:  # of the expert there
        second = play_in_process(spec, task, actions, limit)
    if first != second:
        text = f"{task.id} differs in another process: {difference(first, second)}. {HASHED}"
        subject.error("determinism", text)
    elif own != actions and subject.played.get(task.id) == actions:
        text = f"{task.id}, played in another process: {expert_change(actions, own)}. {HASHED}"
        subject.note("expert", text)
