"""Conversations from the expert's episodes, for what is measured in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError
from ludus.core.system.signals import run
from ludus.core.types import Message, Task
from ludus.data.conversations import Conversation, read_conversations
from ludus.data.expert import Demonstration
from ludus.diagnostics.calibration.episodes import play_again
from ludus.diagnostics.calibration.subject import Subject
from ludus.pipeline.preflight.episodes import play_sample
from ludus.pipeline.preflight.heldout import judge_heldout
from ludus.pipeline.preflight.limits import Findings

NUM_HELDOUT, HELDOUT_S = 64, 3.0
"""Tasks of held-out levels that the expert plays, for their words; at most so many seconds."""

NUM_COMPARED = 4
"""Training tasks that are played beside held-out ones."""

NUM_MEASURED, LEAST_MEASURED = 1600, 64
"""Most demonstrations that are measured in tokens, and the least, however long they are."""

MEASURED_CHARACTERS = 2_000_000
"""Most characters of these demonstrations: a million take about 7 s."""


def measured(good: Sequence[Demonstration]) -> Sequence[Demonstration]:
    """The demonstrations that are split into tokens: fewer of long ones."""
    sizes = (sum(len(m.content) for m in d.messages) for d in good)
    within = sum(total <= MEASURED_CHARACTERS for total in accumulate(sizes))
    return good[: min(max(within, LEAST_MEASURED), NUM_MEASURED)]


def conversations_of(
    config: RunConfig, good: Sequence[Demonstration], tasks: Sequence[Task]
) -> list[Conversation]:
    """The demonstrations of these tasks, as SFT shows them."""
    ids = {task.id for task in tasks}
    kept = [d for d in good if d.task_id in ids]
    return read_conversations(config.model_copy(update={"sft": None}), kept, tasks)[0]


def heldout_episodes(config: RunConfig, subject: Subject) -> list[Conversation]:
    """The expert's episodes of the levels that the environment holds out, as many as fit into
    HELDOUT_S; none of an environment without such levels."""
    tasks = _heldout_tasks(subject)
    if subject.env is None or not tasks:
        return []
    played = run(play_again(subject.env, tasks, HELDOUT_S))
    return conversations_of(config, [d for d in played if d.success], tasks)


def _heldout_tasks(subject: Subject) -> list[Task]:
    """Tasks of the levels that the environment holds out; none where it has no such levels."""
    tiers = subject.heldout_tiers
    return replace(subject, tiers=tiers).take(NUM_HELDOUT, 0) if tiers else []


def of_heldout_levels(config: RunConfig, subject: Subject, tasks: Sequence[Task]) -> list[str]:
    """The levels that the environment holds out and that cannot be played, each with the reason.

    Args:
        tasks: of training, which tell what random words do.

    Errors: ConfigError where no task of these levels can be played: a run would not start.
    """
    heldout = _heldout_tasks(subject)
    if not heldout:
        return []
    found = Findings()
    judge_heldout(run(play_sample(config, tasks[:NUM_COMPARED], heldout)), found)
    if found.faults:
        raise ConfigError(
            f"{subject.given}: held-out levels {', '.join(subject.heldout_tiers)}: "
            f"{found.faults[0].removeprefix('tasks.heldout: ')}. Mend them, or leave them out of "
            "`tiers()`, so that tasks of the training levels are held out"
        )
    return found.notes


def openings(config: RunConfig, tasks: Sequence[Task]) -> list[Conversation]:
    """The openings of a few tasks, for their lengths: there is no expert's turn."""
    placeholder = Message(role="assistant", content="ok")
    return [
        Conversation(p.task, [*p.task.prompt, *p.opening, placeholder], None, None)
        for p in run(play_sample(config, tasks[:16])).opened
    ]
