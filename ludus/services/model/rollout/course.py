"""Course of a roll-out: its state at a bounded number of moments, for curves.

Points are taken every `stride` events. When there are MAX_POINTS, each second one is dropped and
the stride doubles, so a log of any length has from half of MAX_POINTS to all. Counts of a point are
those since the start: rates between two points follow, whichever points were dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ludus.services.model.rollout.controller import Controller
from ludus.services.model.rollout.events import Decision, Ended, Scored, Variant

MAX_POINTS = 240

RATIO = 1.05
"""Of the bounds of a bin of seconds: medians are exact to 2.5 %."""

LEAST_S, NUM_BINS = 1e-4, 430
"""Seconds of the first bin; the last begins at 1e5 s."""

MAX_DECISIONS = 1000
"""Decisions kept; the first half and the newest."""

Counts = dict[int, int]


@dataclass(frozen=True, slots=True)
class Point:
    """The state after an event. By variant: champion, challenger."""

    t: float
    num_events: int
    share: float
    requests: tuple[int, int]
    failed: tuple[int, int]
    scores: tuple[int, int]
    sum_scores: tuple[float, float]
    estimates: dict[str, float | None]
    intervals: dict[str, tuple[float, float]]
    evidence: dict[str, float]
    """Of each test: the largest capital so far."""
    seconds: tuple[Counts, Counts]
    """Answers by bin of their seconds."""


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision, and how much had happened until then."""

    decision: Decision
    num_requests: int
    num_scored: int


class Course:
    """The points and decisions of a roll-out."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.decisions: list[Decided] = []
        self._stride = 1
        self._num_events = 0
        self._seconds: tuple[Counts, Counts] = ({}, {})

    def decided(self, controller: Controller, decisions: Iterable[Decision]) -> None:
        """Count decisions, in their order."""
        tallies = controller.tallies.values()
        requests = sum(tally.num_requests for tally in tallies)
        scored = sum(tally.num_scored_units for tally in tallies)
        for decision in decisions:
            self.decisions.append(Decided(decision, requests, scored))
            if len(self.decisions) > MAX_DECISIONS:
                del self.decisions[MAX_DECISIONS // 2]

    def count(self, controller: Controller, event: Ended | Scored) -> None:
        """Count an event that the controller has counted."""
        self._num_events += 1
        if isinstance(event, Ended) and event.end == "ok":
            counts = self._seconds[event.variant is Variant.CHALLENGER]
            number = _bin_of(event.seconds)
            counts[number] = counts.get(number, 0) + 1
        if self._num_events % self._stride == 0:
            self.points.append(self.point(controller))
        if len(self.points) >= MAX_POINTS:
            self._stride *= 2
            self.points = self.points[1::2]

    def point(self, controller: Controller) -> Point:
        """The state now."""
        tallies = [controller.tallies[variant] for variant in Variant]
        a, b = tallies
        return Point(
            controller.now,
            self._num_events,
            controller.share,
            (a.num_requests, b.num_requests),
            (a.num_failed, b.num_failed),
            (a.num_scores, b.num_scores),
            (a.sum_scores, b.sum_scores),
            controller.estimates(),
            controller.intervals(),
            {name: test.best for name, test in controller.tests.items()},
            (dict(self._seconds[0]), dict(self._seconds[1])),
        )


def _bin_of(seconds: float) -> int:
    if seconds <= LEAST_S:
        return 0
    return min(NUM_BINS, int(math.log(seconds / LEAST_S) / math.log(RATIO)))


def rates(before: Point | None, after: Point, which: int) -> dict[str, float | None]:
    """Of a variant between two points: share of failures, mean score, median seconds."""

    def more(name: str) -> float:
        value = getattr(after, name)[which]
        return float(value - (getattr(before, name)[which] if before else 0))

    requests, scores = more("requests"), more("scores")
    old = before.seconds[which] if before else {}
    counts = {number: num - old.get(number, 0) for number, num in after.seconds[which].items()}
    return {
        "failed": more("failed") / requests if requests else None,
        "score": more("sum_scores") / scores if scores else None,
        "seconds": median_of(counts),
    }


def median_of(counts: Counts) -> float | None:
    """The median of seconds that are counted in bins."""
    half = sum(counts.values()) / 2
    for number in sorted(counts):
        half -= counts[number]
        if half <= 0 and counts[number]:
            return float(LEAST_S * RATIO ** (number + 0.5))
    return None
