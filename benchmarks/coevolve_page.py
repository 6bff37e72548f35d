"""The page of several co-evolutions: tables and curves by iteration, over conditions and seeds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from common import machine, table

from ludus.coevolve.report.facts import Facts, Iteration, read_facts
from ludus.coevolve.report.problems import read_problems
from ludus.coevolve.storage import Storage
from ludus.envs.synthetic.problems import true_answer
from ludus.evaluate import compare
from ludus.evaluate.results import Evaluation
from ludus.judges.answer import parse_number

_NAME = re.compile(r"(.+)-seed(\d+)")

Value = Callable[["Run", Iteration], float | None]


@dataclass(frozen=True, slots=True)
class Run:
    """A co-evolution. `labels`: by iteration, the share of the kept problems whose label is the
    true answer; `asked`: the share of them that have one."""

    condition: str
    seed: int
    facts: Facts
    labels: dict[int, float]
    asked: dict[int, float]

    @property
    def last(self) -> int:
        """The last iteration with an evaluation."""
        return max((i.number for i in self.facts.iterations if i.heldout), default=0)

    def heldout(self, iteration: int) -> Evaluation | None:
        """The held-out evaluation after an iteration."""
        found = [i.heldout for i in self.facts.iterations if i.number == iteration]
        return found[0] if found else None


def read_runs(out: Path, order: Sequence[str]) -> list[Run]:
    """Read the co-evolutions of a folder, conditions in the given order, then by seed.

    Errors: SystemExit where there is none.
    """
    runs = []
    for state in out.glob("*/state.json"):
        if match := _NAME.fullmatch(state.parent.name):
            storage = Storage(state.parent)
            facts = read_facts(storage)
            shares = {
                i.number: label_shares(storage, i.number) for i in facts.iterations if i.counts
            }
            labels = {n: right for n, (right, _) in shares.items() if right is not None}
            asked = {n: share for n, (_, share) in shares.items() if share is not None}
            runs.append(Run(match[1], int(match[2]), facts, labels, asked))
    if not runs:
        raise SystemExit(f"{out} has no folder CONDITION-seedN with a state.json")
    places = {name: place for place, name in enumerate(order)}
    return sorted(runs, key=lambda run: (places.get(run.condition, 99), run.condition, run.seed))


def label_shares(storage: Storage, iteration: int) -> tuple[float | None, float | None]:
    """Of the kept problems: how many of those with a true answer have it as label; how many have a
    true answer. None: there are none."""
    kept = [problem for problem in read_problems(storage, iteration) if problem.is_kept]
    pairs = [(parse_number(p.answer or ""), true_answer(p.question or "")) for p in kept]
    known = [(label, answer) for label, answer in pairs if answer is not None]
    right = fmean(label == answer for label, answer in known) if known else None
    return right, len(known) / len(kept) if kept else None


MEASURES: dict[str, tuple[str, Value]] = {
    "Held-out accuracy": ("%", lambda run, i: i.heldout.success.value if i.heldout else None),
    "Frontier: pass rate of the first executor": (
        "%",
        lambda run, i: i.frontier.pass_rate.value if i.frontier else None,
    ),
    "Frontier: tool calls of the first executor": (
        "",
        lambda run, i: i.frontier.tool_calls if i.frontier else None,
    ),
    "Labels that are true": ("%", lambda run, i: run.labels.get(i.number)),
    "Kept problems with a true answer": ("%", lambda run, i: run.asked.get(i.number)),
    "Kept problems": ("n", lambda run, i: i.counts.get("kept")),
    "Distinct questions": ("%", lambda run, i: i.repetition.distinct if i.repetition else None),
    "Largest cluster of similar questions": (
        "%",
        lambda run, i: i.repetition.largest if i.repetition else None,
    ),
}
"""By title: the unit, and a run's value in an iteration."""

DRAWN = tuple(MEASURES)[:4]


def means(runs: Sequence[Run], value: Value) -> dict[str, dict[int, list[float]]]:
    """By condition and iteration, the values of the seeds that have one."""
    found: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        for iteration in run.facts.iterations:
            if (number := value(run, iteration)) is not None:
                row = found.setdefault(run.condition, {})
                row.setdefault(iteration.number, []).append(float(number))
    return found


def measure_table(runs: Sequence[Run], unit: str, value: Value) -> str:
    """Means over the seeds, with each seed's value in brackets."""
    rows = means(runs, value)
    iterations = sorted({number for row in rows.values() for number in row})

    def cell(values: list[float]) -> str:
        if not values:
            return ""
        each = ", ".join(_show(number, unit, bare=True) for number in values)
        return f"{_show(fmean(values), unit)} ({each})"

    head = ("condition", *(f"iteration {number}" for number in iterations))
    return table(
        head, [[name, *(cell(row.get(n, [])) for n in iterations)] for name, row in rows.items()]
    )


def seed_table(runs: Sequence[Run]) -> str:
    """Each run: both ends with their intervals, the paired gain, the gain of `full` over it."""
    full = {run.seed: run for run in runs if run.condition == "full"}
    rows = []
    for run in runs:
        before, after = run.heldout(0), run.heldout(run.last)
        cells = [run.condition, str(run.seed), str(run.last)]
        cells += [str(before.success) if before else "", str(after.success) if after else ""]
        cells.append(_gain(before, after) if run.last else "")
        cells.append(_apart(before, after) if run.last else "")
        other = full.get(run.seed)
        same = other is not None and other is not run and other.last == run.last
        cells.append(_gain(after, other.heldout(other.last)) if same and other else "")
        rows.append([*cells, f"{run.facts.seconds / 60:.1f}"])
    head = ("condition", "seed", "iterations", "before", "after", "gain, points", "apart")
    return table((*head, "`full` over it, points", "minutes"), rows)


def _gain(a: Evaluation | None, b: Evaluation | None) -> str:
    if a is None or b is None:
        return ""
    d = compare(a, b).success
    points = [100 * (value or 0) for value in (d.value, d.low, d.high)]
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*points)


def _apart(a: Evaluation | None, b: Evaluation | None) -> str:
    if a is None or b is None or a.success.high is None or b.success.low is None:
        return ""
    return "yes" if a.success.high < b.success.low else "no"


def _show(value: float, unit: str, *, bare: bool = False) -> str:
    if unit == "%":
        return f"{100 * value:.1f}" + ("" if bare else " %")
    return f"{value:,.0f}" if unit == "n" else f"{value:.2f}"


def draw(path: Path, runs: Sequence[Run]) -> None:
    """The measures of DRAWN by iteration: thick lines are means, thin ones seeds."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
    for axis, title in zip(axes.flat, DRAWN, strict=True):
        unit, value = MEASURES[title]
        scale = 100 if unit == "%" else 1
        names = list(dict.fromkeys(run.condition for run in runs))
        for run in runs:
            points = {i.number: value(run, i) for i in run.facts.iterations}
            known = {x: scale * y for x, y in points.items() if y is not None}
            color = f"C{names.index(run.condition) % 10}"
            axis.plot(list(known), list(known.values()), color=color, linewidth=0.6, alpha=0.5)
        for condition, row in means(runs, value).items():
            xs = sorted(row)
            ys = [scale * fmean(row[x]) for x in xs]
            color = f"C{names.index(condition) % 10}"
            axis.plot(xs, ys, "o-", color=color, linewidth=2, markersize=4, label=condition)
        axis.set(title=title, xlabel="iteration", ylabel=unit)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes.flat[0].legend(loc="best", frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def publish(out: Path, docs: Path, name: str, note: str, order: Sequence[str]) -> str:
    """Write the page, its picture and its figures; returns the page."""
    runs = read_runs(out, order)
    docs.mkdir(parents=True, exist_ok=True)
    draw(docs / f"{name}.svg", runs)
    found = {title: measure_table(runs, *measure) for title, measure in MEASURES.items()}
    tables = "\n\n".join(
        f"## {title}\n\n{text}" for title, text in found.items() if text.count("\n") > 1
    )
    facts = machine(1)
    seeds = sorted({run.seed for run in runs})
    conditions = list(dict.fromkeys(run.condition for run in runs))
    first = next((run.heldout(0) for run in runs if run.heldout(0)), None)
    tasks = f"{first.num_tasks} held-out tasks, {first.sampling}. " if first else ""
    command = f"--conditions {' '.join(conditions)} --seeds {' '.join(map(str, seeds))}"
    text = f"""\
# Co-evolution: {name}, {_count(conditions, "condition")}, {_count(seeds, "seed")}

{tasks}Brackets in this table: 95 % intervals, Wilson's for an accuracy, paired by task for a
difference. Apart: whether the intervals before and after do not overlap. Minutes: of all stages on
one thread, the first run (`start`) included, which the conditions of a seed share.

{seed_table(runs)}

![Curves by iteration]({name}.svg)

Thick: mean of the seeds. Thin: each seed. In the tables below, brackets hold the values of the
seeds that came so far.

{tables}

{note and f"{note}{chr(10)}{chr(10)}"}    python benchmarks/coevolve.py run --out DIR {command}
    python benchmarks/coevolve.py page --out DIR

## Machine

{facts["cpu"]}, {facts["cores"]} cores; Python {facts["python"]}, torch {facts["torch"]},
transformers {facts["transformers"]}. Figures: [{name}.json]({name}.json).
"""
    (docs / f"{name}.md").write_text(text)
    (docs / f"{name}.json").write_text(json.dumps(figures(runs), indent=1) + "\n")
    return text


def figures(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The values of all runs, for the JSON file."""
    return [
        {
            "condition": run.condition,
            "seed": run.seed,
            "minutes": round(run.facts.seconds / 60, 1),
            "iterations": {
                i.number: {
                    title: round(found, 4)
                    for title, (_, value) in MEASURES.items()
                    if (found := value(run, i)) is not None
                }
                for i in run.facts.iterations
            },
        }
        for run in runs
    ]


def _count(items: Sequence[Any], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"
