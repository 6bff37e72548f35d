"""Code blocks inside a turn: generation stops at a marker, the code runs, generation goes on.

    P0   the question, up to the assistant's turn
    A0   Let me compute. <code> print(6 * 7) </code>                            sampled
    E0   <execution_results> 42 </execution_results>                            appended, no loss
    A1   So it is <answer> 42 </answer>                                         sampled

A0, E0 and A1 are one turn of the conversation, and one session of the sampler: each prompt extends
the ids before it, so the KV cache goes on. Only the text that the model sampled since the last
result is searched for markers, and only for the ends at which generation stops: a result that the
model writes itself is text like any other, with a loss.
"""

from __future__ import annotations

import re

from ludus.config.schema import RolloutConfig
from ludus.core.types import Message, ToolCall, Trajectory
from ludus.models.chat.renderer import Renderer
from ludus.models.samplers.base import Sampler
from ludus.rollout.sessions.session import TokenSession, Turn
from ludus.rollout.tool_use import EpisodeTools
from ludus.telemetry.traces import chat

_FENCE = re.compile(r"\A```[\w+-]*\n(.*?)\n?```\Z", re.DOTALL)


class MarkerSession(TokenSession):
    """A token session whose turns contain code blocks and their results.

    Args:
        tools: run the code.
        argument: the argument of `rollout.markers.tool` that takes it.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        sampler: Sampler,
        renderer: Renderer,
        config: RolloutConfig,
        seed: int,
        tools: EpisodeTools,
        argument: str,
    ) -> None:
        super().__init__(trajectory, sampler, renderer, config, seed)
        self._tools, self._argument, self._markers = tools, argument, config.markers

    async def turn(self) -> Turn:
        """Sample pieces until an answer, the end of the turn, or a limit."""
        markers = self._markers
        stop = (*self._config.stop, markers.code[1], markers.answer[1])
        while True:
            prompt, params = self._request(stop)
            with chat(params=params) as span:
                completion = await self._sampler.sample(prompt, params, session=self.trajectory.id)
                self._record(span, prompt, completion)
            text = self._renderer.text(completion.token_ids)
            message = Message(role="assistant", content=text)
            self._add(completion, message)
            error = self._renderer.parse(completion.token_ids).error
            if completion.finish_reason == "length" or error is not None:
                return Turn(message, error, completion.finish_reason)
            if markers.code[1] not in text:
                return self._answer(text)
            result = await self._run(text)
            if self._tools.spent or self._tools.turn_is_full:
                return Turn(message, result.content, "stop")
            self._tree.add_messages([result], self._renderer.inline(result))
            if self._tools.done:
                return Turn(message, None, "stop")

    async def _run(self, text: str) -> Message:
        """Run the code block at the end of a text. Returns the result, or what is wrong."""
        opening, closing = self._markers.code
        _, found, code = text.partition(closing)[0].rpartition(opening)
        if not found:
            self._tools.malformed()
            error = f"Nothing was run: {closing} without {opening} before it."
            return Message(role="tool", content=error, name=self._markers.tool)
        code = code.strip("\n") if "\n" in code else code.strip()
        if fenced := _FENCE.match(code.strip()):
            code = fenced[1]
        call = ToolCall(name=self._markers.tool, arguments={self._argument: code})
        return (await self._tools.answer([call]))[0]

    def _answer(self, text: str) -> Turn:
        """The turn with its answer, or an error where it has none."""
        opening, closing = self._markers.answer
        _, found, answer = text.partition(closing)[0].rpartition(opening)
        if closing in text and found:
            return Turn(Message(role="assistant", content=answer.strip()), None, "stop")
        error = f"No answer found: end your turn with {opening} answer {closing}."
        return Turn(Message(role="assistant", content=text), error, "stop")
