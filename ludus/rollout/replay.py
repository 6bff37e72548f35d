"""Demonstrations as trajectories: the training data of SFT."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ludus.core.errors import ConfigError, DataError
from ludus.core.types import Group, Message, Task, Trajectory
from ludus.models.chat.renderer import Renderer
from ludus.rollout.sessions.session import TreeBuilder
from ludus.rollout.source import SyncSource
from ludus.tasks.curriculum import Curriculum


def replay(
    messages: Sequence[Message],
    renderer: Renderer,
    trajectory: Trajectory,
    where: str = "",
    trained: Sequence[bool] | None = None,
) -> Trajectory:
    """Render a conversation the way a rollout would have built it, turn by turn.

    The assistant's turns become sampled segments with log-probability 0: whoever wrote them chose
    them with certainty. `where` begins the error messages. `trained` tells for each assistant turn
    if it is trained (None: all); the others are context, without loss.

    Errors: DataError where the conversation has no assistant turn, opens with one, or is one that
    the chat template refuses.
    """
    first = next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))
    if first in (0, len(messages)):
        raise DataError(
            f"{where}a conversation needs messages before its first assistant turn, and at least "
            "one assistant turn"
        )
    builder, replies, num_turns = TreeBuilder(trajectory), list[Message](), 0
    try:
        builder.add_messages(messages[:first], renderer.open(messages[:first]))
        for number, message in enumerate(messages[first:]):
            if message.role != "assistant":
                replies.append(message)
                continue
            if number:
                builder.add_replies(replies, renderer)
            replies = []
            if renderer.thinking == "forbid":
                message = message.model_copy(update={"thinking": None})
            begins, ends = _ends_of(messages, first + number, renderer)
            token_ids = renderer.assistant(message, begins=begins, ends=ends)
            if trained is None or trained[num_turns]:
                builder.add_turn(message, token_ids, [0.0] * len(token_ids), None)
            else:
                builder.add_messages([message], token_ids)
            num_turns += 1
    except ConfigError as error:
        raise DataError(f"{where}{error}") from error
    builder.add_messages(replies, [])  # after the last turn: the model never sees them
    return trajectory


def _ends_of(messages: Sequence[Message], index: int, renderer: Renderer) -> tuple[bool, bool]:
    """True where the message begins, and where it ends, a turn: results may stand inside a turn."""
    inside = renderer.result_markers is not None
    before, after = messages[index - 1], messages[index + 1 : index + 2]
    return not (inside and before.role == "tool"), not (
        inside and after and after[0].role == "tool"
    )


class ReplaySource(SyncSource):
    """Source of demonstrations: one group of one trajectory a task, with ids of the step."""

    def __init__(self, tasks: Curriculum, demonstrations: Iterable[Trajectory]) -> None:
        super().__init__(tasks, self._copy)
        self._by_task = {trajectory.task_id: trajectory for trajectory in demonstrations}

    async def _copy(self, tasks: Sequence[Task], step: int, *, first_group: int) -> list[Group]:
        groups: list[Group] = []
        for number, task in enumerate(tasks, first_group):
            original = self._by_task[task.id]
            group_id = f"sft-{step:06d}/g{number:04d}"
            copy = Trajectory(
                f"{group_id}/e000",
                group_id,
                task.id,
                segments=original.segments,
                policy="expert",
                reward=original.reward,
                metrics=dict(original.metrics),
            )
            groups.append(Group(group_id, task, [copy]))
        return groups
