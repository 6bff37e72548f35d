"""Collects a run's report from its folder and the run store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ludus.config.load import load_config
from ludus.config.schema import RunConfig
from ludus.core.errors import DataError
from ludus.evaluate import compare
from ludus.evaluate.results import Evaluation
from ludus.report import ReportData, Rollout, write_report
from ludus.store import RunStore
from ludus.store.folders import RunFolder, disk_faults, find_run, read_facts
from ludus.telemetry.metrics import MetricsLog

NAMES = {"before": "before RL", "after": "after RL", "rl": "RL step {step}"}


def report(folder: RunFolder, store: RunStore) -> Path:
    """Write `report.html` into the run's folder."""
    config = load_config(folder.config)
    row = store.run(folder.id)
    evaluations = read_evaluations(folder)
    ends = [evaluations[name] for name in ("before RL", "after RL") if name in evaluations]
    # By reason, without details of single episodes.
    dropped = Counter(row.reason.split(":")[0] for row in store.dropped(folder.id))
    data = ReportData(
        name=folder.id,
        status=str(row.status) if row.error else "completed",
        started=row.created.strftime("%Y-%m-%d %H:%M UTC"),
        records=_records(folder),
        evaluations=evaluations,
        comparison=compare(*ends) if len(ends) == 2 else None,
        rollouts=_rollouts(folder, store),
        settings=_settings(config),
        config=folder.config.read_text(encoding="utf-8"),
        versions={name: str(value) for name, value in row.versions.items()},
        timings=read_facts(folder.path / "timings.json"),
        dropped=dict(dropped.most_common()),
    )
    return write_report(folder.report, data)


def report_again(run: str, runs_dir: str, store: str | None) -> Path:
    """Write a run's report again, from the store."""
    folder = find_run(runs_dir, run)
    config = load_config(folder.config)
    url = store or config.store
    with RunStore.open(url, folder.path.parent, read_only=True) as opened, disk_faults(folder):
        return report(folder, opened)


def read_evaluations(folder: RunFolder) -> dict[str, Evaluation]:
    """Returns the run's evaluations by display name, in order of time.

    Errors: DataError for a damaged file.
    """
    order = {"before": 0, "rl": 1, "after": 2}
    files = [
        (order.get(label, 1), step, NAMES.get(label, label).format(step=step), path)
        for label, step, path in folder.evaluation_files()
    ]
    return {name: _evaluation(path) for _, _, name, path in sorted(files)}


def _evaluation(path: Path) -> Evaluation:
    try:
        return Evaluation.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        raise DataError(
            f"{path} is no evaluation of a run: restore the file, or remove it to leave the "
            "evaluation out of the report"
        ) from None


def _records(folder: RunFolder) -> list[dict[str, Any]]:
    """Returns the metrics lines, with `time` as the run's elapsed seconds without pauses between
    resumes."""
    return [
        {
            **line.metrics,
            "stage": line.stage,
            "step": line.step,
            "time": line.metrics.get("time/elapsed_s", 0.0),
        }
        for line in MetricsLog.read(folder.metrics)
    ]


def _rollouts(folder: RunFolder, store: RunStore) -> list[Rollout]:
    """Returns the best and the worst episode of the first and the last RL step."""
    steps = [row.step for row in store.steps(folder.id, "rl")]
    if not steps:
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

    chosen: list[Rollout] = []
    for when, step in {"first": steps[0], "last": steps[-1]}.items():
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
            chosen.append(Rollout(label, task, trajectory, texts(trajectory)))
    return chosen


def _settings(config: RunConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {"seed": config.seed}
    if config.env:
        settings["environment"] = config.env.name
    if config.sft:
        settings["SFT"] = f"{config.sft.steps} steps of {config.sft.episodes_per_step} episodes"
    if config.rl:
        settings["algorithm"] = config.rl.algorithm.name
        episodes = f"{config.rl.groups_per_step} x {config.rl.group_size} episodes"
        settings["RL"] = f"{config.rl.steps} steps of {episodes}"
        settings["learning rate"] = f"{config.rl.optimizer.lr:g}"
    return settings
