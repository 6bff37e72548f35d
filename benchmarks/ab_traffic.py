"""Simulated traffic of an A/B roll-out: sessions, scores, failures, latencies."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ludus.services.model.rollout.controller import Controller
from ludus.services.model.rollout.events import Decision, Ended, RolloutSettings, Scored, Variant
from ludus.services.model.rollout.service import hashed


@dataclass(frozen=True)
class Arm:
    """Requests of a variant. A latency is lognormal with a sigma of 0.5."""

    score: Callable[[random.Random], float] = lambda draw: float(draw.random() < 0.5)
    fail_rate: float = 0.0
    median_s: float = 1.0
    scored: float = 0.5
    delay_s: float = 30.0


@dataclass(frozen=True)
class Traffic:
    """Requests a second, and turns of a session (geometric mean).

    session_spread: a session's scores share a part of their randomness, from 0 to 1.
    """

    rate: float = 1.0
    turns: float = 1.0
    session_spread: float = 0.0


@dataclass
class Outcome:
    """Course of a simulated roll-out."""

    action: str
    reason: str
    num_requests: int
    num_challenged: int
    seconds: float
    decisions: list[Decision] = field(repr=False)


def simulate(
    settings: RolloutSettings,
    champion: Arm,
    challenger: Arm,
    num_requests: int,
    seed: int,
    traffic: Traffic | None = None,
    change: Callable[[int], tuple[Arm, Arm]] | None = None,
    on_event: Callable[[Ended | Scored], object] = lambda event: None,
) -> Outcome:
    """Play requests until the roll-out ends. `change` may replace the arms at a request."""
    traffic, draw = traffic or Traffic(), random.Random(seed)
    controller = Controller(settings)
    decisions = [controller.start(0.0)]
    waiting: list[tuple[float, int, str, float]] = []
    sessions: list[tuple[str, float]] = []
    t, challenged = 0.0, 0

    def apply(event: Ended | Scored) -> None:
        on_event(event)
        decisions.extend(controller.apply(event))

    number = 0
    for number in range(1, num_requests + 1):
        t += draw.expovariate(traffic.rate)
        while waiting and waiting[0][0] <= t:
            at, _, id, score = heapq.heappop(waiting)
            apply(Scored(t=at, id=id, score=score))
        if controller.ended:
            break
        if not sessions or draw.random() < 1 / traffic.turns:
            sessions.append((f"{draw.getrandbits(64):016x}", draw.random()))
            del sessions[:-20]
        key, mood = draw.choice(sessions) if traffic.turns > 1 else sessions[-1]
        unit, place = hashed(str(seed), key)
        variant = Variant.CHALLENGER if place < controller.share else Variant.CHAMPION
        arms = change(number) if change else (champion, challenger)
        arm = arms[variant is Variant.CHALLENGER]
        challenged += variant is Variant.CHALLENGER
        failed = draw.random() < arm.fail_rate
        seconds, id = arm.median_s * draw.lognormvariate(0, 0.5), str(number)
        end = "failed" if failed else "ok"
        apply(Ended(t=t, id=id, variant=variant, unit=unit, end=end, seconds=seconds))
        if not failed and draw.random() < arm.scored:
            same = draw.random() < traffic.session_spread
            score = arm.score(random.Random(mood) if same else draw)
            later = t + draw.expovariate(1 / arm.delay_s)
            heapq.heappush(waiting, (later, number, id, score))
    last = decisions[-1]
    action = last.action if controller.ended else "running"
    return Outcome(action, last.reason, number, challenged, t, decisions)
