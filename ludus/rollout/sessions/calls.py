"""The calls of an agent, placed in its trajectory's token tree.

An agent sends its whole conversation with each call. A call that extends an earlier one appends to
the ids that the engine has read and sampled; any other call branches off, or begins a new root:

    call 1   system, question                         root P0, sampled A0
    call 2   system, question, A0, result             P0 A0 E0, sampled A1
    call 3   system, summary of all of this           root P1, sampled A2
    call 4   system, question, A0, another result     branches off A0: P0 A0 E1, sampled A3

A message of the agent is compared with the message that was returned to it. Where they differ, the
agent has edited its history: what it wrote is context without a loss. Text is never matched with
sampled ids, so no token trains in a context in which it was not sampled.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ludus.core.types import Constraint, Message, Segment, Trajectory
from ludus.models.samplers.base import Completion

if TYPE_CHECKING:
    from ludus.models.chat.renderer import Renderer

ROOT = -1

Key = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a call: `head` is the segment after which its turn is sampled.

    `depth` is the number of sampled turns on the path, `sibling` the number of turns that were
    sampled from the same place, `first` tells that the path begins with the trajectory's first
    root: these are what a turn's seed derives from.
    """

    head: int
    prompt_ids: list[int]
    depth: int
    sibling: int
    first: bool


@dataclass(slots=True)
class _Context:
    """Messages that an agent sent after a turn, or at a root, and the turns sampled after them."""

    head: int
    turns: list[int] = field(default_factory=list)
    num_begun: int = 0


class CallTree:
    """Grows a trajectory's tree, a branch wherever a call does not extend an earlier one."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        self._contexts: dict[Key, _Context] = {}
        self._context_at: dict[int, _Context] = {}
        self._stripped: dict[int, int] = {}
        self._messages: dict[int, Message] = {}
        self._whole: dict[int, str] = {}
        self._children: dict[int, list[int]] = {}
        self._tools: dict[Renderer, str] = {}

    def place(self, messages: Sequence[Message], renderer: Renderer) -> Place:
        """Find or make the place of a call with these messages."""
        turn, rest = self._match(messages, renderer)
        key = self._key(turn, rest, renderer)
        context = self._contexts.get(key)
        if context is None:
            context = self._contexts[key] = self._context_after(turn, rest, renderer)
        return self._begin(context)

    def count(self, messages: Sequence[Message], renderer: Renderer) -> int:
        """The length of the prompt of a call with these messages; the tree does not change."""
        turn, rest = self._match(messages, renderer)
        if turn == ROOT:
            return len(renderer.open(rest))
        segment = self.trajectory.segments[turn]
        ids = self._seen_ids(segment, renderer)
        before = len(self.trajectory.token_ids(segment.parent))
        return before + len(ids) + len(renderer.extend(rest, ids))

    def place_ids(self, ids: Sequence[int]) -> Place:
        """Find or make the place of a call with a prompt of token ids."""
        given = list(ids)
        turn = self._longest_turn(given)
        read = given[len(self.trajectory.token_ids(turn)) :] if turn != ROOT else given
        key: Key = (turn, "ids", *read)
        context = self._contexts.get(key)
        if context is None:
            head = self._append(Segment(turn, read)) if read else turn
            context = self._contexts[key] = self._context_at.setdefault(head, _Context(head))
        return self._begin(context)

    def add_turn(
        self,
        place: Place,
        message: Message,
        completion: Completion,
        *,
        trained: bool,
        whole: str | None = None,
        ours: bool = True,
        constraint: Constraint | None = None,
    ) -> Message:
        """Append a sampled turn. Returns its message, with ids for its tool calls.

        A turn that is not `trained` is recorded without log-probabilities: it has no loss. `whole`
        is the sampled content, where a stop string ends the message before it. The versions are
        those of the policy that trains: a turn of another one, not `ours`, has none.
        """
        index = len(self.trajectory.segments)
        calls = [
            call.model_copy(update={"id": f"call_{index}_{number}"})
            for number, call in enumerate(message.tool_calls)
        ]
        message = message.model_copy(update={"tool_calls": calls})
        self._append(
            Segment(
                place.head,
                completion.token_ids,
                completion.logprobs if trained else None,
                message,
                completion.policy_version if ours else None,
                version_runs=completion.version_runs if ours else None,
                constraint=constraint if trained else None,
            )
        )
        self._messages[index] = message
        self._whole[index] = message.content if whole is None else whole
        self._context_at[place.head].turns.append(index)
        return message

    def turns_on(self, head: int) -> list[int]:
        """The sampled turns on the path to a segment; a turn stands for its copy too."""
        copies = {copy: turn for turn, copy in self._stripped.items()}
        path = [copies.get(index, index) for index in self.trajectory.path(head)]
        return [index for index in path if index in self._messages]

    def _begin(self, context: _Context) -> Place:
        path = self.trajectory.path(context.head)
        depth = len(self.turns_on(context.head))
        sibling, context.num_begun = context.num_begun, context.num_begun + 1
        ids = self.trajectory.token_ids(context.head)
        return Place(context.head, ids, depth, sibling, path[0] == 0)

    def _match(
        self, messages: Sequence[Message], renderer: Renderer
    ) -> tuple[int, Sequence[Message]]:
        """The last sampled turn that the messages extend, and the messages after it."""
        turn, start = ROOT, 0
        for number, message in enumerate(messages):
            if message.role != "assistant":
                continue
            context = self._contexts.get(self._key(turn, messages[start:number], renderer))
            same = None if context is None else self._turn_of(context, message)
            if same is None:
                break
            turn, start = same, number + 1
        return turn, messages[start:]

    def _turn_of(self, context: _Context, message: Message) -> int | None:
        """The newest turn of a context whose message is the agent's.

        Some agents put back the stop string that ended the turn, which was sampled too.
        """
        for index in reversed(context.turns):
            returned = self._messages[index]
            for content in (returned.content, self._whole[index]):
                if same(returned.model_copy(update={"content": content}), message):
                    return index
        return None

    def _context_after(
        self, turn: int, messages: Sequence[Message], renderer: Renderer
    ) -> _Context:
        if turn == ROOT:
            ids = renderer.open(messages)
            found = self._longest_turn(ids)
            if found != ROOT:  # the rendered text has the very ids that were sampled
                turn, ids = found, ids[len(self.trajectory.token_ids(found)) :]
                messages = messages[-1:]
        else:
            turn, after = self._visible(turn, renderer)
            ids = renderer.extend(messages, after)
        head = turn
        for message in messages[:-1]:
            head = self._append(Segment(head, [], message=message))
        last = messages[-1] if messages else None
        head = self._append(Segment(head, ids, message=last))
        context = self._context_at[head] = _Context(head)
        return context

    def _visible(self, turn: int, renderer: Renderer) -> tuple[int, list[int]]:
        """The turn as later turns see it, and its ids: under `strip`, a branch without thinking."""
        segment = self.trajectory.segments[turn]
        ids = self._seen_ids(segment, renderer)
        if ids is segment.token_ids or segment.message is None:
            return turn, ids
        if turn not in self._stripped:
            bare = segment.message.model_copy(update={"thinking": None})
            self._stripped[turn] = self._append(Segment(segment.parent, ids, message=bare))
        return self._stripped[turn], ids

    @staticmethod
    def _seen_ids(segment: Segment, renderer: Renderer) -> list[int]:
        """The ids of a sampled turn that later turns see."""
        message = segment.message
        if renderer.thinking != "strip" or message is None or not message.thinking:
            return segment.token_ids
        return renderer.strip_thinking(segment.token_ids)

    def _longest_turn(self, ids: list[int]) -> int:
        """The sampled turn with the longest path whose ids are a proper prefix of `ids`."""
        best, length = ROOT, 0
        agreeing = [(ROOT, 0)]
        for parent, start in agreeing:  # it grows
            for index in self._children.get(parent, ()):
                own = self.trajectory.segments[index].token_ids
                end = start + len(own)
                if end >= len(ids) or (own and ids[end - 1] != own[-1]):
                    continue
                if ids[start:end] != own:
                    continue
                agreeing.append((index, end))
                if index in self._messages and end > length:
                    best, length = index, end
        return best

    def _append(self, segment: Segment) -> int:
        self.trajectory.segments.append(segment)
        index = len(self.trajectory.segments) - 1
        self._children.setdefault(segment.parent, []).append(index)
        return index

    def _key(self, turn: int, messages: Sequence[Message], renderer: Renderer) -> Key:
        """A key of the messages after a turn; at a root, the tools belong to it."""
        tools = self._tools_of(renderer) if turn == ROOT else None
        return turn, tools, *map(_key_of, messages)

    def _tools_of(self, renderer: Renderer) -> str:
        if renderer not in self._tools:
            self._tools[renderer] = json.dumps([tool.model_dump() for tool in renderer.tools])
        return self._tools[renderer]


def same(returned: Message, given: Message) -> bool:
    """Returns whether an agent's assistant message is the one that was returned to it.

    Agents may leave out the thinking, the ids of calls and the space around the text, and write the
    arguments' JSON anew.
    """
    if returned.content.strip() != given.content.strip() or len(returned.tool_calls) != len(
        given.tool_calls
    ):
        return False
    return all(
        (a.name, a.arguments) == (b.name, b.arguments) and b.id in (None, a.id)
        for a, b in zip(returned.tool_calls, given.tool_calls, strict=True)
    )


def _key_of(message: Message) -> Key:
    """All fields of a message; the arguments of calls as JSON."""
    calls = [(call.name, call.id, json.dumps(call.arguments)) for call in message.tool_calls]
    fields = message.role, message.content, message.thinking, message.tool_call_id, message.name
    return *fields, *calls
