"""Runs and their curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, func, select

from ludus.services.viewer.curves import Columns, Curves
from ludus.services.viewer.rollout import clipped, is_training, number
from ludus.services.viewer.source import NoRuns, RunHead, Source
from ludus.store import schema as db
from ludus.store.search import statuses, tools
from ludus.store.store import UnknownName, run_key

MAX_RUNS = 200
MAX_CURVES = 24
FIRST = (
    "rollout/reward", "rollout/success", "evaluate/success", "train/loss", "rollout/turns",
    "train/entropy", "train/kl", "train/grad_norm", "rollout/groups_with_signal",
    "rollout/dropped", "time/tokens_per_s", "time/step_s",
)  # fmt: skip
"""Curves shown where none is named, in this order."""

EVALUATION = "evaluate/"


def list_runs(source: Source, before: int | None) -> dict[str, Any]:
    """Returns the newest runs, and the `before` of the next page."""
    try:
        heads = source.heads(MAX_RUNS + 1, before)
    except NoRuns as error:
        return {"runs": [], "next": None, "message": str(error), "unrecorded": []}
    shown = heads[:MAX_RUNS]
    lost = source.unrecorded(source.store().run_ids()) if before is None else []
    return {
        "runs": [_head(source, head) for head in shown],
        "next": shown[-1].key if len(heads) > MAX_RUNS else None,
        "message": None if heads else "The store holds no runs yet: `ludus train RECIPE`",
        "unrecorded": lost,
    }


def describe_run(source: Source, run: str) -> dict[str, Any]:
    """Returns one run with the newest metrics of its stages. Errors: UnknownName, StoreError."""
    store = source.store()
    row = store.run(run)
    head = RunHead(
        0, row.id, row.name, row.status.value, row.created.timestamp(),
        None if row.finished is None else row.finished.timestamp(), row.error, dict(row.stages),
        None if row.last_step is None else row.last_step.timestamp(), None,
    )  # fmt: skip
    return _head(source, head) | {
        "live": source.live(run),
        "findings": source.findings(run),
        "elapsed_s": number(row.elapsed_s),
        "metrics": store.read(lambda connection: _newest(connection, run)),
        "tools": tools(store, run),
        "statuses": [status.value for status in statuses(store, run)],
        "versions": {str(name): clipped(str(v), 500) for name, v in row.versions.items()},
        "config": _plain(row.config),
    }


def _newest(connection: Connection, run: str) -> dict[str, dict[str, Any]]:
    """The metrics of the last step of each stage, in order of their start."""
    s = db.steps.c
    of_run = s.run_key == run_key(connection, run)
    ends = select(func.min(s.key).label("first"), func.max(s.key).label("last")).where(of_run)
    found = ends.group_by(s.stage).subquery()
    rows = select(s.stage, s.metrics).join(found, found.c.last == s.key).order_by(found.c.first)
    return {
        row.stage: {name: number(value) for name, value in row.metrics.items()}
        for row in connection.execute(rows)
    }


def _head(source: Source, head: RunHead) -> dict[str, Any]:
    live = source.live(head.id) if head.status == "running" else None
    return {
        **asdict(head),
        "error": clipped(head.error or "", 4000) or None,
        "is_live": bool(live and not live["stale"]),
    }


def curves_of(
    source: Source,
    curves: Curves,
    runs: Sequence[str],
    stage: str | None,
    names: Sequence[str] | None,
    axis: str,
    points: int,
) -> dict[str, Any]:
    """Returns the curves of a stage by name and run; with RL also those of the evaluations.

    Unknown runs are left out. `stage` None: `rl`, else the last stage that trains.
    """
    store = source.store()
    found: dict[str, dict[str, Columns]] = {}
    missing = []
    for run in dict.fromkeys(runs):
        try:
            found[run] = curves.of(store, run)
        except UnknownName:
            missing.append(run)
    stages = list(dict.fromkeys(s for of_run in found.values() for s in of_run if is_training(s)))
    stage = stage or ("rl" if "rl" in stages else stages[-1] if stages else "rl")
    shown = {run: _shown(of_run, stage) for run, of_run in found.items()}
    known = list(
        dict.fromkeys(n for of_run in shown.values() for c in of_run.values() for n in c.columns)
    )
    wanted = list(dict.fromkeys(names or [name for name in FIRST if name in known]))[:MAX_CURVES]
    charts = [
        {
            "name": name,
            "series": [s for run in shown for s in _series(run, shown[run], name, axis, points)],
        }
        for name in wanted
    ]
    return {
        "stage": stage,
        "stages": stages,
        "names": sorted(known),
        "charts": [chart for chart in charts if chart["series"]],
        "missing": missing,
    }


def _shown(stages: dict[str, Columns], stage: str) -> dict[str, Columns]:
    return {
        name: columns
        for name, columns in stages.items()
        if name == stage or (name.startswith(EVALUATION) and stage == "rl")
    }


def _series(
    run: str, stages: dict[str, Columns], name: str, axis: str, points: int
) -> list[dict[str, Any]]:
    """The curves of a metric: one of the stage, one of all evaluations together."""
    series = []
    evaluated: list[list[float]] = []
    for stage, columns in stages.items():
        found = columns.points(name, axis, points)
        if not stage.startswith(EVALUATION):
            if found:
                series.append({"run": run, "stage": stage, "points": found})
            continue
        if stage == "evaluate/after" and axis == "step" and "rl" in stages:
            found = [[stages["rl"].steps[-1] + 1, *point[1:]] for point in found]
        evaluated += found
    if evaluated:
        series.append({"run": run, "stage": "evaluate", "points": sorted(evaluated)})
    return series


def _plain(value: Any) -> Any:
    """A configuration as JSON: floats that are not finite as text."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
