"""Roll-out controller: a deterministic state machine from events to decisions.

    start -> increase ... -> increase -> promote
                 |              |
                 +--------------+------> roll_back      hold <-> resume at any share

It reads no clock, file or random number, so the same events give the same decisions: `replay` of
the log proves it. The rules, in this order, after each event:

1. hold      both variants fail (HOLD_RATE of a window's requests of each): the fault is probably
             shared, so the share stays and nothing is decided until one of them recovers
2. roll_back the challenger alone fails (FAIL_RATE of its requests of a window)
3. roll_back evidence that it fails more often, is slower, or scores worse than is allowed
4. roll_back no answer after `max_samples` scored units
5. promote   at the last share: evidence that it scores better than champion - margin
6. increase  `min_samples` scored units and `step_s` seconds at this share

Each of the four kinds of evidence has a quarter of alpha. A unit is a session (or a request without
a session's key); only the first value of a unit counts in a test, because values of one session are
not independent.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal

from ludus.evaluate.sequential import Blocks, Difference, Evidence, Spread
from ludus.services.model.rollout.events import (
    Action,
    Decision,
    Ended,
    Event,
    RolloutSettings,
    Scored,
    Variant,
)

WINDOW = 20
"""A window ends with so many requests of each variant: both rates are of the same time."""

FAIL_RATE = 0.8
HOLD_RATE = 0.5

MIN_UNITS = 3
"""Units of the failed requests in a window: one session that always fails is no outage."""

MAX_UNSCORED = 100_000
"""Ended requests that can be scored; older ones are forgotten."""

MAX_UNITS = 1_000_000
"""Units whose first value is remembered; older ones are forgotten."""

SWITCHING = 0.0005
"""Of the tests of degradation: see `Evidence`. A challenger may degrade after many good hours."""

NUM_TESTS = 4

Receipt = Literal["counted", "same_session", "repeated", "conflict", "late", "unknown", "ended"]
"""The fate of a score. `counted` and `same_session` (kept, but another score of the session has
counted) change the state; the others do not."""

Phase = Literal["running", "holding", "promoted", "rolled_back"]


@dataclass(slots=True)
class Request:
    """An ended request that can be scored."""

    variant: Variant
    unit: str
    ended_at: float
    score: float | None = None


@dataclass(slots=True)
class Tally:
    """Counts of one variant."""

    num_requests: int = 0
    num_failed: int = 0
    num_gone: int = 0
    num_scores: int = 0
    num_scored_units: int = 0
    sum_scores: float = 0.0


@dataclass(slots=True)
class Window:
    """Requests of one variant since the last window ended."""

    num: int = 0
    failed: list[str] = field(default_factory=list)
    """Units of the failed requests."""

    def fails(self, rate: float) -> bool:
        return len(self.failed) >= rate * self.num and len(set(self.failed)) >= MIN_UNITS


class Controller:
    """The state of a roll-out. `start` begins it, `apply` continues it."""

    def __init__(self, settings: RolloutSettings) -> None:
        self.settings = settings
        self.phase: Phase = "running"
        self.step = 0
        self.reason = ""
        self.now = 0.0
        self.tallies = {variant: Tally() for variant in Variant}
        limit = settings.max_error_increase
        self.quality = Difference(-settings.margin, -settings.margin, (0.0, SWITCHING))
        self.errors = Difference(floor=limit, switching=(SWITCHING, 0.0))
        self.slower = Evidence(0.5, SWITCHING)
        self.slower_pairs = Spread()
        self._latencies = Blocks()
        self._step_since = 0.0
        self._step_scored = 0
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self._window = {variant: Window() for variant in Variant}
        self._units: dict[str, OrderedDict[str, None]] = {
            kind: OrderedDict() for kind in ("score", "latency", "error")
        }

    @property
    def ended(self) -> bool:
        return self.phase in ("promoted", "rolled_back")

    @property
    def share(self) -> float:
        """The challenger's share of the traffic."""
        if self.ended:
            return 1.0 if self.phase == "promoted" else 0.0
        return self.settings.shares[self.step]

    def start(self, t: float) -> Decision:
        """The first decision."""
        self.now = self._step_since = t
        return self._decide("start", f"step 1 of {len(self.settings.shares)}")

    def receipt(self, event: Scored) -> Receipt:
        """The fate that a score would have; nothing changes."""
        request = self._requests.get(event.id)
        if request is None:
            return "ended" if self.ended else "unknown"
        if request.score is not None:
            return "repeated" if request.score == event.score else "conflict"
        if self.ended:
            return "ended"
        if max(event.t, self.now) - request.ended_at > self.settings.feedback_s:
            return "late"
        return "same_session" if request.unit in self._units["score"] else "counted"

    def variant_of(self, id: str) -> Variant:
        """The variant of an answer that can be, or was, scored. Errors: KeyError."""
        return self._requests[id].variant

    def apply(self, event: Event) -> list[Decision]:
        """Count an event. Returns the decisions that follow from it.

        Nothing follows after the end, from an id that is known already, or from a score that
        `receipt` refuses. A clock that was set back stands still.
        """
        self.now = max(self.now, event.t)
        if self.ended:
            return []
        if isinstance(event, Scored):
            if self.receipt(event) not in ("counted", "same_session"):
                return []
            self._score(event)
        elif event.id in self._requests:
            return []
        else:
            self._end(event)
        return self._decisions()

    # Counting

    def _score(self, event: Scored) -> None:
        request = self._requests[event.id]
        request.score = event.score
        tally = self.tallies[request.variant]
        tally.num_scores += 1
        tally.sum_scores += event.score
        if not self._first("score", request.unit):
            return
        tally.num_scored_units += 1
        is_challenger = request.variant is Variant.CHALLENGER
        self._step_scored += is_challenger
        self.quality.add(is_challenger, event.score, self.share)

    def _end(self, event: Ended) -> None:
        tally = self.tallies[event.variant]
        is_challenger = event.variant is Variant.CHALLENGER
        tally.num_requests += 1
        failed = event.end == "failed"
        if event.end == "gone":
            tally.num_gone += 1
        else:
            tally.num_failed += failed
            window = self._window[event.variant]
            window.num += 1
            if failed:
                window.failed.append(event.unit)
            if self._first("error", event.unit):
                self.errors.add(is_challenger, float(failed), self.share)
        if event.end == "ok" and self._first("latency", event.unit):
            block = self._latencies.add(is_challenger, event.seconds, self.share)
            if block is not None:
                slower = block.exceeds(self.settings.max_latency_ratio)
                self.slower.add(slower)
                self.slower_pairs.add(slower)
        if not failed:
            self._requests[event.id] = Request(event.variant, event.unit, self.now)
            while len(self._requests) > MAX_UNSCORED:
                self._requests.popitem(last=False)

    def _first(self, kind: str, unit: str) -> bool:
        """True if the unit has no value of this kind yet; it has one then."""
        units = self._units[kind]
        if unit in units:
            return False
        units[unit] = None
        while len(units) > MAX_UNITS:
            units.popitem(last=False)
        return True

    # Deciding

    def _decisions(self) -> list[Decision]:
        decisions = []
        failing = ""
        if min(window.num for window in self._window.values()) >= WINDOW:
            champion, challenger = (self._window[variant] for variant in Variant)
            both = champion.fails(HOLD_RATE) and challenger.fails(HOLD_RATE)
            if both != (self.phase == "holding"):
                self.phase = "holding" if both else "running"
                self.errors.break_off()  # pairs nothing of an outage with what came after it
                action: Action = "hold" if both else "resume"
                told = "both variants fail" if both else "at least one variant answers again"
                decisions.append(self._decide(action, told))
            if challenger.fails(FAIL_RATE) and not champion.fails(HOLD_RATE):
                failing = f"{len(challenger.failed)} of {challenger.num} requests failed"
            self._window = {variant: Window() for variant in Variant}
        if self.phase == "holding":
            return decisions
        return decisions + self._next(failing)

    def _next(self, failing: str) -> list[Decision]:
        """The decision about the share, if there is one. `failing`: the challenger alone fails."""
        scored = self.tallies[Variant.CHALLENGER].num_scored_units
        if reason := self._degradation(failing):
            self.phase = "rolled_back"
            return [self._decide("roll_back", reason)]
        if self._may_promote():
            self.phase = "promoted"
            return [self._decide("promote", f"quality: {self._difference('above')}")]
        if scored >= self.settings.max_samples:
            self.phase = "rolled_back"
            return [self._decide("roll_back", f"no answer after {scored} scored sessions")]
        if self._step_is_over() and self.step + 1 < len(self.settings.shares):
            self.step += 1
            self._step_since, self._step_scored = self.now, 0
            told = f"step {self.step + 1} of {len(self.settings.shares)}: no degradation shown"
            return [self._decide("increase", told)]
        return []

    def _degradation(self, failing: str) -> str:
        """The reason to remove the challenger; empty if nothing is shown."""
        alpha = self.settings.alpha / NUM_TESTS
        if failing:
            return f"errors: {failing}"
        if self.errors.above.rejects(alpha):
            limit, found = self.settings.max_error_increase, self.errors.estimate or 0.0
            return (
                f"errors: difference of failed requests {found:+z.3f}, shown to be above {limit:g}"
            )
        if self.slower.rejects(alpha):
            ratio = self.settings.max_latency_ratio
            return f"latency: above {ratio:g} times the champion's in most pairs of requests"
        if self.quality.below.rejects(alpha):
            return f"quality: {self._difference('below')}"
        return ""

    def _difference(self, side: str) -> str:
        limit = 0.0 - self.settings.margin  # not -0
        told = f"difference of scores {self.quality.estimate or 0.0:+z.3f}"
        return f"{told}, shown to be {side} {limit:g}"

    def _may_promote(self) -> bool:
        last = self.step + 1 == len(self.settings.shares)
        alpha = self.settings.alpha / NUM_TESTS
        return last and self._step_is_over() and self.quality.above.rejects(alpha)

    def _step_is_over(self) -> bool:
        enough = self._step_scored >= self.settings.min_samples
        return enough and self.step_seconds >= self.settings.step_s

    def _decide(self, action: Action, reason: str) -> Decision:
        self.reason = reason
        return Decision(t=self.now, action=action, share=self.share, reason=reason)

    @property
    def tests(self) -> dict[str, Evidence]:
        """The tests; each has decided once its capital has reached NUM_TESTS / alpha."""
        return {
            "better": self.quality.above,
            "worse": self.quality.below,
            "errors": self.errors.above,
            "latency": self.slower,
        }

    def evidence(self) -> dict[str, float]:
        """The p-value of each test times NUM_TESTS: at alpha or below, the test has decided."""
        return {name: min(1.0, NUM_TESTS * test.p_value) for name, test in self.tests.items()}

    def interval(self) -> tuple[float, float]:
        """The difference at confidence 1 - alpha / 2, a side for each test of quality."""
        return self.quality.interval(2 * self.settings.alpha / NUM_TESTS)

    def intervals(self) -> dict[str, tuple[float, float]]:
        """As `interval`, of each comparison: scores, failed requests, and share of slower pairs."""
        alpha = 2 * self.settings.alpha / NUM_TESTS
        return {
            "quality": self.interval(),
            "errors": self.errors.interval(alpha),
            "latency": self.slower_pairs.interval(alpha),
        }

    def estimates(self) -> dict[str, float | None]:
        """The means that `intervals` are of; None before the first comparison."""
        return {
            "quality": self.quality.estimate,
            "errors": self.errors.estimate,
            "latency": self.slower_pairs.mean,
        }

    @property
    def step_seconds(self) -> float:
        """Since the share was increased last, until the last event."""
        return self.now - self._step_since

    def state(self) -> dict[str, Any]:
        """The state as `GET /rollout` shows it, without the interval."""
        return {
            "phase": self.phase,
            "share": self.share,
            "step": self.step + 1,
            "num_steps": len(self.settings.shares),
            "reason": self.reason,
            "scored_in_step": self._step_scored,
            "difference": self.quality.estimate,
            "p_values": self.evidence(),
            "variants": {
                variant.value: {
                    "requests": tally.num_requests,
                    "failed": tally.num_failed,
                    "gone": tally.num_gone,
                    "scores": tally.num_scores,
                    "scored_sessions": tally.num_scored_units,
                    "mean_score": tally.sum_scores / tally.num_scores if tally.num_scores else None,
                }
                for variant, tally in self.tallies.items()
            },
        }
