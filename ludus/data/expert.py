"""The scripted expert of an environment: one episode, as the policy would have to write it."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from ludus.config.schema import MarkersConfig
from ludus.core.errors import EnvError, counted
from ludus.core.types import Message, Task, ToolCall, Wire
from ludus.envs.base import Env, awaited, expert_action, expert_steps, limits_of
from ludus.rollout.hosts.host import check_opening, check_result, check_total
from ludus.rollout.tool_use import argument_of
from ludus.tools.toolbox import Toolbox

Format = Literal["plain", "react", "tools", "code"]


class Demonstration(Wire):
    """An episode of the expert: the environment's messages and the expert's turns.

    `mistakes` are the numbers of the turns, from 0, that are wrong on purpose.
    """

    task_id: str
    tier: str | None
    messages: list[Message]
    reward: float
    success: bool
    num_turns: int
    mistakes: list[int] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CodeBlocks:
    """The format `code`: its markers, and the tools, one of which runs the code.

    Without `runs`, the expert answers at once.
    """

    markers: MarkersConfig
    toolbox: Toolbox
    runs: bool = True

    async def played(self, code: str, episode: str) -> list[Message]:
        """The expert's block of code, and its result. Errors: ToolError; EnvError where it fails.

        Each block is an episode of its own for the tool.
        """
        (opening, closing), name = self.markers.code, self.markers.tool
        call = ToolCall(name=name, arguments={argument_of(name, self.toolbox.specs): code})
        (result,) = await self.toolbox.call([call], episode)
        await self.toolbox.end(episode)
        if result.failed:
            raise EnvError(f"the expert's code failed: {result.content:.400}")
        return [
            Message(role="assistant", content=f"{opening}{code}{closing}"),
            Message(role="tool", content=result.content, name=name),
        ]

    def answer(self, action: Message) -> Message:
        """The action as an answer block."""
        opening, closing = self.markers.answer
        bare = action.content.removeprefix(opening).removesuffix(closing)
        return Message(role="assistant", content=f"{opening}{bare}{closing}")


async def run_expert(
    env: Env,
    task: Task,
    format: Format = "plain",
    mistakes: float = 0.0,
    blocks: CodeBlocks | None = None,
    max_turns: int | None = None,
) -> Demonstration:
    """Run one episode of the environment's expert.

    Before each of its turns, a wrong action is played with the probability `mistakes`. The format
    `code` needs `blocks`: the expert's code runs before its action.

    Errors: NoExpert, EnvError for an episode that does not end in `max_turns`, and errors of the
    env.
    """
    rng = random.Random(f"mistakes/{task.id}")
    wrong: list[int] = []
    try:
        messages = list(check_opening(await awaited("reset", env.reset(task))).messages)
        reward, num_turns, success = 0.0, 0, None
        while True:
            if blocks is not None and blocks.runs:
                for code in _codes(env):
                    messages += await blocks.played(code, task.id)
                    num_turns += 1
            steps = expert_steps(env) if format == "plain" else ""
            action = _to_message(env, steps + expert_action(env), num_turns, format)
            if rng.random() < mistakes and num_turns - 1 not in wrong:
                text = mistaken(action.content, [m.content for m in messages], rng)
                with suppress(LookupError, ValueError, TypeError):  # no tool call has this text
                    if text != action.content:
                        action = _to_message(env, text, num_turns, format)
                        wrong.append(num_turns)
            result = check_result(await awaited("step", env.step(action)))
            written = blocks.answer(action) if blocks else _as_written(action, format)
            messages += [written, *_replies(action, result.messages)]
            reward += result.reward or 0.0
            num_turns += 1
            if result.done:
                success = result.info.get("success", reward >= limits_of(env)[1])
                break
            if max_turns is not None and num_turns >= max_turns:
                raise EnvError(f"the episode does not end in {counted(max_turns, 'turn')}")
    finally:
        await env.close()
    check_total(reward)
    return Demonstration(
        task_id=task.id,
        tier=task.tier,
        messages=messages,
        reward=reward,
        success=bool(success),
        num_turns=num_turns,
        mistakes=wrong,
    )


def _codes(env: Env) -> Sequence[str]:
    """The blocks of code that the expert runs before its next action."""
    code = env.expert_code()
    return [code] if isinstance(code, str) else code or ()


def mistaken(action: str, texts: Sequence[str], rng: random.Random) -> str:
    """The action with one word changed for another word of the texts, a number for a number."""
    words = re.findall(r"\w+|\W+", action)
    place = rng.choice([i for i, word in enumerate(words) if word[0].isalnum()] or [0])
    numeric = words[place].isdecimal() if words else False
    known = {word for text in texts for word in re.findall(r"\w+", text)}
    others = sorted(w for w in known - {words[place]} if w.isdecimal() == numeric)
    if others:
        words[place] = rng.choice(others)
    return "".join(words)


def _to_message(env: Env, action: str, turn: int, format: Format) -> Message:
    """The message for the environment: the action's text, with its tool call in that format."""
    if format != "tools":
        return Message(role="assistant", content=action)
    call = env.call_of(action).model_copy(update={"id": f"call_{turn}"})
    return Message(role="assistant", content=action, tool_calls=[call])


def _as_written(action: Message, format: Format) -> Message:
    """The expert's turn as a model writes it in this format."""
    if format == "react":
        return Message(role="assistant", content=f"Action: {action.content}")
    return action.model_copy(update={"content": ""}) if action.tool_calls else action


def _replies(action: Message, messages: list[Message]) -> list[Message]:
    """The environment's messages; the first answers the tool call, if any."""
    if not action.tool_calls or not messages:
        return messages
    call = action.tool_calls[0]
    answer = {"role": "tool", "name": call.name, "tool_call_id": call.id}
    return [messages[0].model_copy(update=answer), *messages[1:]]
