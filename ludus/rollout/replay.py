"""Demonstrations as trajectories: what SFT trains on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ludus.core.errors import ConfigError, DataError
from ludus.core.types import Group, Message, Task, Trajectory
from ludus.models.chat.renderer import Renderer
from ludus.rollout.session import TreeBuilder


def replay(
    messages: Sequence[Message], renderer: Renderer, trajectory: Trajectory, where: str = ""
) -> Trajectory:
    """Render a conversation the way a rollout would have built it, turn by turn.

    The assistant's turns become sampled segments with log-probability 0: whoever wrote them chose
    them with certainty. `where` begins the error messages.

    Errors: DataError where the conversation has no assistant turn, opens with one, or is one that
    the chat template refuses.
    """
    first = next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))
    if first in (0, len(messages)):
        raise DataError(
            f"{where}a conversation needs messages before its first assistant turn, and at least "
            "one assistant turn"
        )
    try:
        _render(messages, first, renderer, TreeBuilder(trajectory))
    except ConfigError as error:
        raise DataError(f"{where}{error}") from error
    return trajectory


def _render(
    messages: Sequence[Message], first: int, renderer: Renderer, builder: TreeBuilder
) -> None:
    opening = list(messages[:first])
    builder.add_messages(opening, renderer.open(opening))
    turn: Message | None = None
    replies: list[Message] = []
    for message in messages[first:]:
        if message.role != "assistant":
            replies.append(message)
            continue
        if turn is not None:
            builder.add_replies(replies, renderer)
        turn, replies = message, []
        if renderer.thinking == "forbid":
            turn = turn.model_copy(update={"thinking": None})
        token_ids = renderer.assistant(turn)
        builder.add_turn(turn, token_ids, [0.0] * len(token_ids), None)
    builder.add_messages(replies, [])  # after the last turn: the model never sees them


class ReplayCollector:
    """Answers `collect` with demonstrations, one a task: SFT in the loop's own words."""

    def __init__(self, demonstrations: Iterable[Trajectory]) -> None:
        self._by_task = {trajectory.task_id: trajectory for trajectory in demonstrations}

    async def collect(self, tasks: Sequence[Task], step: int, first_group: int = 0) -> list[Group]:
        """One group of one demonstration for each task, with ids of this step."""
        groups: list[Group] = []
        for number, task in enumerate(tasks, first_group):
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
