"""Charts of a few series: lines with intervals, and bars beside each other, as SVG units.

    make_lines("Held-out accuracy", [Series("executor", [Point(0, 0.31, 0.27, 0.35)])], unit="%")
    make_bars("Problems", ["proposed", "kept"], {"iteration 1": [64, 20]})

Each chart has its numbers as a table, too. `plots.html` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ludus.report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MAX_POINTS,
    RIGHT,
    TOP,
    WIDTH,
    Unit,
    nice_ticks,
    show,
    show_tick,
    thinned,
)

MAX_ROWS = 60
"""Rows of a chart's table: of longer series evenly spaced ones, with the first and the last."""

COLORS = 8
"""Of the page's palette: later series repeat them."""

Table = list[list[str]]


@dataclass(frozen=True, slots=True)
class Point:
    """A value, and the ends of its interval where one is known."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart. `color` of the page's palette; None: the next. Without `whiskers`, its
    intervals are in the table only."""

    name: str
    points: Sequence[Point]
    color: int | None = None
    whiskers: bool = True


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of a line, in SVG units; `low` and `high` are None without an interval."""

    x: float
    y: float
    low: float | None
    high: float | None
    label: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line in SVG units. Long ones have no marks."""

    name: str
    color: int
    path: str
    marks: list[Mark]


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar in SVG units."""

    x: float
    y: float
    width: float
    height: float
    color: int
    label: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart for the template; `table` begins with its head."""

    title: str
    note: str
    x_label: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: list[Line]
    bars: list[Bar]
    legend: list[tuple[str, int]]
    table: Table


def make_lines(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str = "iteration",
    unit: Unit = "",
    limits: tuple[float, float] | None = None,
    note: str = "",
) -> Figure | None:
    """Returns the chart; None without a value. `limits`: the least range of the y axis."""
    series = [replace(s, points=[p for p in s.points if math.isfinite(p.y)]) for s in series]
    series = [s for s in series if s.points]
    if not series:
        return None
    points = [point for one in series for point in one.points]
    ends = [end for s in series if s.whiskers for p in s.points for end in (p.low, p.high)]
    values = [p.y for p in points] + [end for end in ends if end is not None]
    values += limits or ()
    y_ticks = nice_ticks(min(values), max(values), 5)
    left, right = min(p.x for p in points), max(p.x for p in points)
    if left == right:
        left, right = left - 0.5, right + 0.5
    whole = [t for t in nice_ticks(left, right, 6) if left <= t <= right and t == round(t)]

    def px(value: float) -> float:
        return round(LEFT + (value - left) / (right - left) * (WIDTH - LEFT - RIGHT), 1)

    def py(value: float) -> float:
        return _y(value, y_ticks)

    lines = []
    for number, one in enumerate(series):
        chosen = [one.points[i] for i in thinned(len(one.points), MAX_POINTS)]
        marks = [
            Mark(px(p.x), py(p.y), *_ends(one, p, py), _told(one.name, p, unit))
            for p in (chosen if len(chosen) <= MAX_ROWS else [])
        ]
        path = " ".join(f"{px(p.x)},{py(p.y)}" for p in chosen)
        color = number if one.color is None else one.color
        lines.append(Line(one.name, color % COLORS, path, marks))
    return Figure(
        title=title,
        note=note,
        x_label=x_label,
        x_ticks=[(px(tick), f"{tick:,.0f}") for tick in whole],
        y_ticks=_y_labels(y_ticks, unit),
        lines=lines,
        bars=[],
        legend=[(line.name, line.color) for line in lines],
        table=_line_table(series, x_label, unit),
    )


def make_bars(
    title: str,
    categories: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    x_label: str = "",
    unit: Unit = "",
    note: str = "",
) -> Figure | None:
    """Returns the chart: a group of bars for each category, with a bar of each series; None
    without a series. A series has a value for each category."""
    if not series or not categories:
        return None
    highest = max((value for values in series.values() for value in values), default=0.0)
    y_ticks = nice_ticks(0.0, highest or 1.0, 4)
    group = (WIDTH - LEFT - RIGHT) / len(categories)
    width = 0.8 * group / len(series)
    bars = []
    for number, (name, values) in enumerate(series.items()):
        for place, (category, value) in enumerate(zip(categories, values, strict=True)):
            top = _y(value, y_ticks)
            bars.append(
                Bar(
                    x=round(LEFT + place * group + 0.1 * group + number * width, 1),
                    y=top,
                    width=round(max(width - 1, 0.5), 1),
                    height=round(HEIGHT - BOTTOM - top, 1),
                    color=number % COLORS,
                    label=f"{name}, {category}: {show(value, unit)}",
                )
            )
    middles = [round(LEFT + (place + 0.5) * group, 1) for place in range(len(categories))]
    rows = [
        [category, *(show(values[place], unit) for values in series.values())]
        for place, category in enumerate(categories)
    ]
    return Figure(
        title=title,
        note=note,
        x_label=x_label,
        x_ticks=list(zip(middles, categories, strict=True)),
        y_ticks=_y_labels(y_ticks, unit),
        lines=[],
        bars=bars,
        legend=[(name, number % COLORS) for number, name in enumerate(series)],
        table=[[x_label, *series], *rows],
    )


def _y(value: float, ticks: Sequence[float]) -> float:
    share = (value - ticks[0]) / (ticks[-1] - ticks[0])
    return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def _y_labels(ticks: Sequence[float], unit: Unit) -> list[tuple[float, str]]:
    digits = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9) - (2 if unit else 0))
    return [
        (_y(t, ticks), f"{100 * t:.{digits}f} %" if unit else show_tick(t, digits)) for t in ticks
    ]


def _ends(
    series: Series, point: Point, place: Callable[[float], float]
) -> tuple[float | None, float | None]:
    if not series.whiskers or point.low is None or point.high is None:
        return None, None
    return place(point.low), place(point.high)


def _told(name: str, point: Point, unit: Unit) -> str:
    return f"{name}, {point.x:g}: {_cell(point, unit)}"


def _cell(point: Point, unit: Unit) -> str:
    told = show(point.y, unit)
    if point.low is None or point.high is None:
        return told
    low, high = show(point.low, unit), show(point.high, unit)
    return f"{told} ({low.removesuffix(' %')} to {high.removesuffix(' %')})"


def _cells(one: Series, unit: Unit) -> dict[float, str]:
    """The text of each x; of several points at one x, of all."""
    cells: dict[float, str] = {}
    for point in one.points:
        text = _cell(point, unit)
        cells[point.x] = f"{cells[point.x]}, then {text}" if point.x in cells else text
    return cells


def _line_table(series: Sequence[Series], x_label: str, unit: Unit) -> Table:
    cells = [_cells(one, unit) for one in series]
    every = sorted({x for column in cells for x in column})
    chosen = [every[i] for i in thinned(len(every), MAX_ROWS)]
    rows = [[f"{x:g}", *(column.get(x, "") for column in cells)] for x in chosen]
    return [[x_label, *(one.name for one in series)], *rows]
