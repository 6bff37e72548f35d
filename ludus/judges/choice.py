"""Multiple choice: the chosen letter against the task's."""

from __future__ import annotations

import re
from string import ascii_uppercase
from typing import Annotated, Any

from pydantic import Field

from ludus.core.errors import Unscorable
from ludus.core.types import Score, Task, Trajectory
from ludus.judges.answer import normalise
from ludus.judges.base import final_answer, last_boxed

TAIL = 10_000
"""Characters at the end of a message in which a choice without a box is looked for."""

_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s?\{([^{}]{0,400})\}")
_MARKED = re.compile(
    r"\b(?:answer|choice|option)(?:\s+is\b:?|\s{0,4}:)[ \t\n*_$(\[]{0,8}(?=([^\n]{1,400}))",
    re.IGNORECASE,
)
_LETTER = re.compile(r"[\s*_$(\[{]{0,8}([A-Z])(?![A-Za-z0-9'’])")
_ANOTHER = re.compile(
    r"[\s*_$)\]}.]{0,8}(?:,|/|&|\bor\b|\band\b)\s{0,4}[\s*_$(\[{]{0,8}[A-Z](?![A-Za-z])"
)
_BRACKETED = re.compile(r"[(\[*]\s?([A-Z])\s?[)\]*]|^\s?([A-Z])\s?[.):]?\s*$", re.MULTILINE)
_ALONE = re.compile(r"\b([B-HJ-Z]|[AI](?!['’]|\s[a-z]))\b")  # not the words `A` and `I`


class ChoiceJudge:
    r"""Scores 1 if the chosen option is the task's, else 0.

    A task's `answer` is a letter, an option's text, or a number from 0; its options are the list
    `data["options"]`, or letters alone. The choice is looked for in this order, the last one of
    each kind: `\boxed{B}`; `the answer is (B)` and `Answer: B`; the letter in brackets, in bold or
    on a line of its own; a capital letter by itself. An option's text counts as its letter in a
    box, after `answer is`, and as the whole message. The order, box apart, is that of MMLU-Pro's
    evaluation (Wang et al. 2024, arXiv 2406.01574; `extract_answer` of `compute_accuracy.py`).
    Unlike there, a revised answer replaces an earlier one, several letters at once (`A or B`) are
    no choice, and no letter is drawn at random where none is found.

    Parts: `correct`, and `found` (the message has a choice).

    Errors: Unscorable if the task's answer is none of its options.
    """

    def __init__(
        self,
        options: Annotated[
            str, Field(description="Key of the task's `data` with the list of options.")
        ] = "options",
    ) -> None:
        self.key = options

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        options = _options(task, self.key)
        expected = _expected(task, options)
        text = final_answer(trajectory).content
        given = chosen(text, options or [""] * 26)
        told = "no choice found" if given is None else given
        return Score(
            value=float(given == expected),
            parts={"correct": float(given == expected), "found": float(given is not None)},
            explanation=told if given == expected else f"{told}, expected {expected}",
        )


def chosen(text: str, options: list[str]) -> str | None:
    """The letter of the option that a text chooses; None: none, or several.

    Args:
        options: their texts; empty texts for options of which the letter alone is known.
    """
    options = [normalise(option) for option in options]  # once: they may be long
    if (box := last_boxed(text)) is not None:
        return _read(_TEXT.sub(r"\1", box), options) or None
    text = text[-TAIL:]
    for marked in reversed(_MARKED.findall(text)):
        if (letter := _read(_TEXT.sub(r"\1", marked), options)) is not None:
            return letter if letter else None
    if letter := _by_text(text, options):
        return letter
    for pattern in (_BRACKETED, _ALONE):
        found = ["".join(match.groups(default="")) for match in pattern.finditer(text)]
        known = [letter for letter in found if letter in ascii_uppercase[: len(options)]]
        if known:
            return known[-1]
    return None


def _read(text: str, options: list[str]) -> str | None:
    """The letter that a short text begins with or that belongs to it; "" for several letters.

    `options` are normalised.
    """
    if letter := _by_text(text, options):
        return letter
    match = _LETTER.match(text)
    if match is None or match[1] not in ascii_uppercase[: len(options)]:
        return None
    return "" if _ANOTHER.match(text, match.end()) else match[1]


def _by_text(text: str, options: list[str]) -> str | None:
    given = normalise(text)
    places = [place for place, option in enumerate(options) if option and option == given]
    return ascii_uppercase[places[0]] if len(places) == 1 else None


def _options(task: Task, key: str) -> list[str]:
    given = task.data.get(key, [])
    if not isinstance(given, list) or len(given) > 26 or len(given) == 1:
        raise Unscorable(f"task {task.id}: data[{key!r}] has to be a list of 2 to 26 options")
    return [str(option) for option in given]


def _expected(task: Task, options: list[str]) -> str:
    answer: Any = task.answer
    if type(answer) is int and 0 <= answer < (len(options) or 26):
        return ascii_uppercase[answer]
    if isinstance(answer, str):
        letters = ascii_uppercase[: len(options) or 26]
        if (letter := answer.strip().strip("().").upper()) in letters and len(letter) == 1:
            return letter
        if found := _by_text(answer, [normalise(option) for option in options]):
            return found
    raise Unscorable(
        f"task {task.id}: the answer {answer!r:.80} is none of its options: give a letter, the "
        "text of one option, or its number from 0"
    )
