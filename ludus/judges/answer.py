"""The final answer against the task's: numbers by value, everything else by normalised text."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import Field

from ludus.core.errors import Unscorable
from ludus.core.types import Score, Task, Trajectory
from ludus.judges.base import final_answer

Extract = Literal["auto", "boxed", "answer", "number", "whole"]

# Bounded repetitions: the text is a model's, and neither time nor memory may be in its hands.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,20}|[0-9]{1,64})"
_NUMBER = rf"[-+]?(?:{_DIGITS}(?:\.[0-9]{{1,64}})?|\.[0-9]{{1,64}})(?:[eE][-+]?[0-9]{{1,2}})?"
_VALUE = re.compile(rf"({_NUMBER})(?:\s?/\s?({_NUMBER}))?")
_IN_TEXT = re.compile(rf"(?<![\w.]){_NUMBER}(?:/{_NUMBER})?")
_MARKED = re.compile(r"(?:answer\s{0,4}(?::|is\b:?)|####)[ \t*]{0,8}([^\n]+)", re.IGNORECASE)
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]{1,64})\}\{([^{}]{1,64})\}")
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf)\{([^{}]{0,400})\}")


class AnswerJudge:
    r"""Scores 1 where the final answer equals the task's answer, else 0.

    A task's `answer` is a text, a number, or a list of which any may be given. `extract` says
    where the final answer stands in the last message: in the last `\boxed{...}`, after the last
    `Answer:` (or `answer is`, `####`), as the last number, or as the whole text. `auto` tries
    these in turn, the number only where the task's answer is one.

    Two integers must be equal; other numbers may differ by `tolerance`, relative to the larger.
    Parts: `correct`, and `found`, whether the text had an answer of the form asked for.

    Errors: Unscorable where the task has no answer, or the assistant wrote nothing.
    """

    def __init__(
        self,
        extract: Annotated[Extract, Field(description="Where the answer stands.")] = "auto",
        tolerance: Annotated[
            float, Field(ge=0, lt=1, description="Relative difference that numbers may have.")
        ] = 1e-6,
    ) -> None:
        self.extract: Extract = extract
        self.tolerance = tolerance

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        accepted = _accepted(task)
        text = final_answer(trajectory).content
        numeric = all(parse_number(answer) is not None for answer in accepted)
        given = extract_answer(text, self.extract, numeric=numeric)
        correct = given is not None and any(self._equal(given, answer) for answer in accepted)
        wanted = " or ".join(repr(answer) for answer in accepted)
        shown = "no answer found" if given is None else f"{given[:200]!r}"
        return Score(
            value=float(correct),
            parts={"correct": float(correct), "found": float(given is not None)},
            explanation=f"{shown}, {'equal to' if correct else 'expected'} {wanted}",
        )

    def _equal(self, given: str, answer: str) -> bool:
        a, b = parse_number(given), parse_number(answer)
        if a is None or b is None:
            return normalise(given) == normalise(answer)
        if a.denominator == b.denominator == 1:
            return a == b
        return abs(a - b) <= Fraction(self.tolerance) * max(abs(a), abs(b))


def extract_answer(text: str, extract: Extract = "auto", *, numeric: bool = False) -> str | None:
    """The answer in a text, or None where it has none of that form."""
    marked = _MARKED.findall(text)
    numbers = _IN_TEXT.findall(text.replace("−", "-")) if numeric or extract == "number" else []
    found: dict[Extract, str | None] = {
        "boxed": _last_boxed(text),
        "answer": marked[-1].strip() if marked else None,
        "number": numbers[-1] if numbers else None,
        "whole": text.strip() or None,
    }
    if extract != "auto":
        return found[extract]
    return found["boxed"] or found["answer"] or found["number" if numeric else "whole"]


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
    """The text without what does not change an answer: case, spacing, mark-up, final stop."""
    text = unicodedata.normalize("NFKC", text).replace("−", "-")
    text = _TEXT.sub(r"\1", _FRACTION.sub(r"\1/\2", text))
    text = " ".join(text.replace("\\$", "$").casefold().split())
    return text.strip("*`\"'").removesuffix(".").strip("*`\"' ").removesuffix(".").strip()


def _accepted(task: Task) -> list[str]:
    answers: list[Any] = task.answer if isinstance(task.answer, list) else [task.answer]
    texts = [str(answer) for answer in answers if isinstance(answer, str | int | float)]
    if not texts or len(texts) < len(answers) or not all(text.strip() for text in texts):
        what = "no answer" if task.answer is None else f"the answer {task.answer!r:.80}"
        raise Unscorable(f"task {task.id} has {what}; a text, a number or a list of them is needed")
    return texts


def _last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}`, inner braces included."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, first = 1, start + len("\\boxed{")
    for index in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[first:index].strip() or None
    return None
