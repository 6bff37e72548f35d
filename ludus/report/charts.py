"""Charts as data: scales, ticks, smoothing, paths. The page's template draws them as inline SVG.

No plotting library: the charts follow the page's light or dark colours, text stays text, a report
is tens of kilobytes, and no dependency is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

WIDTH, HEIGHT = 560, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 10, 42
MAX_POINTS = 400

Axis = Literal["step", "episodes", "time"]
Unit = Literal["", "%"]
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Curve:
    """One chart: a metric of a stage, and held-out values measured during the stage.

    `dots`: stage and metric of the held-out values. `limits`: range of the y axis.
    """

    title: str
    stage: str
    metric: str
    unit: Unit = ""
    dots: tuple[str, str] | None = None
    limits: tuple[float, float] | None = None


CURVES = (
    Curve(
        "Success of training episodes",
        "rl",
        "rollout/success",
        "%",
        dots=("evaluate/rl", "evaluate/success"),
        limits=(0.0, 1.0),
    ),
    Curve("Reward of training episodes", "rl", "rollout/reward"),
    Curve(
        "Groups with differing rewards", "rl", "rollout/groups_with_signal", "%", limits=(0.0, 1.0)
    ),
    Curve("Tier of the curriculum after the step", "rl", "tasks/tier"),
    Curve("SFT loss", "sft", "train/loss"),
)


@dataclass(frozen=True, slots=True)
class Plot:
    """One curve over one axis, in SVG units."""

    axis: Axis
    x_label: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    raw: str
    smooth: str
    band: str
    dots: list[tuple[float, float, str]]
    pixels: list[list[float]]  # x and y of each smoothed point, for the tooltip


@dataclass(frozen=True, slots=True)
class Chart:
    """One curve, over each axis with values."""

    curve: Curve
    window: int
    plots: list[Plot]
    labels: list[str]  # tooltip of each point


@dataclass(frozen=True, slots=True)
class Spark:
    """A small line without axes, for the other metrics."""

    name: str
    path: str
    first: str
    last: str
    lowest: str
    highest: str


@dataclass(slots=True)
class _Series:
    step: list[float] = field(default_factory=list)
    episodes: list[float] = field(default_factory=list)
    time: list[float] = field(default_factory=list)
    value: list[float] = field(default_factory=list)

    def over(self, axis: Axis) -> list[float]:
        return {"step": self.step, "episodes": self.episodes, "time": self.time}[axis]


def make_chart(records: Sequence[Record], curve: Curve) -> Chart | None:
    """Returns the chart of a curve; None with fewer than two values."""
    series = _series(records, curve.stage, curve.metric)
    if len(series.value) < 2:
        return None
    count = len(series.value)
    window = 2 * max(1, min(count // 20, 12)) + 1 if count >= 8 else 1  # about a tenth, odd
    mean, spread = smooth(series.value, window)
    held_out = _dots(records, curve, series)
    chosen = thinned(len(mean), MAX_POINTS)
    axes: tuple[Axis, ...] = ("step", "episodes", "time")
    plots = [
        _plot(axis, curve, series, mean, spread, held_out, chosen)
        for axis in axes
        if len(set(series.over(axis))) > 1
    ]
    labels = []
    for i in chosen:
        where = [f"step {series.step[i]:,.0f}"]
        if series.episodes[-1] > 0:
            where.append(f"{series.episodes[i]:,.0f} episodes")
        where.append(duration(series.time[i]))
        values = f"{show(mean[i], curve.unit)} (this step {show(series.value[i], curve.unit)})"
        labels.append(f"{values}\n{', '.join(where)}")
    return Chart(curve, window, plots, labels)


def make_sparks(records: Sequence[Record], shown: Sequence[Curve]) -> dict[str, list[Spark]]:
    """Returns sparklines of all other varying metrics, by stage."""
    taken = {(curve.stage, curve.metric) for curve in shown} | {curve.dots for curve in shown}
    names: dict[tuple[str, str], None] = {}
    for record in records:
        for name in record:
            if "/" in name and (record["stage"], name) not in taken:
                names[record["stage"], name] = None
    sparks: dict[str, list[Spark]] = {}
    for stage, name in names:
        values = _series(records, stage, name).value
        if len(set(values)) > 1:
            sparks.setdefault(stage, []).append(_spark(name, values))
    return sparks


def smooth(values: Sequence[float], window: int) -> tuple[list[float], list[float]]:
    """Returns the centred rolling mean and standard deviation; one-sided at the ends."""
    means, spreads = [], []
    half = window // 2
    for i in range(len(values)):
        near = values[max(0, i - half) : i + half + 1]
        mean = math.fsum(near) / len(near)
        means.append(mean)
        spreads.append(math.sqrt(math.fsum((v - mean) ** 2 for v in near) / len(near)))
    return means, spreads


def thinned(count: int, most: int) -> list[int]:
    """Returns at most `most` of `count` indices, evenly spaced, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns round values (1, 2 or 5 times a power of ten) that cover a range."""
    if not high > low:
        pad = abs(low) / 2 or 0.5
        low, high = low - pad, high + pad
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1.0, 2.0, 5.0, 10.0) if s * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def show(value: float, unit: Unit = "") -> str:
    """Formats a number: 57.2 %, 0.0312, 1,234, 2.5e-05."""
    if unit == "%":
        return f"{100 * value:.1f} %"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size and size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Formats seconds: `0.4 s`, `12 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _number(record: Record, name: str) -> float | None:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _series(records: Sequence[Record], stage: str, name: str) -> _Series:
    """Returns a metric's values, each with the stage's number of episodes so far."""
    series, episodes = _Series(), 0.0
    for record in records:
        if record["stage"] != stage:
            continue
        episodes += _number(record, "rollout/episodes") or 0.0
        value = _number(record, name)
        if value is not None:
            series.step.append(float(record["step"]))
            series.episodes.append(episodes)
            series.time.append(float(record["time"]))
            series.value.append(value)
    return series


def _dots(records: Sequence[Record], curve: Curve, line: _Series) -> _Series:
    """Returns the held-out values on the axes of the curve."""
    if curve.dots is None:
        return _Series()
    dots = _series(records, *curve.dots)
    dots.episodes = [
        max((e for s, e in zip(line.step, line.episodes, strict=True) if s <= step), default=0.0)
        for step in dots.step
    ]
    return dots


def _plot(
    axis: Axis,
    curve: Curve,
    series: _Series,
    mean: list[float],
    spread: list[float],
    dots: _Series,
    chosen: list[int],
) -> Plot:
    x, x_label, divisor = series.over(axis), str(axis), 1.0
    if axis == "time":
        divisor, x_label = _time_unit(max(x))
    elif axis == "episodes":
        x_label = "training episodes"
    every_x = [*x, *dots.over(axis)]
    x_low, x_high = min(every_x) / divisor, max(every_x) / divisor
    # A band beyond all values would stretch the axis: a loss below 0, a reward above 1.
    lowest, highest = curve.limits or (min(series.value), max(series.value))
    lower, upper = (
        [min(max(m + sign * s, lowest), highest) for m, s in zip(mean, spread, strict=True)]
        for sign in (-1.0, 1.0)
    )
    every_y = [*series.value, *lower, *upper, *dots.value, *(curve.limits or ())]
    y_ticks = nice_ticks(min(every_y), max(every_y), 5)
    x_ticks = [t for t in nice_ticks(x_low, x_high, 6) if x_low - 1e-9 <= t <= x_high + 1e-9]

    def px(value: float) -> float:
        share = (value / divisor - x_low) / (x_high - x_low)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def py(value: float) -> float:
        share = (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def line(values: Sequence[float], order: Sequence[int] = chosen) -> str:
        return " ".join(f"{px(x[i])},{py(values[i])}" for i in order)

    digits = _digits(y_ticks)
    return Plot(
        axis=axis,
        x_label=x_label,
        x_ticks=[(px(tick * divisor), show_tick(tick, _digits(x_ticks))) for tick in x_ticks],
        y_ticks=[
            (py(tick), f"{100 * tick:.0f} %" if curve.unit == "%" else show_tick(tick, digits))
            for tick in y_ticks
        ],
        raw=line(series.value),
        smooth=line(mean),
        band=f"{line(upper)} {line(lower, chosen[::-1])}",
        dots=[
            (px(at), py(value), show(value, curve.unit))
            for at, value in zip(dots.over(axis), dots.value, strict=True)
        ],
        pixels=[[px(x[i]), py(mean[i])] for i in chosen],
    )


def show_tick(value: float, digits: int) -> str:
    """Formats a tick's label with the digits of its axis."""
    return f"{value:.0e}" if digits > 4 and value else f"{value:,.{min(digits, 4)}f}"


def _digits(ticks: Sequence[float]) -> int:
    """Returns the decimals needed to distinguish neighbouring ticks."""
    if len(ticks) < 2:
        return 0
    return max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9))


def _time_unit(seconds: float) -> tuple[float, str]:
    if seconds >= 2 * 3600:
        return 3600.0, "wall time, hours"
    return (60.0, "wall time, minutes") if seconds >= 120 else (1.0, "wall time, seconds")


def _spark(name: str, values: Sequence[float]) -> Spark:
    low, high = min(values), max(values)
    chosen = thinned(len(values), 120)
    points = (
        (160 * i / (len(values) - 1), 36 - 32 * (values[i] - low) / (high - low)) for i in chosen
    )
    return Spark(
        name=name,
        path=" ".join(f"{x:.1f},{y:.1f}" for x, y in points),
        first=show(values[0]),
        last=show(values[-1]),
        lowest=show(low),
        highest=show(high),
    )
