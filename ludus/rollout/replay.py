"""Demonstrations as trajectories: what SFT trains on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ludus.core.errors import DataError
from ludus.core.types import Group, Message, Segment, Task, Trajectory
from ludus.models.renderer import Renderer
from ludus.models.sampler import Completion
from ludus.rollout.tree import TreeBuilder


def replay(
    messages: Sequence[Message], renderer: Renderer, trajectory: Trajectory, where: str = ""
) -> Trajectory:
    """Render a conversation the way a rollout would have built it, turn by turn.

    The assistant's turns become sampled segments with log-probability 0: whoever wrote them chose
    them with certainty.

    Errors: DataError where the conversation has no assistant turn, or opens with one.
    """
    builder = TreeBuilder(trajectory)
    first = next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))
    if first in (0, len(messages)):
        raise DataError(
            f"{where}a conversation needs messages before its first assistant turn, and at least "
            "one assistant turn"
        )
    opening = list(messages[:first])
    builder.given(opening, renderer.open(opening))
    pending: list[Message] = []
    previous: list[int] = []
    for message in messages[first:]:
        if message.role != "assistant":
            pending.append(message)
            continue
        if previous:
            builder.given(pending, renderer.extend(pending, previous))
        pending = []
        previous = renderer.assistant(message)
        segment = builder.sampled(Completion(previous, [0.0] * len(previous), "stop", 0), message)
        segment.policy_version = None
    for message in pending:  # said after the last turn: nobody answers it, so it has no ids
        builder.trajectory.segments.append(Segment(builder.head, [], message=message))
        builder.head += 1
    return trajectory


class ReplayCollector:
    """Answers `collect` with demonstrations, one a task: SFT in the loop's own words."""

    def __init__(self, demonstrations: Iterable[Trajectory]) -> None:
        self._by_task = {trajectory.task_id: trajectory for trajectory in demonstrations}

    async def collect(self, tasks: Sequence[Task], step: int) -> list[Group]:
        """One group of one demonstration for each task, with ids of this step."""
        groups: list[Group] = []
        for number, task in enumerate(tasks):
            known = self._by_task[task.id]
            group_id = f"sft-{step:06d}/g{number:04d}"
            copy = Trajectory(
                f"{group_id}/e000",
                group_id,
                task.id,
                segments=known.segments,
                policy="expert",
                reward=known.reward,
                metrics=dict(known.metrics),
            )
            groups.append(Group(group_id, task, [copy]))
        return groups
