"""Growing a trajectory's tree of token segments."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.core.types import Message, Segment, Trajectory
from ludus.models.chat.renderer import Renderer
from ludus.models.samplers.base import Completion


def with_system_prompt(messages: Sequence[Message], system_prompt: str | None) -> list[Message]:
    """A conversation as rollouts open it: the system prompt first, where it is not there yet."""
    system = Message(role="system", content=system_prompt or "")
    return [system, *messages] if system_prompt and system not in messages[:1] else list(messages)


class TreeBuilder:
    """Appends to one trajectory; `head` is the segment that the next one extends.

    P0, A0, E0 in chat form:

        builder.given([system, question], ids)          two segments; the second has all their ids
        builder.sampled(completion, message)            A0
        builder.answered(message, [result], renderer)   E0

    Messages that are rendered in one piece share one run of ids, which the last of them carries;
    the others carry none.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        self.head = -1

    @property
    def prompt_ids(self) -> list[int]:
        """All ids from the root to the head: what the engine sees next."""
        return self.trajectory.token_ids(self.head) if self.head >= 0 else []

    def given(self, messages: Sequence[Message], token_ids: list[int]) -> None:
        """Append ids that nobody sampled: no loss."""
        for message in messages[:-1]:
            self._append(Segment(self.head, [], message=message))
        last = messages[-1] if messages else None
        if last is not None or token_ids:
            self._append(Segment(self.head, token_ids, message=last))

    def sampled(self, completion: Completion, message: Message) -> Segment:
        """Append a turn that the policy sampled."""
        segment = Segment(
            self.head,
            completion.token_ids,
            logprobs=completion.logprobs,
            message=message,
            policy_version=completion.policy_version,
        )
        self._append(segment)
        return segment

    def answered(self, turn: Message, replies: Sequence[Message], renderer: Renderer) -> None:
        """Append what answers the turn sampled last, up to where the next one begins.

        Under `strip` a turn that thought stays in the tree as the leaf of its own branch, and
        trains there; the conversation goes on in another, in which it reads without its thinking.
        """
        after = self.trajectory.segments[self.head].token_ids
        if turn.thinking and renderer.thinking == "strip":
            after = renderer.strip_thinking(after)
            self.head = self.trajectory.segments[self.head].parent
            self.given([turn.model_copy(update={"thinking": None})], after)
        self.given(replies, renderer.extend(replies, after))

    def _append(self, segment: Segment) -> None:
        self.trajectory.segments.append(segment)
        self.head = len(self.trajectory.segments) - 1
