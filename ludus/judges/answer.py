"""Compares the final answer with the task's: numbers by value, other answers by normalised text."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from ludus.config.sections import Markers
from ludus.core.types import Score, Task, Trajectory
from ludus.judges.base import accepted_answers, final_answer, last_boxed, last_tagged

Extract = Literal["auto", "boxed", "answer", "number", "whole"]

# Repetitions are bounded, so untrusted model output cannot cost unbounded time or memory.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,20}|[0-9]{1,64})"
_NUMBER = rf"[-+]?(?:{_DIGITS}(?:\.[0-9]{{1,64}})?|\.[0-9]{{1,64}})(?:[eE][-+]?[0-9]{{1,2}})?"
_VALUE = re.compile(rf"({_NUMBER})(?:\s?/\s?({_NUMBER}))?")
_IN_TEXT = re.compile(rf"(?<![\w.]){_NUMBER}(?:/{_NUMBER})?")
_MARKED = re.compile(r"(?:answer\s{0,4}(?::|is\b:?)|####)[ \t*]{0,8}([^\n]+)", re.IGNORECASE)
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]{1,64})\}\{([^{}]{1,64})\}")
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf)\{([^{}]{0,400})\}")


class AnswerJudge:
    r"""Scores 1 if the final answer equals the task's answer, else 0.

    A task's `answer` is a text, a number, or a list of accepted answers. `extract` selects the
    final answer in the last message: the last `\boxed{...}`, the text after the last `Answer:` (or
    `answer is`, `####`), the last number, or the whole text. `auto` tries these in turn; the last
    number only if all accepted answers are numbers.

    If the message has a pair of `markers`, only the text between the last two counts.

    Two integers must be equal; other numbers may differ by `tolerance`, relative to the larger.
    Parts: `correct`, and `found` (the message has an answer in the selected form).

    Errors: Unscorable if the task has no answer, or the assistant wrote nothing.
    """

    def __init__(
        self,
        extract: Annotated[
            Extract, Field(description="Part of the last message to take as the answer.")
        ] = "auto",
        tolerance: Annotated[
            float, Field(ge=0, lt=1, description="Relative tolerance of numbers.")
        ] = 1e-6,
        markers: Annotated[
            Markers,
            Field(description="Start and end of an answer, as `rollout.markers.answer`."),
        ] = ("<answer>", "</answer>"),
    ) -> None:
        self.markers: tuple[str, str] = markers
        self.extract: Extract = extract
        self.tolerance = tolerance

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        accepted = accepted_answers(task)
        text = final_answer(trajectory).content
        text = last_tagged(text, self.markers) or text
        numeric = all(parse_number(answer) is not None for answer in accepted)
        given = extract_answer(text, self.extract, numeric=numeric)
        correct = given is not None and self._equals_one(given, accepted)
        expected = " or ".join(repr(answer) for answer in accepted)
        answer_text = "no answer found" if given is None else f"{given[:200]!r}"
        return Score(
            value=float(correct),
            parts={"correct": float(correct), "found": float(given is not None)},
            explanation=f"{answer_text}, {'equal to' if correct else 'expected'} {expected}",
        )

    def _equals_one(self, given: str, accepted: list[str]) -> bool:
        text, number = normalise(given), parse_number(given)  # once: it may be long
        for answer in accepted:
            other = None if number is None else parse_number(answer)
            if number is None or other is None:
                if text == normalise(answer):
                    return True
            elif self._close(number, other):
                return True
        return False

    def _close(self, a: Fraction, b: Fraction) -> bool:
        if a.denominator == b.denominator == 1:
            return a == b
        return abs(a - b) <= Fraction(self.tolerance) * max(abs(a), abs(b))


def extract_answer(text: str, extract: Extract = "auto", *, numeric: bool = False) -> str | None:
    """Returns the answer in a text, or None if the text has no answer of that form."""
    marked = _MARKED.findall(text)
    numbers = _IN_TEXT.findall(text.replace("−", "-")) if numeric or extract == "number" else []
    candidates: dict[Extract, str | None] = {
        "boxed": last_boxed(text),
        "answer": marked[-1].strip() if marked else None,
        "number": numbers[-1] if numbers else None,
        "whole": text.strip() or None,
    }
    if extract != "auto":
        return candidates[extract]
    last_resort = candidates["number" if numeric else "whole"]
    return candidates["boxed"] or candidates["answer"] or last_resort


def parse_number(text: str) -> Fraction | None:
    """The exact value of `1,234`, `-0.5`, `3/4`, `$12`, `40 %`, `1e-3`; None for other texts."""
    match = _VALUE.fullmatch(normalise(text).lstrip("$").rstrip("%").strip())
    if match is None:
        return None
    value = Fraction(match[1].replace(",", ""))
    if match[2] is None:
        return value
    divisor = Fraction(match[2].replace(",", ""))
    return value / divisor if divisor else None


def normalise(text: str) -> str:
    """Returns the text without case, extra spaces, mark-up and final full stop."""
    text = unicodedata.normalize("NFKC", text).replace("−", "-")
    text = _TEXT.sub(r"\1", _FRACTION.sub(r"\1/\2", text))
    text = " ".join(text.replace("\\$", "$").casefold().split())
    return text.strip("*`\"'").removesuffix(".").strip("*`\"' ").removesuffix(".").strip()
