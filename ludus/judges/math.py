"""Compares mathematical answers with math-verify, in processes that can be killed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ludus.config.sections import Markers
from ludus.core.errors import Unscorable
from ludus.core.modules import require
from ludus.core.types import Score, Task, Trajectory
from ludus.judges.base import (
    CpuSeconds,
    Digits,
    accepted_answers,
    final_answer,
    last_boxed,
    last_tagged,
)
from ludus.judges.workers.math import plain_number
from ludus.judges.workers.pool import TooLong, Workers


class MathJudge:
    r"""Scores 1 if the final answer equals the task's answer mathematically, else 0.

    Uses math-verify (https://github.com/huggingface/Math-Verify): numbers, fractions, roots, sets,
    intervals, tuples, equations, matrices, in LaTeX or plain. A task's `answer` is such a text, a
    number, or a list of accepted answers. The final answer is the last `\boxed{...}` of the last
    message; with `extract: auto` and no box, what stands between its last two `markers`, or else
    what math-verify finds in the last 4,000 characters.

    Numbers agree in `digits` decimal places; one that has only zeros there, in as many significant
    digits. `3e2` is 300.

    Comparisons run in worker processes. An answer that takes longer than `limit_s` of CPU time (a
    tower of powers), or is longer than 10,000 characters, scores 0.

    Parts: `correct`; `found` (the message has an answer); `in_time`.

    Errors: Unscorable if the task has no answer, or one that math-verify cannot read,
    or if a worker dies for another reason.
    """

    def __init__(
        self,
        extract: Annotated[
            Literal["auto", "boxed"], Field(description="Part of the last message to take.")
        ] = "auto",
        digits: Digits = 6,
        limit_s: CpuSeconds = 5.0,
        workers: Annotated[
            int, Field(ge=1, le=256, description="Comparisons at once, each in its process.")
        ] = 2,
        memory_mb: Annotated[
            int, Field(ge=512, le=65_536, description="Memory of a process, in MiB.")
        ] = 2048,
        markers: Annotated[
            Markers,
            Field(description="Start and end of an answer, as `rollout.markers.answer`."),
        ] = ("<answer>", "</answer>"),
    ) -> None:
        require("math_verify", "math", "the judge `math`")
        self._extract, self._digits, self._limit_s = extract, digits, limit_s
        self._markers: tuple[str, str] = markers
        self._workers = Workers("ludus.judges.workers.math", workers, limit_s, memory_mb)

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        golds = [plain_number(text) for text in accepted_answers(task)]
        text = final_answer(trajectory).content
        if self._extract == "auto" and last_boxed(text) is None:
            tagged = last_tagged(text, self._markers)
            text = f"\\boxed{{{tagged}}}" if tagged else text
        request = {"golds": golds, "text": text, "extract": self._extract, "digits": self._digits}
        expected = " or ".join(repr(gold[:200]) for gold in golds)
        limit = f"{self._limit_s:g} s of CPU time"
        try:
            unread, result, *_ = await self._workers.ask(request)
        except TooLong as error:
            if not error.answers:
                raise Unscorable(
                    f"task {task.id}: to read its answer {expected} takes more than {limit}"
                ) from error
            return Score(
                value=0.0,
                parts={"correct": 0.0, "found": 1.0, "in_time": 0.0},
                explanation=f"the comparison takes more than {limit}, expected {expected}",
            )
        if unread["unread"]:
            raise Unscorable(
                f"task {task.id}: math-verify cannot read its answer {unread['unread'][0]!r:.200}: "
                "write numbers, LaTeX, or use the judge `answer`"
            )
        correct, given = float(result["correct"]), result["answer"]
        told = "no answer found" if given is None else repr(given)
        if "fault" in result:
            told = f"an answer of {result['fault']}, more than are compared"
        return Score(
            value=correct,
            parts={"correct": correct, "found": float(given is not None), "in_time": 1.0},
            explanation=f"{told}, {'equal to' if correct else 'expected'} {expected}",
        )

    async def close(self) -> None:
        """End the worker processes."""
        await self._workers.close()
