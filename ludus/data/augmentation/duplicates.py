"""Duplicates among questions: equal, equal but for case and punctuation, and alike by n-grams."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

from ludus.judges.proposals.parse import visible

ORDER = 3
_TOKEN = re.compile(r"\w+|[^\w\s]")

Gram = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Nearest:
    """The most similar known question; `reason`: why it makes a new one a duplicate, or None."""

    id: str | None
    similarity: float
    reason: str | None


class Questions:
    """Known questions, by their word n-grams.

    The similarity of two questions is the Jaccard index of their sets of word 3-grams (the words
    and punctuation marks as they look, without case; a question of fewer words is one n-gram). A
    question is a near duplicate where that is `max_similarity` or more.
    """

    def __init__(self, max_similarity: float) -> None:
        self._max_similarity = max_similarity
        self._exact: dict[str, str] = {}
        self._plain: dict[str, str] = {}
        self._places: dict[str, tuple[int, int]] = {}  # place in order, number of n-grams
        self._holders: dict[Gram, list[str]] = defaultdict(list)

    def nearest(self, question: str) -> Nearest:
        """The known question that is most like this one; of equals, the first."""
        if (id := self._exact.get(question)) is not None:
            return Nearest(id, 1.0, "equal to an earlier question")
        plain = _plain(question)
        if plain and (id := self._plain.get(plain)) is not None:
            return Nearest(id, 1.0, "equal but for case, spaces and punctuation")
        grams = _grams(question)
        shared = Counter(holder for gram in grams for holder in self._holders.get(gram, ()))
        ranked = [
            (count / (len(grams) + size - count), -place, id)
            for id, count in shared.items()
            for place, size in [self._places[id]]
        ]
        similarity, _, best = max(ranked, default=(0.0, 0, None))
        near = "a near duplicate" if similarity >= self._max_similarity else None
        return Nearest(best, similarity, near)

    def add(self, id: str, question: str) -> None:
        self._exact.setdefault(question, id)
        self._plain.setdefault(_plain(question), id)
        grams = _grams(question)
        self._places[id] = len(self._places), len(grams)
        for gram in grams:
            self._holders[gram].append(id)


def _plain(question: str) -> str:
    """The words alone, without case; empty where there are none."""
    return " ".join(re.findall(r"\w+", visible(question).casefold()))


def _grams(question: str) -> set[Gram]:
    tokens = _TOKEN.findall(visible(question).casefold())
    if len(tokens) <= ORDER:
        return {tuple(tokens)}
    return {tuple(tokens[i : i + ORDER]) for i in range(len(tokens) - ORDER + 1)}
