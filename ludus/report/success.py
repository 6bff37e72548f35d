"""Chart of held-out success over RL steps: all tasks, and each tier."""

from __future__ import annotations

from collections.abc import Mapping

from ludus.evaluate.results import Estimate, Evaluation
from ludus.report.series import Figure, Point, Series, make_lines

HELD_OUT = 2
"""The page's colour of held-out tasks, in all charts."""

TIERS = (1, 3, 4, 5, 6, 7)
"""Colours of tiers; 0 is that of training episodes."""


def tier_colors(evaluations: Mapping[str, Evaluation]) -> dict[str, int]:
    """Returns a colour for each tier. None of them has one where there are more than colours."""
    tiers = list(dict.fromkeys(tier for e in evaluations.values() for tier in e.tiers))
    return dict(zip(tiers, TIERS, strict=False)) if 1 < len(tiers) <= len(TIERS) else {}


def success_chart(
    evaluations: Mapping[str, Evaluation], steps: Mapping[str, int], note: str = ""
) -> Figure | None:
    """Returns the chart; None with fewer than two evaluations at known steps.

    Args:
        steps: RL steps before each evaluation, by its name.
    """
    known = [(steps[name], e) for name, e in evaluations.items() if name in steps]
    if len({step for step, _ in known}) < 2:
        return None
    lines = []
    for tier, color in tier_colors(evaluations).items():
        points = [_point(step, e.tiers[tier].success) for step, e in known if tier in e.tiers]
        lines.append(Series(tier, points, color, whiskers=False))
    points = [_point(step, e.success) for step, e in known]
    lines.append(Series("all tasks", points, HELD_OUT))  # last: above the others
    return make_lines(
        "Success over RL steps", lines, x_label="RL step", unit="%", limits=(0.0, 1.0), note=note
    )


def _point(step: int, success: Estimate) -> Point:
    return Point(step, success.value, success.low, success.high)
