"""Judges the form of the last message: required markers, a pattern, a thinking block."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from ludus.core.errors import ConfigError
from ludus.core.types import Score, Task, Trajectory
from ludus.judges.base import final_answer
from ludus.judges.workers.pool import TooLong, Workers


class FormatJudge:
    """Scores 1 if the last message has the required form, else 0.

        judge: {name: format, args: {markers: [<answer>, </answer>], thinking: required}}

    `markers`: texts that have to occur exactly once each, in this order. `pattern`: a regular
    expression that has to match the whole message; `.` matches line ends too. `thinking`: a closed
    thinking block has to be there, or must not. The thinking itself is no part of the message.

    The pattern runs in a worker process: one that takes more than 1 s of CPU time on a message (it
    backtracks) does not match.

    Parts: `markers`, `pattern`, `thinking`, as far as required.
    """

    def __init__(
        self,
        markers: Annotated[
            list[Annotated[str, Field(min_length=1)]] | None,
            Field(description="Texts that occur once each, in this order."),
        ] = None,
        pattern: Annotated[
            str | None, Field(description="Regular expression of the whole message.")
        ] = None,
        thinking: Annotated[
            Literal["required", "forbidden"] | None, Field(description="A thinking block.")
        ] = None,
    ) -> None:
        if markers is None and pattern is None and thinking is None:
            raise ConfigError("markers, pattern, thinking: set at least one of them")
        try:
            re.compile(pattern or "")
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"pattern: {pattern!r} is no regular expression: {error}") from error
        self._markers, self._pattern, self._thinking = markers, pattern, thinking
        self._workers = Workers("ludus.judges.workers.format", 2, 1.0, 1024)

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        message = final_answer(trajectory)
        parts: dict[str, float] = {}
        faults: list[str] = []
        if self._markers is not None:
            fault = _marker_fault(message.content, self._markers)
            parts["markers"] = float(fault is None)
            faults += [fault] if fault else []
        if self._pattern is not None:
            matches = await self._matches(message.content)
            parts["pattern"] = float(matches)
            faults += [] if matches else ["the message does not match the pattern"]
        if self._thinking is not None:
            there = bool(message.thinking and message.thinking.strip())
            parts["thinking"] = float(there == (self._thinking == "required"))
            told = "there is a thinking block" if there else "there is no thinking block"
            faults += [] if parts["thinking"] else [told]
        return Score(value=min(parts.values()), parts=parts, explanation="; ".join(faults))

    async def close(self) -> None:
        """End the idle worker processes."""
        await self._workers.close()

    async def _matches(self, text: str) -> bool:
        try:
            result, *_ = await self._workers.ask({"pattern": self._pattern, "text": text})
        except TooLong:
            return False
        return bool(result["matches"])


def _marker_fault(text: str, markers: list[str]) -> str | None:
    """The first marker that is absent, repeated or misplaced, in a sentence; None: all is well."""
    position = 0
    for marker in markers:
        if (count := text.count(marker)) != 1:
            return f"{marker!r} occurs {count} times, not once"
        if (found := text.find(marker)) < position:
            return f"{marker!r} is out of order"
        position = found + len(marker)
    return None
