"""The charts of a co-evolution's report. A chart without a value is None."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ludus.coevolve.report.facts import COUNTS, Facts, Iteration
from ludus.coevolve.roles import Role
from ludus.judges.proposals.select import BINS, MARGIN
from ludus.report.charts import Unit
from ludus.report.series import Figure, Point, Series, make_bars, make_lines

PARTS: tuple[tuple[str, str, Unit], ...] = (
    ("rollout/reward", "Reward", ""),
    ("score/format", "Proposals that parse", "%"),
    ("score/uncertainty", "Uncertainty R_unc", ""),
    ("score/tool", "Tool calls R_tool", ""),
    ("score/repetition", "Repetition R_rep", ""),
    ("score/consistency", "Share of the majority p", ""),
)
"""Metrics of the curriculum agent's training, with titles."""

EXECUTOR_PARTS: tuple[tuple[str, str, Unit], ...] = (
    ("rollout/success", "Answers that agree with the label", "%"),
    ("rollout/groups_with_signal", "Groups with differing rewards", "%"),
)
"""Metrics of the executor's training, with titles."""


def held_out(facts: Facts) -> Figure | None:
    """The executor's accuracy on held-out tasks."""
    points = [
        Point(one.number, s.value, s.low, s.high)
        for one in facts.iterations
        if one.heldout is not None
        for s in (one.heldout.success,)
    ]
    note = "The executor's accuracy on held-out tasks, with Wilson's 95 % intervals."
    return make_lines(
        "Held-out accuracy", [Series("executor", points)], unit="%", limits=(0, 1), note=note
    )


def frontier(facts: Facts) -> Figure | None:
    """The pass rate of the first executor on each iteration's problems."""
    points = [
        Point(one.number, f.pass_rate.value, f.pass_rate.low, f.pass_rate.high)
        for one in facts.iterations
        if (f := one.frontier) is not None
    ]
    note = (
        "How often the first iteration's executor finds the label of each iteration's problems, "
        "with Wilson's 95 % intervals. Harder problems lower it."
    )
    name = "first executor"
    return make_lines(
        "Frontier: pass rate", [Series(name, points)], unit="%", limits=(0, 1), note=note
    )


def tool_calls(facts: Facts) -> Figure | None:
    """Executed calls of an answer: on proposals, on held-out tasks, and of the first executor."""

    def line(name: str, value: Callable[[Iteration], float | None]) -> Series:
        found = ((one.number, value(one)) for one in facts.iterations)
        return Series(name, [Point(number, y) for number, y in found if y is not None])

    series = [
        line(
            "first executor, kept problems",
            lambda one: one.frontier.tool_calls if one.frontier else None,
        ),
        line("executor, proposals", lambda one: one.tool_calls),
        line("executor, held-out tasks", lambda one: one.heldout_tool_calls),
    ]
    return make_lines("Tool calls an answer", series, limits=(0, 0))


def funnel(facts: Facts) -> Figure | None:
    """From proposals to kept problems."""
    counted = [one for one in facts.iterations if one.counts]
    series = {f"iteration {one.number}": [one.counts[n] for n in COUNTS] for one in counted}
    note = "Distinct: questions without repeats. Voted: an answer of the executor was counted."
    return make_bars("Problems of an iteration", COUNTS, series, x_label="problems", note=note)


def claims(facts: Facts) -> Figure | None:
    """Share of claimed answers that agree with the majority."""
    points = [
        Point(one.number, c.value, c.low, c.high)
        for one in facts.iterations
        if (c := one.claims) is not None
    ]
    note = "Share of the voted questions whose claimed answer agrees with the majority's."
    return make_lines(
        "Claimed answers that agree",
        [Series("claims", points)],
        unit="%",
        limits=(0, 1),
        note=note,
    )


def repetition(facts: Facts) -> Figure | None:
    """Distinct questions and clusters of similar ones."""
    found = [(one.number, r) for one in facts.iterations if (r := one.repetition) is not None]
    if not found:
        return None
    series = [
        Series("distinct questions", [Point(n, r.distinct) for n, r in found]),
        Series("largest cluster", [Point(n, r.largest) for n, r in found]),
        Series("mean cluster", [Point(n, r.mean) for n, r in found]),
    ]
    batch = max(r.batch for _, r in found)
    note = (
        f"Clusters of similar questions (1 - BLEU below 0.5, average linkage) among the first "
        f"{batch} questions, as shares of them."
    )
    return make_lines("Repetition", series, unit="%", limits=(0, 1), note=note)


def histograms(facts: Facts) -> list[Figure | None]:
    """The distribution of p over the distinct questions, and over the kept ones, an iteration."""
    edges = [f"{place / BINS:.1f}" for place in range(BINS)]
    return [
        make_bars(
            f"Iteration {one.number}",
            edges,
            {"voted": _bins(one.shares), "kept": _bins(one.kept_shares)},
            x_label="p from",
        )
        for one in facts.iterations
        if one.shares
    ]


def _bins(shares: Sequence[float]) -> list[int]:
    """Counts of each tenth; the last one includes 1."""
    bins = [0] * BINS
    for value in shares:
        bins[min(int(value * BINS + MARGIN), BINS - 1)] += 1
    return bins


def trained(facts: Facts, role: Role) -> list[Figure | None]:
    """Metrics of a role's training by step, a line for each iteration."""
    chosen = PARTS if role == "curriculum" else EXECUTOR_PARTS
    charts: list[Figure | None] = []
    for metric, title, unit in chosen:
        series = []
        for one in facts.iterations:
            records = one.curriculum if role == "curriculum" else one.executor
            found = ((r["step"], r[metric]) for r in records if isinstance(r.get(metric), float))
            points = [Point(float(step), value) for step, value in found]
            series.append(Series(f"iteration {one.number}", points))
        limits = (0.0, 1.0) if unit else None
        charts.append(make_lines(title, series, x_label="step", unit=unit, limits=limits))
    return charts
