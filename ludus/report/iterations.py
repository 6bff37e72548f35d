"""A chart of benchmarks over models, as a file of its own: SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from ludus.evaluate.results import Estimate
from ludus.report.charts import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, nice_ticks

LEGEND = 150
COLORS = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377",
    "#bbbbbb", "#e69f00", "#009e73", "#882255", "#332288",
)  # fmt: skip
"""Paul Tol's bright colours first, which colour-blind readers distinguish."""

STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#333}.grid{stroke:#ddd}"
    ".line{fill:none;stroke-width:1.8}.end{stroke-width:1;opacity:.6}"
)


def draw_iterations(
    models: Sequence[str],
    series: Mapping[str, Sequence[Estimate | None]],
    averages: Sequence[float | None],
) -> str:
    """Returns the chart: a line for each benchmark with its intervals, and the average, dashed.

    Args:
        series: for each benchmark its results, one a model; None: nothing could be scored.
        averages: one a model; not drawn with a single benchmark.
    """
    known = [e for line in series.values() for e in line if e is not None]
    ends = [end for e in known for end in (e.low, e.value, e.high) if end is not None]
    ticks = nice_ticks(min([*ends, 1.0]), max([*ends, 0.0]), 5) if ends else [0.0, 1.0]
    ticks = [tick for tick in ticks if -1e-9 <= tick <= 1 + 1e-9] or [0.0, 1.0]
    low, high = (ticks[0], ticks[-1]) if len(ticks) > 1 else (0.0, 1.0)
    right = WIDTH - 14

    def px(index: int) -> float:
        return round(LEFT + (index + 0.5) / len(models) * (right - LEFT), 1)

    def py(value: float) -> float:
        inside = min(max(value, low), high)
        return round(HEIGHT - BOTTOM - (inside - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{py(tick)}" y2="{py(tick)}"/>'
        f'<text x="{LEFT - 6}" y="{py(tick) + 4}" text-anchor="end">{100 * tick:.0f} %</text>'
        for tick in ticks
    ]
    room = max(4, int((right - LEFT) / len(models) / 6.2))
    for index, model in enumerate(models):
        name = model if len(model) <= room else "…" + model[1 - room :]
        parts.append(
            f'<text x="{px(index)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(name)}'
            f"<title>{escape(model)}</title></text>"
        )
    for number, (name, line) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        points = [(px(i), e) for i, e in enumerate(line) if e is not None]
        parts += [
            f'<line class="end" stroke="{color}" x1="{x}" x2="{x}" y1="{py(e.low)}" '
            f'y2="{py(e.high)}"/>'
            for x, e in points
            if e.low is not None and e.high is not None
        ]
        parts += _line(name, color, [(x, py(e.value), str(e)) for x, e in points])
        parts.append(_key(number, name, f'stroke="{color}"'))
    mean = [(px(i), py(v), f"{100 * v:.1f} %") for i, v in enumerate(averages) if v is not None]
    if len(series) > 1 and mean:
        dashed = 'stroke="#333" stroke-dasharray="5 3"'
        parts.append(f'<polyline class="line" {dashed} points="{_points(mean)}"/>')
        parts.append(_key(len(series), "average", dashed))
    height = max(HEIGHT, TOP + 16 * (len(series) + 2))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + LEGEND} {height}" '
        f'width="{WIDTH + LEGEND}" height="{height}"><style>{STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _line(name: str, color: str, points: Sequence[tuple[float, float, str]]) -> list[str]:
    dots = [
        f'<circle fill="{color}" cx="{x}" cy="{y}" r="3"><title>{escape(name)}: {escape(told)}'
        "</title></circle>"
        for x, y, told in points
    ]
    return [f'<polyline class="line" stroke="{color}" points="{_points(points)}"/>', *dots]


def _points(points: Sequence[tuple[float, float, str]]) -> str:
    return " ".join(f"{x},{y}" for x, y, _ in points)


def _key(number: int, name: str, stroke: str) -> str:
    x, y = WIDTH, TOP + 16 * number + 10
    return (
        f'<line class="line" {stroke} x1="{x}" x2="{x + 18}" y1="{y}" y2="{y}"/>'
        f'<text x="{x + 24}" y="{y + 4}">{escape(name)}</text>'
    )
