"""The report's HTML page.

    write_report(Path("runs/babyai/report.html"), ReportData(name="babyai", ...))

The page is self-contained: styles, script and pictures are inline, and a content security policy
forbids network access. Texts of models and environments are untrusted: Jinja escapes them, and the
policy allows only the page's own script, by its hash.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludus.core.files import atomic_write
from ludus.core.types import Segment, Task, Trajectory
from ludus.core.versions import spell_runs
from ludus.evaluate.results import Comparison, Difference, Estimate, Evaluation
from ludus.report import charts
from ludus.report.charts import CURVES, Curve, Record
from ludus.report.diagnosis.findings import Finding
from ludus.report.stacked import COLORS, make_stacked
from ludus.report.success import success_chart, tier_colors
from ludus.report.templates import assets, environment

MAX_TEXT = 20_000  # characters shown of one segment; the page reports the rest as cut


@dataclass(slots=True)
class Rollout:
    """A trajectory to show; `texts` holds each segment's text, or the texts of its tokens.

    With one text per token, sampled tokens show their sampling probability. `command` prints the
    rollout on a terminal. `heldout`: of an evaluation, so nothing of it was trained.
    """

    label: str
    task: Task
    trajectory: Trajectory
    texts: Sequence[str | Sequence[str]]
    command: str = ""
    heldout: bool = False


@dataclass(slots=True)
class ReportData:
    """The content of a report. Empty fields are omitted from the page.

    Args:
        records: rows of the metrics log: dictionaries with `stage`, `step`, `time` (seconds since
            the start of the run) and `stage/name` metrics. `rollout/episodes` counts the episodes
            of a step.
        evaluations: by name ("after SFT"), in order of time.
        evaluated_at: RL steps before each evaluation, by its name.
        evaluated_note: what the evaluations do not show.
        findings: of the diagnosis; None: it was not made.
        comparison: of the evaluations before and after training; gives the headline.
        uncompared: why there is none, where there are such evaluations.
        timings: seconds of each part of the run, in order.
        dropped: number of rows or episodes excluded from training, by reason.
        settings: the algorithm and the most important settings.
        changes: the keys of the configuration that differ from the defaults, as YAML.
        versions: of packages and the machine.
    """

    name: str
    status: str = "completed"
    started: str = ""
    outcome: str = ""
    records: Sequence[Record] = ()
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)
    evaluated_at: Mapping[str, int] = field(default_factory=dict)
    evaluated_note: str = ""
    comparison: Comparison | None = None
    uncompared: str = ""
    findings: Sequence[Finding] | None = None
    rollouts: Sequence[Rollout] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: str = ""
    config: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    curves: Sequence[Curve] = CURVES


def write_report(path: Path, data: ReportData) -> Path:
    """Write the page atomically and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, render(data).encode("utf-8", "replace"))
    return path


def render(data: ReportData) -> str:
    """Returns the page as text."""
    stacked = [make_stacked(data.records, stage) for stage in ("rl", "sft")]
    drawn = [charts.make_chart(data.records, curve) for curve in data.curves]
    curves = [chart for chart in drawn if chart is not None]
    axes = {plot.axis for chart in curves for plot in chart.plots}
    return (
        environment()
        .get_template("page.html")
        .render(
            data=data,
            outcome=data.outcome or headline(data),
            figures=key_figures(data),
            compared=_compared(data),
            success=success_chart(data.evaluations, data.evaluated_at, data.evaluated_note),
            tier_colors=tier_colors(data.evaluations),
            charts=curves,
            axes=[axis for axis in ("step", "episodes", "time") if axis in axes],
            sparks=charts.make_sparks(data.records, [chart.curve for chart in curves]),
            stacked=[chart for chart in stacked if chart is not None],
            rollouts=[view(rollout) for rollout in data.rollouts],
            timings=[
                (_part_name(part), _part_color(part), seconds)
                for part, seconds in data.timings.items()
                if seconds >= 0.05  # else it reads 0.0 s
            ],
            total=math.fsum(data.timings.values()),
            **assets(),
        )
    )


def headline(data: ReportData) -> str:
    """Returns the outcome in one sentence; a change is claimed only if the interval excludes 0."""
    if data.comparison is not None:
        d = data.comparison.success
        level = f"{d.test} {100 * data.comparison.confidence:g}\u202f% interval"
        change = f"{_share(d.a)} to {_share(d.b)}"
        if d.low is not None and d.low > 0:
            text = f"Success on held-out tasks rose from {change}"
        elif d.high is not None and d.high < 0:
            text = f"Success on held-out tasks fell from {change}"
        else:
            text = f"Success on held-out tasks did not change significantly, from {change}"
        return f"{text}: {_points(d)} ({level} {_range(d)}, {_tasks(data.comparison)})."
    if data.evaluations:
        last = list(data.evaluations.values())[-1]
        why = f" Not compared with the start: {data.uncompared}" if data.uncompared else ""
        return f"Success on held-out tasks: {_share(last.success.value)}{_ends(last.success)}.{why}"
    return "No held-out tasks were evaluated in this run."


def _tasks(comparison: Comparison) -> str:
    """The number of tasks compared, and of those that one of the evaluations did not play."""
    number = f"{comparison.success.num_tasks} tasks"
    if not comparison.num_unpaired:
        return number
    return f"{number} of both evaluations; {comparison.num_unpaired} were played in one alone"


def key_figures(data: ReportData) -> list[tuple[str, str, str]]:
    """Returns name, value and remark of the figures at the top."""
    figures = []
    for name, evaluation in _compared(data):
        remark = _ends(evaluation.success).strip(" ()") + f" · {evaluation.sampling}"
        figures.append((f"Success, {name}", _share(evaluation.success.value), remark))
    if data.comparison is not None:
        d = data.comparison.success
        p = "p\u00a0<\u00a00.001" if d.p_value < 0.001 else f"p\u00a0=\u00a0{d.p_value:.3f}"
        figures.append(("Difference", _points(d), f"{d.test}, {p}"))
    records = [record for record in data.records if record["stage"] == "rl"]
    if episodes := sum(record.get("rollout/episodes") or 0 for record in records):
        tokens = sum(record.get("rollout/sampled_tokens") or 0 for record in records)
        remark = f"{tokens:,.0f} tokens sampled" if tokens else ""
        figures.append(("Training episodes", f"{episodes:,.0f}", remark))
    if data.timings:
        total = charts.duration(math.fsum(data.timings.values()))
        figures.append(("Time", total, "all processes, without pauses"))
    return figures


def _compared(data: ReportData) -> list[tuple[str, Evaluation]]:
    """Returns the two compared evaluations; without a comparison, the first and the last."""
    items = list(data.evaluations.items())
    if data.comparison is not None:
        labels = {data.comparison.a, data.comparison.b}
        named = [(name, e) for name, e in items if name in labels or e.label in labels]
        if len(named) == 2:
            return named
    return items[:1] + items[1:][-1:]


def _part_name(part: str) -> str:
    """`rl/train` as `RL: training`."""
    stage, _, phase = part.rpartition("/")
    names = {"train": "training", "rollout": "episodes"}
    return f"{stage.upper()}: {names.get(phase, phase)}" if stage else part


def _part_color(part: str) -> int:
    """The colour that the part of a step has, where it is one."""
    of = {"rollout": "sample", "evaluation": "evaluate", "checkpoints": "checkpoint"}
    name = part.rpartition("/")[2]
    return COLORS.get(of.get(name, name), 8 if name == "recording" else 9)


@dataclass(frozen=True, slots=True)
class SegmentView:
    """One segment on the page. `tokens`: text and probability (None: unknown) of each token."""

    index: int
    role: str
    sampled: bool
    branch_of: int | None
    tokens: list[tuple[str, float | None]]
    num_tokens: int
    num_cut: int
    version: str


@dataclass(frozen=True, slots=True)
class RolloutView:
    """One rollout on the page."""

    label: str
    command: str
    task: Task
    trajectory: Trajectory
    trained: bool
    heldout: bool
    segments: list[SegmentView]


def view(rollout: Rollout) -> RolloutView:
    """Returns the view of a rollout for the template."""
    trajectory = rollout.trajectory
    pairs = zip(trajectory.segments, rollout.texts, strict=True)
    return RolloutView(
        label=rollout.label,
        command=rollout.command,
        task=rollout.task,
        trajectory=trajectory,
        trained=trajectory.dropped is None and trajectory.status.trainable and not rollout.heldout,
        heldout=rollout.heldout,
        segments=[_segment(i, segment, text) for i, (segment, text) in enumerate(pairs)],
    )


def _segment(index: int, segment: Segment, text: str | Sequence[str]) -> SegmentView:
    pieces = [text] if isinstance(text, str) else list(text)
    logprobs: Sequence[float | None] = [None] * len(pieces)
    if segment.logprobs is not None and len(segment.logprobs) == len(pieces):
        logprobs = segment.logprobs
    tokens: list[tuple[str, float | None]] = []
    left = MAX_TEXT
    for piece, logprob in zip(pieces, logprobs, strict=True):
        if left > 0:
            tokens.append((piece[:left], None if logprob is None else math.exp(min(logprob, 0.0))))
        left -= len(piece)
    author = "assistant" if segment.sampled else "given"
    return SegmentView(
        index=index,
        role=segment.message.role if segment.message else author,
        sampled=segment.sampled,
        branch_of=None if segment.parent == index - 1 else segment.parent,
        tokens=tokens,
        num_tokens=len(segment.token_ids),
        num_cut=max(0, -left),
        version=spell_runs(segment.runs),
    )


def _share(value: float) -> str:
    return f"{100 * value:.1f}\u202f%"


def _ends(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f" ({100 * estimate.low:.1f} to {100 * estimate.high:.1f}\u202f%)"


def _points(d: Difference) -> str:
    return f"{100 * d.value:+.1f} points"


def _range(d: Difference) -> str:
    if d.low is None or d.high is None:
        return "unknown"
    return f"{100 * d.low:+.1f} to {100 * d.high:+.1f}"
