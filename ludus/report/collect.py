"""Collects a run's report from its folder and the run store."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ludus.config.load import dump_changes
from ludus.config.schema import RunConfig
from ludus.core.errors import DataError
from ludus.core.types import Task, Trajectory
from ludus.evaluate import compare
from ludus.evaluate.results import Comparison, Evaluation, read_evaluation
from ludus.report import ReportData, Rollout, write_report
from ludus.report.diagnosis import diagnose
from ludus.store import RunStatus, RunStore
from ludus.store.folders import RunFolder, disk_faults, find_run, read_facts, show_command
from ludus.store.rows import TrajectoryRow
from ludus.store.settings import run_config
from ludus.telemetry.metrics import Line, MetricsLog

MAX_FAILURES = 4
"""Tiers of which a failed held-out episode is shown."""

NAMES = {
    "start": "before SFT",
    "before": "before RL",
    "rl": "RL step {step}",
    "after": "after RL",
}
"""Display names of evaluations on held-out tasks, in order of time; those of `sft.until` are on
training tasks."""


def report(folder: RunFolder, store: RunStore) -> Path:
    """Write `report.html` into the run's folder."""
    config = run_config(folder)
    row = store.run(folder.id)
    evaluations = read_evaluations(folder, config)
    comparison, uncompared = compared(evaluations)
    lines = MetricsLog.read(folder.metrics)
    # By reason, without details of single episodes.
    dropped = Counter(row.reason.split(":")[0] for row in store.dropped(folder.id))
    data = ReportData(
        name=folder.id,
        # A run writes its report at its end, while it still counts as running.
        status="completed" if row.status == RunStatus.RUNNING else str(row.status),
        started=row.created.strftime("%Y-%m-%d %H:%M UTC"),
        records=_records(lines),
        evaluations=evaluations,
        evaluated_at=_evaluated_at(folder, config, lines),
        evaluated_note=_evaluated_note(config),
        findings=diagnose(config, lines, folder.id).findings,
        comparison=comparison,
        uncompared=uncompared,
        rollouts=_rollouts(folder, store, config),
        settings=_settings(config),
        changes=dump_changes(config),
        config=folder.config.read_text(encoding="utf-8"),
        versions={name: str(value) for name, value in row.versions.items()},
        timings=_timings(read_facts(folder.path / "timings.json"), lines),
        dropped=dict(dropped.most_common()),
    )
    return write_report(folder.report, data)


def report_again(run: str, runs_dir: str, store: str | None) -> Path:
    """Write a run's report again, from the store."""
    folder = find_run(runs_dir, run)
    config = run_config(folder)
    url = store or config.store
    with RunStore.open(url, folder.path.parent, read_only=True) as opened, disk_faults(folder):
        return report(folder, opened)


def read_evaluations(folder: RunFolder, config: RunConfig) -> dict[str, Evaluation]:
    """Returns the run's evaluations by display name, in order of time.

    Errors: DataError for a damaged file.
    """
    order = list(NAMES)
    files = [
        (order.index(label), step, _name(config, label, step), path)
        for label, step, path in folder.evaluation_files()
        if label in NAMES
    ]
    return {name: read_evaluation(path) for _, _, name, path in sorted(files)}


def _name(config: RunConfig, label: str, step: int) -> str:
    if label == "after" and config.rl is None:
        return "after SFT"
    return NAMES[label].format(step=step)


def compared(evaluations: Mapping[str, Evaluation]) -> tuple[Comparison | None, str]:
    """Returns the comparison of before and after RL, or why there is none, as after a change of the
    held-out tasks: a run has its report all the same. Without RL, of before and after SFT."""
    stage = "SFT" if "after SFT" in evaluations else "RL"
    names = (f"before {stage}", f"after {stage}")
    ends = [evaluations[name] for name in names if name in evaluations]
    if len(ends) < 2:
        return None, ""
    try:
        return compare(*ends), ""
    except DataError as error:
        return None, str(error)


def _evaluated_at(folder: RunFolder, config: RunConfig, lines: Sequence[Line]) -> dict[str, int]:
    """Returns the RL steps before each evaluation, by display name."""
    end = max((line.step + 1 for line in lines if line.stage == "rl"), default=0)
    at = {"start": 0, "before": 0, "after": end}
    return {
        _name(config, label, step): at.get(label, step)
        for label, step, _ in folder.evaluation_files()
        if label in NAMES
    }


def _evaluated_note(config: RunConfig) -> str:
    start = "after SFT" if config.sft else "of the untrained policy"
    if config.evaluate.before_sft:
        start = "before and after SFT"
    elif config.sft:
        start += "; the policy before SFT was not evaluated (evaluate.before_sft)"
    level = f"{100 * config.evaluate.confidence:g} % intervals (Wilson)"
    return f"Step 0: {start}. Bars: {level}; those of tiers are in the table."


def _timings(seconds: Mapping[str, Any], lines: Sequence[Line]) -> dict[str, float]:
    """Returns the seconds of each part, with recording taken out of `other`."""
    timings = {name: float(value) for name, value in seconds.items()}
    if (other := timings.pop("other", None)) is not None:
        recorded = math.fsum(line.metrics.get("time/record_s", 0.0) for line in lines)
        timings["recording"] = min(recorded, other)
        timings["start, loading, rest"] = other - timings["recording"]
    return timings


def _records(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Returns the metrics lines, with `time` as the run's elapsed seconds without pauses between
    resumes."""
    return [
        {
            **line.metrics,
            "stage": line.stage,
            "step": line.step,
            "time": line.metrics.get("time/elapsed_s", 0.0),
        }
        for line in lines
    ]


def _rollouts(folder: RunFolder, store: RunStore, config: RunConfig) -> list[Rollout]:
    """Returns failures on held-out tasks after training, and the best and the worst episode of the
    first and the last RL step."""
    steps = [row.step for row in store.steps(folder.id, "rl")]
    failures = _failures(folder, store, "RL" if config.rl else "SFT")
    if not steps and not failures:
        return []
    from ludus.models.chat.tokenizers import load_tokenizer  # a run without RL needs none

    tokenizer = load_tokenizer(str(folder.tokenizer))

    def texts(rollout: Any) -> list[Sequence[str]]:
        return [
            [str(tokenizer.decode([token])) for token in segment.token_ids]
            if segment.token_ids
            else [segment.message.content if segment.message else ""]
            for segment in rollout.segments
        ]

    def rollout(label: str, task: Task, trajectory: Trajectory, heldout: bool = False) -> Rollout:
        command = show_command(folder, trajectory.id)
        return Rollout(label, task, trajectory, texts(trajectory), command, heldout)

    chosen = [rollout(*failure, heldout=True) for failure in failures]
    for when, step in {"first": steps[0], "last": steps[-1]}.items() if steps else ():
        scored = [
            (trajectory.reward, group.task, trajectory)
            for group in store.groups(folder.id, "rl", step)
            for trajectory in group.trajectories
            if trajectory.reward is not None
        ]
        scored.sort(key=lambda item: (item[0], item[2].id))
        ends = {"best": scored[-1], "worst": scored[0]} if scored else {}
        for rank, (_, task, trajectory) in ends.items():
            label = f"{rank} of the {when} RL step ({step})"
            chosen.append(rollout(label, task, trajectory))
    return chosen


def _failures(
    folder: RunFolder, store: RunStore, last_stage: str
) -> list[tuple[str, Task, Trajectory]]:
    """Returns label, task and trajectory of a failed held-out episode after training of each tier,
    for the tiers with the most failures."""
    failed: dict[str, list[TrajectoryRow]] = {}
    for row in store.trajectories(folder.id, "evaluate/after"):
        if row.failed:
            failed.setdefault(row.tier or "", []).append(row)
    most = sorted(failed.items(), key=lambda item: (-len(item[1]), item[0]))[:MAX_FAILURES]
    found = []
    for tier, rows in most:
        record = store.record(folder.id, rows[0].id, "evaluate/after")
        of = f" of {tier}" if tier else ""
        label = f"held-out failure after {last_stage}, 1 of {len(rows)}{of}"
        found.append((label, record.task, record.trajectory))
    return found


def _settings(config: RunConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {"seed": config.seed}
    if config.env:
        settings["environment"] = config.env.name
    if config.sft:
        most = "at most " if config.sft.until else ""
        settings["SFT"] = (
            f"{most}{config.sft.steps} steps of {config.sft.episodes_per_step} episodes"
        )
    if config.rl:
        settings["algorithm"] = config.rl.algorithm.name
        episodes = f"{config.rl.groups_per_step} x {config.rl.group_size} episodes"
        settings["RL"] = f"{config.rl.steps} steps of {episodes}"
        if share := config.rl.steps_per_unused_sft_step:
            settings["RL"] += f", and {share:g} more for each step that SFT leaves unused"
        settings["learning rate"] = f"{config.rl.optimizer.lr:g}"
    return settings
