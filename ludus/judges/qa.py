"""Question answering: exact match and token F1, as SQuAD and Natural Questions are evaluated."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Annotated, Literal

from pydantic import Field

from ludus.config.sections import Markers
from ludus.core.types import Score, Task, Trajectory
from ludus.judges.answer import Extract, extract_answer
from ludus.judges.base import accepted_answers, final_answer, last_tagged

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


class QAJudge:
    r"""Scores the final answer by exact match, or by the F1 of its words.

    Both are those of SQuAD's evaluation script (Rajpurkar et al. 2016, arXiv 1606.05250), as used
    for open Natural Questions (Lee et al. 2019, arXiv 1906.00300): lower case, without punctuation,
    articles and extra spaces; the best over the accepted answers.

        precision = common / words of the answer      recall = common / words of the accepted answer
        F1 = 2 * precision * recall / (precision + recall)

    Words are counted as often as they occur. The final answer is the text in the last
    `<answer>...</answer>`, else the part that `extract` selects.

    Parts: `exact_match`, `f1`, and `found` (the message has an answer). The value is the part
    `metric`.

    Errors: Unscorable if the task has no answer, or the assistant wrote nothing.
    """

    def __init__(
        self,
        metric: Annotated[
            Literal["exact_match", "f1"], Field(description="Part that is the score.")
        ] = "exact_match",
        extract: Annotated[
            Extract, Field(description="Part of the last message to take as the answer.")
        ] = "auto",
        markers: Annotated[
            Markers,
            Field(description="Start and end of an answer, as `rollout.markers.answer`."),
        ] = ("<answer>", "</answer>"),
    ) -> None:
        self.metric, self.extract, self.markers = metric, extract, markers

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        accepted = accepted_answers(task)
        text = final_answer(trajectory).content
        given = last_tagged(text, self.markers) or extract_answer(text, self.extract)
        words = None if given is None else normalised_words(given)
        parts = {
            "exact_match": max(float(words == normalised_words(a)) for a in accepted),
            "f1": 0.0 if words is None else _best_f1(words, accepted),
            "found": float(words is not None),
        }
        expected = " or ".join(repr(answer[:200]) for answer in accepted[:8])
        told = "no answer found" if given is None else repr(given[:200])
        return Score(
            value=parts[self.metric],
            parts=parts,
            explanation=f"{told}, expected {expected}: F1 {parts['f1']:.3g}",
        )


def normalised_words(text: str) -> list[str]:
    """The words in lower case, without punctuation and English articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def f1(words: list[str], accepted: list[str]) -> float:
    """The F1 of two lists of words; 1 for two empty ones, as in SQuAD 2.0."""
    return _f1(Counter(words), len(words), accepted)


def _best_f1(words: list[str], accepted: list[str]) -> float:
    counts = Counter(words)  # once: there may be many
    return max(_f1(counts, len(words), normalised_words(answer)) for answer in accepted)


def _f1(counts: Counter[str], total: int, accepted: list[str]) -> float:
    if not counts or not accepted:
        return float(not counts and not accepted)
    common = sum(min(counts[word], number) for word, number in Counter(accepted).items())
    return 2 * common / (total + len(accepted))
