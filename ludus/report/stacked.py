"""Time of each step: a stacked chart of the parts, and a table of their sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ludus.report import charts
from ludus.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Record
from ludus.telemetry.occupancy import PARTS

MAX_COLUMNS = 80

NAMES = {
    "sample": "sampling",
    "train": "training",
    "env_wait": "waiting for environments",
    "tool": "waiting for tools",
    "judge": "waiting for the judge",
    "episodes": "bookkeeping of episodes",
    "evaluate": "evaluation",
    "checkpoint": "checkpoints",
    "record": "recording results",
    "rest": "rest of the loop",
}
"""The parts of a step in their order; `time/idle_s` is split in three."""

COLORS = {
    "sample": 0, "train": 1, "evaluate": 2, "env_wait": 3, "tool": 4, "judge": 5, "checkpoint": 6,
    "episodes": 7, "record": 8, "rest": 9,
}  # fmt: skip
"""A part has the same colour in every chart of the page."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a stage's time. `color` numbers the page's palette."""

    name: str
    color: int
    points: str
    seconds: float
    share: float
    per_step: float


@dataclass(frozen=True, slots=True)
class Stacked:
    """A stage's chart, in SVG units, and its facts."""

    stage: str
    steps: int
    parts: list[Part]
    seconds: float
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    unit: str
    facts: list[tuple[str, str]]


def make_stacked(records: Sequence[Record], stage: str) -> Stacked | None:
    """Returns the chart of a stage; None if its steps have no times.

    With more steps than columns, a column is the mean of neighbouring steps.
    """
    rows = [r for r in records if r["stage"] == stage and (r.get("time/wall_s") or 0) > 0]
    if not rows:
        return None
    split = [split_idle(r) for r in rows]
    present = [part for part in NAMES if any(seconds[part] for seconds in split)]
    columns = _columns(split, present)
    highest = max(sum(column) for column in columns)
    scale, unit = (1e3, "milliseconds") if highest < 0.5 else (1.0, "seconds")
    y_ticks = charts.nice_ticks(0, highest * scale, 4)
    seconds = sum(r["time/wall_s"] for r in rows)
    parts, below = [], [0.0] * len(columns)
    for number, part in enumerate(present):
        above = [low + column[number] for low, column in zip(below, columns, strict=True)]
        total = sum(seconds[part] for seconds in split)
        area = _area(below, above, y_ticks[-1] / scale)
        share, per_step = total / seconds, total / len(rows)
        parts.append(Part(NAMES[part], COLORS[part], area, total, share, per_step))
        below = above
    x = _x_ticks(rows[0]["step"], rows[-1]["step"])
    y = [(_y(tick, y_ticks[-1]), charts.show(tick)) for tick in y_ticks]
    return Stacked(stage, len(rows), parts, seconds, x, y, unit, _facts(rows))


def split_idle(row: Record) -> dict[str, float]:
    """Returns the seconds of each part of a step. Idle time is, as far as it goes: recording of the
    step before; bookkeeping while episodes are played; the rest."""

    def spent(part: str) -> float:
        return float(row.get(f"time/{part}_s") or 0.0)

    seconds: dict[str, float] = {part: spent(part) for part in PARTS if part != "idle"}
    idle = spent("idle")
    record = min(idle, spent("record"))
    playing = sum(seconds[part] for part in ("sample", "env_wait", "tool", "judge"))
    episodes = min(idle - record, max(0.0, spent("rollout") - playing))
    return {**seconds, "record": record, "episodes": episodes, "rest": idle - record - episodes}


def _columns(split: Sequence[Mapping[str, float]], parts: Sequence[str]) -> list[list[float]]:
    """Returns the seconds of each part in each column."""
    count = min(len(split), MAX_COLUMNS)
    edges = [round(i * len(split) / count) for i in range(count + 1)]
    return [
        [sum(seconds[part] for seconds in split[low:high]) / (high - low) for part in parts]
        for low, high in pairwise(edges)
    ]


def _area(below: Sequence[float], above: Sequence[float], top: float) -> str:
    """Returns the polygon of a band between `below` and `above`."""
    width = (WIDTH - LEFT - RIGHT) / len(above)
    upper, lower = [], []
    for i, (low, high) in enumerate(zip(below, above, strict=True)):
        left, right = LEFT + i * width, LEFT + (i + 1) * width
        upper += [f"{left:.1f},{_y(high, top):.1f}", f"{right:.1f},{_y(high, top):.1f}"]
        lower += [f"{left:.1f},{_y(low, top):.1f}", f"{right:.1f},{_y(low, top):.1f}"]
    return " ".join(upper + lower[::-1])


def _y(value: float, top: float) -> float:
    return round(HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM), 1)


def _x_ticks(first: int, last: int) -> list[tuple[float, str]]:
    """Returns ticks at the centres of their columns."""
    width = (WIDTH - LEFT - RIGHT) / (last - first + 1)
    ticks = charts.nice_ticks(first, last, 6) if last > first else [float(first)]
    whole = sorted({round(tick) for tick in ticks if first <= round(tick) <= last})
    return [(round(LEFT + (tick - first + 0.5) * width, 1), f"{tick:,}") for tick in whole]


def _facts(rows: Sequence[Record]) -> list[tuple[str, str]]:
    """Returns tokens, utilisation and memory of the stage."""

    def values(name: str) -> list[float]:
        return [float(r[name]) for r in rows if isinstance(r.get(name), int | float)]

    def total(name: str, times: str | None = None) -> float:
        return sum(
            float(r.get(name) or 0.0) * (float(r.get(times) or 0.0) if times else 1.0) for r in rows
        )

    facts = []
    for label, unique, logical, times in (
        ("tokens of episodes", "rollout/unique_tokens", "rollout/tokens", None),
        ("tokens trained", "train/unique_tokens", "train/tokens", "train/optimizer_steps"),
    ):
        if counted := total(logical, times):
            computed = total(unique, times)
            ratio = f"; computed: {computed:,.0f}" if computed else ""
            facts.append((label, f"{counted:,.0f}{ratio}"))
    for label, name in (
        ("utilisation, whole step", "time/mfu"),
        ("utilisation, sampling", "time/sample_mfu"),
        ("utilisation, training", "time/train_mfu"),
    ):
        if shares := values(name):
            facts.append((label, f"{100 * sum(shares) / len(shares):.1f}\u202f%"))
    if peak := values("time/peak_gflops"):
        facts.append(("measured peak", f"{peak[-1]:,.0f} GFLOP/s"))
    for label, name in (
        ("peak memory, resident", "memory/rss_peak_gb"),
        ("peak memory, CUDA", "memory/cuda_peak_gb"),
    ):
        if sizes := values(name):
            facts.append((label, f"{max(sizes):.2f} GB"))
    return facts


assert set(NAMES) == set(COLORS) == {*PARTS, "episodes", "record", "rest"} - {"idle"}
