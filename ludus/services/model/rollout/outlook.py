"""Outlook of a roll-out: which decisions may come next, and what each of them lacks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ludus.services.model.rollout.controller import NUM_TESTS, WINDOW, Controller
from ludus.services.model.rollout.events import Action, Variant

CAUSES = {
    "worse": "evidence of worse scores",
    "errors": "evidence of more failed requests",
    "latency": "evidence of slower answers",
}


@dataclass(frozen=True, slots=True)
class Outlook:
    """A decision that may come next. `done`: the part of its condition that is met, 0 to 1."""

    action: Action
    share: float
    needs: str
    done: float


def outlook(controller: Controller) -> list[Outlook]:
    """The decisions that may come next; none after the end."""
    if controller.ended:
        return []
    if controller.phase == "holding":
        told = f"a window of {WINDOW} requests of each variant, of which one answers most"
        return [Outlook("resume", controller.share, told, 0.0)]
    return [_advance(controller), *_removals(controller)]


def _advance(controller: Controller) -> Outlook:
    settings = controller.settings
    scored = controller.state()["scored_in_step"]
    missing = max(0, settings.min_samples - scored)
    seconds = max(0.0, settings.step_s - controller.step_seconds)
    parts = [f"{missing:,} more scored sessions of the challenger"] if missing else []
    parts += [f"{math.ceil(seconds):,} s more at this share"] if seconds else []
    done = min(1.0, scored / settings.min_samples)
    if settings.step_s:
        done = min(done, controller.step_seconds / settings.step_s)
    if controller.step + 1 < len(settings.shares):
        share = settings.shares[controller.step + 1]
        return Outlook("increase", share, " and ".join(parts) or "the next event", done)
    told, part = _evidence(controller, "better")
    limit = f", margin {settings.margin:g}" if settings.margin else ""
    parts.append(f"evidence of better scores{limit} ({told})")
    return Outlook("promote", 1.0, " and ".join(parts), min(done, part))


def _removals(controller: Controller) -> list[Outlook]:
    found = []
    for test, cause in CAUSES.items():
        told, part = _evidence(controller, test)
        found.append(Outlook("roll_back", 0.0, f"{cause} ({told})", part))
    scored = controller.tallies[Variant.CHALLENGER].num_scored_units
    most = controller.settings.max_samples
    told = f"no answer after {most - scored:,} more scored sessions of the challenger"
    return [*found, Outlook("roll_back", 0.0, told, scored / most)]


def _evidence(controller: Controller, test: str) -> tuple[str, float]:
    """The words of a test, and its evidence as a part of that which decides, by logarithms."""
    alpha = controller.settings.alpha
    value = controller.evidence()[test]
    part = math.log(controller.tests[test].best) / math.log(NUM_TESTS / alpha)
    return f"p {value:.2g}, decides at {alpha:g}", min(1.0, part)
