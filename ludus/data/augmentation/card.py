"""Card of an augmentation: counts of kept and rejected tasks, with the reasons and settings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from ludus.core.types import Wire
from ludus.judges.proposals.select import histogram


@dataclass(slots=True)
class Outcome:
    """The outcome of a request of the model.

    `reason` is the class of the rejection (None: kept), `detail` its particulars; `nearest` the id
    of the most similar earlier question; `solved` the share of counted attempts that were right.
    """

    number: int
    shots: list[str] = field(default_factory=list)
    question: str | None = None
    answer: str | None = None
    reason: str | None = None
    detail: str | None = None
    nearest: str | None = None
    similarity: float | None = None
    attempts: int = 0
    solved: float | None = None

    @property
    def id(self) -> str:
        return f"augmented-{self.number:06d}"

    def reject(self, reason: str, detail: str | None = None) -> None:
        self.reason, self.detail = reason, detail

    def row(self) -> dict[str, Any]:
        """A line of `tasks.jsonl`."""
        return {
            "id": self.id,
            "prompt": self.question,
            "answer": self.answer,
            "seeds": self.shots,
            "similarity": None if self.similarity is None else round(self.similarity, 4),
            **({} if self.solved is None else {"solved": self.solved, "attempts": self.attempts}),
        }

    def rejected_row(self) -> dict[str, Any]:
        """A line of `rejected.jsonl`."""
        fields = {
            "id": self.id,
            "reason": self.reason,
            "detail": self.detail,
            "prompt": self.question,
            "answer": self.answer,
            "nearest": self.nearest,
            "similarity": None if self.similarity is None else round(self.similarity, 4),
            "solved": self.solved,
        }
        return {key: value for key, value in fields.items() if value is not None}


class Card(Wire):
    """Statistics of an augmentation."""

    requests: int
    kept: int
    rejected: dict[str, int]
    characters: dict[str, float] | None
    similarity: dict[str, float] | None
    solved: dict[str, float] | None
    settings: dict[str, Any]


def card_of(outcomes: Sequence[Outcome], settings: dict[str, Any]) -> Card:
    """The card of the outcomes, in order."""
    kept = [outcome for outcome in outcomes if outcome.reason is None]
    reasons = Counter(outcome.reason for outcome in outcomes if outcome.reason is not None)
    return Card(
        requests=len(outcomes),
        kept=len(kept),
        rejected=dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
        characters=_spread([len(outcome.question or "") for outcome in kept]),
        similarity=_spread([o.similarity for o in kept if o.similarity is not None]),
        solved=_spread([o.solved for o in kept if o.solved is not None]),
        settings=settings,
    )


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = {"mean": mean(values), "median": median(values), "max": max(values)}
    return {name: round(value, 4) for name, value in found.items()}


def rendered(card: Card, outcomes: Sequence[Outcome]) -> str:
    """The card as Markdown."""
    rows = [
        ("requests", f"{card.requests}"),
        ("kept", f"{card.kept}"),
        *((f"rejected: {reason}", str(count)) for reason, count in card.rejected.items()),
    ]
    spreads = {
        "characters of a question": card.characters,
        "similarity to the nearest earlier question": card.similarity,
        "share of solved attempts": card.solved,
    }
    for name, spread in spreads.items():
        if spread is not None:
            told = f"mean {spread['mean']:g}, median {spread['median']:g}, at most "
            rows.append((name, f"{told}{spread['max']:g}"))
    lines = [
        "# Data card",
        "",
        "Tasks that a model wrote from seed tasks.",
        "",
        "| | |",
        "|---|---|",
    ]
    lines += [f"| {name} | {value} |" for name, value in rows]
    shares = [outcome.solved for outcome in outcomes if outcome.solved is not None]
    if shares:
        lines += ["", "Share of solved attempts, before the band:", ""]
        lines += [f"    {line}" for line in histogram(shares)]
    settings = json.dumps(card.settings, indent=2, ensure_ascii=False)
    lines += ["", "## Settings", "", "```json", settings, "```"]
    return "\n".join(lines) + "\n"
