"""Text of a replayed roll-out."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ludus.core.errors import printable
from ludus.services.model.rollout.controller import Controller
from ludus.services.model.rollout.replay import Replay


def render_replay(replayed: Replay) -> str:
    """The decisions, and the state after the last event."""
    header, controller = replayed.header, replayed.controller
    decisions = [*replayed.decisions, *replayed.missing]
    lines = [
        f"champion    {_one_line(header.champion)}",
        f"challenger  {_one_line(header.challenger)}",
        "",
        *(f"{_time(d.t)}  {d.action:<9}  {100 * d.share:>5.4g} %  {d.reason}" for d in decisions),
        "",
        *_state(controller, header.settings.alpha),
        f"Replayed: {_count(replayed.num_events, 'event')} and "
        f"{_count(len(replayed.decisions), 'decision')}, as recorded.",
    ]
    if replayed.missing:
        lines.append("The last event's decisions were not written: the service ended there.")
    if replayed.num_cut_off:
        lines.append(
            f"The last {_count(replayed.num_cut_off, 'byte')} are left out, as they are no whole "
            "line: the service was killed while it wrote, or is writing."
        )
    return "\n".join(lines)


def _state(controller: Controller, alpha: float) -> list[str]:
    state = controller.state()
    lines = [f"{'':<10}  requests  failed  scores  mean score"]
    for name, counts in state["variants"].items():
        mean: Any = counts["mean_score"]
        told = "-" if mean is None else f"{mean:.3f}"
        lines.append(
            f"{name:<10}  {counts['requests']:>8}  {counts['failed']:>6}  {counts['scores']:>6}  "
            f"{told:>10}"
        )
    if state["difference"] is not None:
        low, high = controller.interval()
        interval = f"{100 * (1 - alpha / 2):g} % interval {low:+z.3f} to {high:+z.3f}"
        lines.append(f"difference of scores: {state['difference']:+z.3f}, {interval}")
    values = ", ".join(f"{test} {value:.2g}" for test, value in state["p_values"].items())
    return [*lines, f"adjusted p-values: {values}", ""]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _one_line(text: str) -> str:
    """A name of a log, which anybody may have written: it cannot look like further lines."""
    return printable(text).replace("\n", "\\n")


def _time(t: float) -> str:
    return datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%d %H:%M:%S")
