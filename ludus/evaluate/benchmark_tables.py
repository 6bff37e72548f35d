"""Results of benchmarks as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group as Rows
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from ludus.core.errors import printable
from ludus.evaluate.benchmarks import BenchmarkReport, BenchmarkResult, Check
from ludus.evaluate.results import Difference, Estimate


def render_report(report: BenchmarkReport) -> RenderableType:
    """A table for each model, their comparison, and the thresholds."""
    parts: list[RenderableType] = [_model_table(report, model) for model in report.models]
    parts += _left_out(report.results)
    if len(report.models) > 1:
        parts.append(_comparison(report))
    if report.checks:
        parts.append(_checks(report))
    return Rows(*parts)


def short_names(names: Sequence[str]) -> dict[str, str]:
    """The last part of a path, the model of an endpoint; the whole name where two are equal."""
    short = [
        name.partition("@http")[0] if "@http" in name else name.rstrip("/").rpartition("/")[2]
        for name in names
    ]
    return {
        name: part if short.count(part) == 1 else name
        for name, part in zip(names, short, strict=True)
    }


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=escape(title), title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(escape(column), justify="right" if index else "left")
    return table


def _model_table(report: BenchmarkReport, model: str) -> Table:
    results = [result for result in report.results if result.model == model]
    level = next((f"{100 * r.evaluation.confidence:g} %" for r in results if r.evaluation), "")
    several = any(result.best is not None for result in results)
    columns = ["mean@k", f"{level} interval"]
    columns += ["pass@k", f"{level} interval"] if several else []
    table = _table(model, "benchmark", "tasks", "k", *columns)
    for result in results:
        table.add_row(escape(result.benchmark), *_cells(result, several=several))
    if len(results) > 1 and (mean := report.averages.get(model)) is not None:
        table.add_section()
        table.add_row("average", "", "", f"{100 * mean:.1f} %", style="bold")
    return table


def _cells(result: BenchmarkResult, *, several: bool) -> list[str]:
    e = result.evaluation
    if e is None:
        return ["-", "-", "no result"]
    partial = f"/{result.num_rows}" if e.num_tasks < result.num_rows else ""
    best = _value(result.best) if several else ()
    return [f"{e.num_tasks}{partial}", str(e.samples_per_task), *_value(result.mean), *best]


def _value(estimate: Estimate | None) -> tuple[str, str]:
    if estimate is None:
        return "-", "-"
    if estimate.low is None or estimate.high is None:
        return f"{100 * estimate.value:.1f} %", "-"
    ends = f"{100 * estimate.low:.1f} to {100 * estimate.high:.1f}"
    return f"{100 * estimate.value:.1f} %", ends


def _left_out(results: Sequence[BenchmarkResult]) -> Iterator[str]:
    for result in results:
        place = escape(f"  {result.benchmark}, {result.model}: ")
        if result.evaluation is None:
            yield f"{place}[red]nothing scored[/]: {escape(printable(result.failure))}"
            continue
        if result.num_truncated:
            total = result.evaluation.num_episodes
            yield f"{place}{result.num_truncated} of {total} answers truncated"
        if result.evaluation.num_excluded:
            low, high = (100 * end for end in result.evaluation.success_bounds)
            yield (
                f"{place}[yellow]{result.evaluation.num_excluded} of "
                f"{result.evaluation.num_episodes} answers left out[/] "
                f"({escape(result.evaluation.left_out)}): the mean would be {low:.1f} % had all of "
                f"them been wrong, {high:.1f} % had all been right"
            )


def _comparison(report: BenchmarkReport) -> Table:
    short = short_names(report.models)
    first, last = short[report.models[0]], short[report.models[-1]]
    table = _table(
        "mean@k by model", "benchmark", *short.values(), f"{last} - {first}", "interval", "p"
    )
    for name in report.benchmarks:
        found = [report.of(model, name) for model in report.models]
        values = [_value(result.mean if result else None)[0] for result in found]
        table.add_row(escape(name), *values, *_change(report.changes.get(name)))
    if len(report.benchmarks) > 1:
        table.add_section()
        means = [report.averages.get(model) for model in report.models]
        shown = ["-" if mean is None else f"{100 * mean:.1f} %" for mean in means]
        table.add_row("average", *shown, style="bold")
    return table


def _change(change: Difference | None) -> tuple[str, str, str]:
    if change is None:
        return "-", "-", "-"
    ends = "-"
    if change.low is not None and change.high is not None:
        ends = f"{100 * change.low:+.1f} to {100 * change.high:+.1f}"
    p = "< 0.001" if change.p_value < 0.001 else f"{change.p_value:.3f}"
    return f"{100 * change.value:+.1f}", ends, p


def _checks(report: BenchmarkReport) -> Table:
    model = report.checks[0].model
    table = _table(
        f"thresholds of {model}", "benchmark", "mean@k", "interval", "threshold", "verdict"
    )
    for check in report.checks:
        table.add_row(
            escape(check.threshold.benchmark),
            *_value(check.reached),
            f"{check.threshold.percent:g} %",
            _verdict(check),
        )
    return table


def _verdict(check: Check) -> str:
    verdict = "reached" if check.passed else "[red]below[/]"
    if check.reached is None or check.least >= check.reached.value:
        return verdict
    return f"{verdict} ({100 * check.least:.1f} % with those left out as wrong)"
