"""Logs of A/B roll-outs, from simulated traffic."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from ludus.services.model.rollout.events import Ended, RolloutSettings, Scored, Variant
from ludus.services.model.rollout.log import RolloutLog
from ludus.services.model.rollout.service import hashed

SETTINGS = RolloutSettings(shares=(0.1, 0.25, 0.5), min_samples=20, step_s=60.0)


def opened(path: Path, settings: RolloutSettings = SETTINGS, ago_s: float = 3600.0) -> RolloutLog:
    """A roll-out that began some time ago."""
    return RolloutLog.open(
        path, "runs/support-3/rl-000100", "runs/support-4/rl-000200", settings, time.time() - ago_s
    )


def play(
    rollout: RolloutLog,
    num_requests: int,
    *,
    seed: int = 0,
    good: tuple[float, float] = (0.5, 0.5),
    failing: tuple[float, float] = (0.01, 0.01),
    median_s: tuple[float, float] = (0.5, 0.5),
) -> None:
    """Requests of a new session each, two a second; half of the answers have a score."""
    draw = random.Random(seed)
    t = max(rollout.controller.now, rollout.header.t)
    for number in range(num_requests):
        if rollout.controller.ended:
            return
        t += draw.expovariate(2.0)
        key = f"{seed}-{number}"
        unit, place = hashed("salt", key)
        which = place < rollout.controller.share
        variant = Variant.CHALLENGER if which else Variant.CHAMPION
        end: Any = "failed" if draw.random() < failing[which] else "ok"
        seconds = median_s[which] * draw.lognormvariate(0, 0.4)
        id = f"chatcmpl-{variant}-{key}"
        rollout.apply(Ended(t=t, id=id, variant=variant, unit=unit, end=end, seconds=seconds))
        if end == "ok" and draw.random() < 0.5:
            rollout.apply(Scored(t=t + 1, id=id, score=float(draw.random() < good[which])))
