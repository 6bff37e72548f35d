"""Reads the problem that a curriculum agent proposes."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from ludus.judges.base import last_boxed

QUESTION_MARKERS = ("<question>", "</question>")
MAX_QUESTION = 8_000
"""Limit of a question's length, in characters."""

MAX_ANSWER = 1_000
"""Limit of an answer's length, in characters."""

_HIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and halves of surrogate pairs: no text."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A problem, and the answer that its author claims."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A text that is no proposal."""

    reason: str


def parse_proposal(text: str, markers: tuple[str, str] = QUESTION_MARKERS) -> Proposal | Refused:
    r"""Read `<question>...</question>`, followed by `\boxed{answer}`.

    The last question counts, and the last box after it, whole and with its inner braces: earlier
    ones are drafts. Drafts have to be closed: markers that are unbalanced or nested are refused.

        "<question> 3 + 4 </question> \boxed{ 7 }"          Proposal("3 + 4", "7")
        "<question>f?</question> so \boxed{\frac{1}{2}}"    Proposal("f?", "\frac{1}{2}")
        "\boxed{7} <question>3 + 4</question>"              Refused
    """
    opening, closing = markers
    end = text.rfind(closing)
    start = text.rfind(opening, 0, max(end, 0))
    if min(start, end) < 0:
        return Refused(f"no {opening}...{closing}")
    question = text[start + len(opening) : end].strip()
    if text.count(opening) != text.count(closing) or closing in question:
        return Refused(f"{opening} and {closing} are unbalanced or nested")
    if fault := _fault("question", question, MAX_QUESTION):
        return Refused(fault)
    answer = last_boxed(text[end + len(closing) :])
    if answer is None:
        return Refused(f"no closed \\boxed{{...}} with an answer after {closing}")
    fault = _fault("answer", answer, MAX_ANSWER)
    return Refused(fault) if fault else Proposal(question, answer)


def _fault(noun: str, text: str, limit: int) -> str | None:
    """The fault of a question or an answer; None: none."""
    if len(text) > limit:
        return f"the {noun} has {len(text):,} characters, more than {limit:,}"
    if len(shown := visible(text)) > limit:  # a character may stand for eighteen
        return f"the {noun} has {len(shown):,} characters as it looks, more than {limit:,}"
    if not shown or (noun == "question" and not any(c.isalnum() for c in shown)):
        return f"the {noun} has no letter and no digit"
    if found := _HIDDEN.search(text):
        return f"the {noun} has the control character U+{ord(found[0]):04X}"
    return None


def visible(text: str) -> str:
    """The text as it looks: compatible forms unified (NFKC), invisible characters removed, and
    spaces single."""
    shown = (c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")
    return " ".join("".join(shown).split())
