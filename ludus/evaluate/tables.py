"""Evaluations and comparisons as tables for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group as Rows
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from ludus.evaluate.results import Comparison, Difference, Estimate, Evaluation


def render_evaluation(evaluation: Evaluation) -> RenderableType:
    """A table for the terminal: overall and by tier, pass@k, excluded episodes."""
    e = evaluation
    table = Table(box=box.SIMPLE_HEAD, title=escape(_title(e)), title_justify="left")
    table.add_column("tier")
    level = f"{100 * e.confidence:g} % interval"
    for name in ("tasks", "success", level, "score", level):
        table.add_column(name, justify="right")
    for tier, result in e.tiers.items():
        table.add_row(escape(tier), *_cells(result.success, result.score))
    if e.tiers:
        table.add_section()
    table.add_row("all", *_cells(e.success, e.score), style="bold")
    lines: list[RenderableType] = [table]
    lines += [
        f"  pass@{k}  {_percent(x.value)}  ({_interval(x)})" for k, x in e.pass_at.items() if k > 1
    ]
    tokens = "" if not e.mean_sampled_tokens else f" and {e.mean_sampled_tokens:.0f} sampled tokens"
    lines.append(
        f"  {e.num_episodes} episodes, {e.mean_turns:.1f} turns{tokens} each, {e.seconds:.1f} s"
    )
    if e.num_excluded:
        low, high = e.success_bounds
        reasons = escape(e.left_out)
        lines.append(
            f"  [yellow]{escape(e.excluded_episodes)} left out[/] ({reasons}): success would be"
            f" {_percent(low)} had all of them failed, {_percent(high)} had all succeeded"
        )
    return Rows(*lines)


def render_comparison(comparison: Comparison) -> RenderableType:
    """A table for the terminal: success and score of both, the second minus the first, p-value."""
    c = comparison
    title = escape(
        f"{c.a} against {c.b}, {c.success.num_tasks} tasks; the difference is {c.b} minus {c.a}"
    )
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("")
    for name in (c.a, c.b, "difference", f"{100 * c.confidence:g} % interval", "p"):
        table.add_column(escape(name), justify="right", overflow="fold")
    for tier, difference in c.tiers.items():
        table.add_row(escape(tier), *_difference_cells(difference, percent=True))
    if c.tiers:
        table.add_section()
    table.add_row("success", *_difference_cells(c.success, percent=True), style="bold")
    table.add_row("score", *_difference_cells(c.score, percent=False))
    left_out = f"; {c.num_left_out} not scored in both" if c.num_left_out else ""
    left_out += f"; {c.num_unpaired} played in one alone" if c.num_unpaired else ""
    tests = dict.fromkeys(d.test for d in (*c.tiers.values(), c.success, c.score))
    return Rows(
        table,
        f"  {escape(c.b)} is better on {c.num_better} tasks, worse on {c.num_worse}{left_out}",
        f"  {'test' if len(tests) == 1 else 'tests'}: {escape(', '.join(tests))}",
    )


def _title(e: Evaluation) -> str:
    version = "" if e.policy_version is None else f"policy version {e.policy_version}"
    how = e.sampling if e.sampling == "greedy" else f"sampled at temperature {e.temperature:g}"
    return ", ".join(part for part in (e.label, e.checkpoint or "", version, how) if part)


def _cells(success: Estimate, score: Estimate) -> list[str]:
    return [
        str(success.num_tasks),
        _percent(success.value),
        _interval(success),
        f"{score.value:.3f}",
        "-" if score.low is None else f"{score.low:.3f} to {score.high:.3f}",
    ]


def _difference_cells(d: Difference, *, percent: bool) -> list[str]:
    scale, digits = (100.0, 1) if percent else (1.0, 3)
    unit = " %" if percent else ""

    def show(value: float | None, sign: str = "+") -> str:
        return "-" if value is None else f"{scale * value:{sign}.{digits}f}"

    return [
        show(d.a, "") + unit,
        show(d.b, "") + unit,
        show(d.value),
        "-" if d.low is None else f"{show(d.low)} to {show(d.high)}",
        "< 0.001" if d.p_value < 0.001 else f"{d.p_value:.3f}",
    ]


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return "-"
    return f"{100 * estimate.low:.1f} to {100 * estimate.high:.1f} %"
