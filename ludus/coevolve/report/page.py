"""`report.html` of a co-evolution: self-contained, as the report of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ludus.coevolve.report import curves
from ludus.coevolve.report.facts import Facts, read_facts
from ludus.coevolve.report.pages import templates, write_pages
from ludus.coevolve.report.problems import read_problems
from ludus.coevolve.storage import Storage
from ludus.core.errors import DataError, LudusError
from ludus.core.files import atomic_write
from ludus.evaluate import compare
from ludus.pipeline.monitoring.progress import Observer
from ludus.report.charts import show
from ludus.report.templates import assets
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

STAGES = ("curriculum", "generate", "score", "filter", "executor", "evaluate")


def write_report(storage: Storage, planned: Sequence[str], only: int | None = None) -> Path:
    """Write the report, and the pages of problems of all iterations, or of one.

    Args:
        planned: labels of the stages, in order: those that did not run are listed, too.

    Errors: DataError for a folder without a complete stage, and for a damaged file; LudusError
        where a file cannot be written.
    """
    facts = read_facts(storage)
    text = render(facts, storage, planned)
    try:
        for one in facts.iterations:
            if one.number and only in (None, one.number):
                write_pages(storage, one.number, read_problems(storage, one.number))
        atomic_write(storage.report, text.encode("utf-8", "replace"))
    except OSError as error:
        raise LudusError(
            f"{error.filename or storage.root}: the report cannot be written: {error.strerror}"
        ) from None
    return storage.report


def try_report(
    storage: Storage, planned: Sequence[str], iteration: int, observer: Observer
) -> None:
    """Write the report after an iteration's evaluation. A fault there is told, not raised."""
    try:
        path = write_report(storage, planned, iteration)
    except Exception as error:
        log.exception("the report was not written", folder=str(storage.root))
        observer.note(f"the report was not written: {error}")
    else:
        observer.note(f"report: {path}")


def render(facts: Facts, storage: Storage, planned: Sequence[str]) -> str:
    """Returns the page as text."""
    recipe = storage.recipe
    sections = {
        "Executor": (curves.held_out(facts), curves.frontier(facts), curves.tool_calls(facts)),
        "Problems": (curves.funnel(facts), curves.claims(facts), curves.repetition(facts)),
        "Distribution of p": curves.histograms(facts),
        "Training of the curriculum agent": curves.trained(facts, "curriculum"),
        "Training of the executor": curves.trained(facts, "executor"),
    }
    drawn = {
        name: [chart for chart in charts if chart is not None] for name, charts in sections.items()
    }
    return (
        templates()
        .get_template("report.html")
        .render(
            facts=facts,
            headline=headline(facts),
            figures=figures(facts),
            sections={name: charts for name, charts in drawn.items() if charts},
            reasons=reasons(facts),
            stages=stage_rows(facts, storage, planned),
            seconds=stage_seconds(facts),
            browsable=[one.number for one in facts.iterations if one.counts],
            config=recipe.read_text(encoding="utf-8") if recipe.is_file() else "",
            **assets(),
        )
    )


def headline(facts: Facts) -> str:
    """Returns the outcome in one sentence; a change is claimed only if the interval excludes 0."""
    measured = [(i.number, i.heldout) for i in facts.iterations if i.heldout is not None]
    if not measured:
        return "No held-out tasks were evaluated in this co-evolution."
    (first, before), (last, after) = measured[0], measured[-1]
    if first == last:
        return f"The executor solves {after.success} of the held-out tasks after iteration {last}."
    try:
        change = compare(before, after).success
    except DataError:  # other held-out tasks, after a change of their file
        return f"The executor solves {after.success} of the held-out tasks after iteration {last}."
    told = f"{show(change.a, '%')} to {show(change.b, '%')}"
    if change.low is None or change.high is None or change.low <= 0 <= change.high:
        return f"Held-out accuracy did not change significantly in {last} iterations: {told}."
    moved = "rose" if change.value > 0 else "fell"
    points = f"{100 * change.low:+.1f} to {100 * change.high:+.1f} points"
    return f"Held-out accuracy {moved} in {last} iterations from {told} (95 % interval {points})."


def figures(facts: Facts) -> list[tuple[str, str, str]]:
    """Returns name, value and remark of the figures at the top."""
    found = []
    for one in [i for i in facts.iterations if i.heldout is not None][-1:]:
        assert one.heldout is not None
        remark = f"after iteration {one.number}, {one.heldout.success.num_tasks} tasks"
        found.append(("Held-out accuracy", show(one.heldout.success.value, "%"), remark))
    fronts = [i for i in facts.iterations if i.frontier is not None]
    for one in fronts[-1:]:
        assert one.frontier is not None
        assert fronts[0].frontier is not None
        first = show(fronts[0].frontier.pass_rate.value, "%")
        value = show(one.frontier.pass_rate.value, "%")
        remark = f"of the first executor on problems of iteration {one.number}; {first} on its own"
        found.append(("Frontier pass rate", value, remark))
    if kept := sum(one.counts.get("kept", 0) for one in facts.iterations):
        proposed = sum(one.counts.get("proposed", 0) for one in facts.iterations)
        found.append(("Problems kept", f"{kept:,}", f"of {proposed:,} proposals"))
    if facts.seconds:
        found.append(("Time", show(facts.seconds / 60) + " min", "of all complete stages"))
    return found


def reasons(facts: Facts) -> list[list[str]]:
    """A table of the reasons of rejection; without rows where nothing was rejected."""
    counted = [one for one in facts.iterations if one.counts]
    names = list(dict.fromkeys(name for one in counted for name in one.reasons))
    rows = [[name, *(f"{one.reasons.get(name, 0):,}" for one in counted)] for name in names]
    return [["rejected because", *(f"iteration {one.number}" for one in counted)], *rows]


def stage_rows(facts: Facts, storage: Storage, planned: Sequence[str]) -> list[dict[str, Any]]:
    """The stages with their state, their results, and the report of their run."""
    labels = [*planned, *(label for label in facts.stages if label not in planned)]
    rows = []
    for label in labels:
        result = dict(facts.stages.get(label, {}))
        link = storage.runs / str(result.pop("run", "")) / "report.html"
        seconds, beside = result.pop("seconds", None), result.pop("beside", None)
        told = [f"{name.replace('_', ' ')} {_told(value)}" for name, value in result.items()]
        told += [f"beside {beside}"] if beside else []
        rows.append(
            {
                "label": label,
                "complete": label in facts.stages,
                "seconds": seconds,
                "result": ", ".join(told),
                "link": str(link.relative_to(storage.root)) if link.is_file() else "",
            }
        )
    return rows


def stage_seconds(facts: Facts) -> dict[str, float]:
    """Seconds of each kind of stage, of all iterations together."""
    sums: dict[str, float] = {}
    for label, row in facts.stages.items():
        name = label.partition("/")[2] or label
        sums[name] = sums.get(name, 0.0) + float(row.get("seconds") or 0.0)
    return {name: sums[name] for name in ("start", *STAGES) if name in sums}


def _told(value: Any) -> str:
    return show(value) if isinstance(value, float) else str(value)
