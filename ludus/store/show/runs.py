"""Runs: the list of them, and one at a glance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ludus.core.errors import counted
from ludus.store.rows import NO_TURN, RunRow, RunStatus, StageSummary
from ludus.store.show.episodes import NEWEST, last_stage, render_failures, trajectory_table
from ludus.store.show.tables import (
    facts_table,
    make_table,
    moment,
    number,
    progress,
    rule,
    took,
)
from ludus.store.store import RunStore

MAIN = (
    "rollout/success", "rollout/reward", "rollout/turns", "rollout/truncated", "rollout/excluded",
    "rollout/groups_with_signal", "train/loss", "train/entropy", "train/kl", "train/grad_norm",
    "train/lr", "time/step_s", "time/tokens_per_s",
)  # fmt: skip
"""Metrics that are shown of a stage that trains."""

_STATUS_STYLES = {
    RunStatus.RUNNING: "cyan",
    RunStatus.COMPLETED: "green",
    RunStatus.INTERRUPTED: "yellow",
    RunStatus.FAILED: "red",
}


def render_runs(store: RunStore, limit: int | None = None) -> RenderableType:
    """Returns a table of the `limit` newest runs, the newest last; None: of all."""
    runs = store.runs()
    if not runs:
        return Text(f"no runs in {store.url}: start one with ludus train RECIPE")
    rows = [
        (
            run.id,
            Text(run.status.value, _STATUS_STYLES[run.status]),
            moment(run.created),
            took(run),
            ", ".join(
                progress(stage, step)
                for stage, step in run.stages.items()
                if not stage.startswith("evaluate/")
            ),
            (run.error or "").partition("\n")[0],
        )
        for run in (runs[-limit:] if limit else runs)
    ]
    table = make_table(("run", "status", "started", "took", "stages", "error"), rows)
    if len(rows) == len(runs):
        return table
    hint = f"{counted(len(runs) - len(rows), 'older run')}: ludus runs --all"
    return Group(Text(hint, "dim"), table)


def render_run(store: RunStore, run_id: str, *, metrics: bool = False) -> RenderableType:
    """Returns one run: stages, metrics, drop reasons, and failures of the newest evaluation.

    Args:
        metrics: show all metrics of each stage, in place of MAIN of the stages that train.
    """
    run = store.run(run_id)
    facts = facts_table(
        {
            "run": run.id,
            "name": run.name,
            "status": run.status.value,
            "started": moment(run.created),
            "took": took(run),
            "held-out success": _heldout(store, run),
            "versions": ", ".join(f"{name} {version}" for name, version in run.versions.items()),
            "error": run.error,
        }
    )
    parts: list[RenderableType] = [facts]
    stages = store.summary(run_id)
    if stages:
        parts += [rule("stages"), _stages(stages)]
    cut = False
    for stage in stages:
        steps = store.steps(run_id, stage.stage)
        every = steps[-1].metrics if steps else {}
        shown = every if metrics else _main(stage.stage, every)
        cut |= len(shown) < len(every)
        if shown:
            title = f"{stage.stage}: step {steps[-1].step}"
            parts += [rule(title), _metrics(steps[0].metrics, shown)]
    if cut:
        parts.append(Text(f"ludus show {run_id} --metrics shows all metrics", "dim"))
    reasons = Counter((row.stage, row.reason) for row in store.dropped(run_id))
    if reasons:
        rows = [(*key, str(count)) for key, count in reasons.most_common()]
        parts += [rule("dropped"), make_table(("stage", "dropped because", "count"), rows)]
    hint = f"ludus show {run_id} ID shows one of them, token by token"
    if (total := sum(stage.num_trajectories for stage in stages)) > NEWEST:
        hint += f"\nludus export {run_id} FILE.jsonl writes all {total:,} trajectories"
    if failures := render_failures(store, run):
        return Group(*parts, *failures, Text(hint, "dim"))
    newest = list(store.trajectories(run_id, limit=NEWEST, newest_first=True))
    if newest:
        parts += [rule("newest trajectories"), trajectory_table(newest), Text(hint, "dim")]
    return Group(*parts)


def _main(stage: str, metrics: Mapping[str, float]) -> Mapping[str, float]:
    """Those of MAIN; none of an evaluation, and all of a back end with names of its own."""
    if stage.startswith("evaluate/"):
        return {}
    found = {name: metrics[name] for name in MAIN if name in metrics}
    if stage == "sft":  # its episodes are the expert's, and stay as they are
        found = {name: value for name, value in found.items() if "rollout/" not in name}
    return found or metrics


def _heldout(store: RunStore, run: RunRow) -> str:
    """Success on held-out tasks before SFT, before RL and in the newest evaluation since, with the
    gain on the tasks of both; empty where none was evaluated."""
    found = {
        label: steps[-1]
        for label in ("start", "before", "rl", "after")
        if (steps := store.steps(run.id, f"evaluate/{label}"))
    }
    told = []
    if start := found.get("start"):
        told.append(f"{_percent(start.metrics.get('evaluate/success'))} before SFT")
    if before := found.get("before"):
        told.append(f"{_percent(before.metrics.get('evaluate/success'))} before RL")
    if newest := found.get("after") or found.get("rl"):
        when = f"at step {newest.step}"
        if "after" in found:
            when = "after" if before else f"after {last_stage(run)}"
        told.append(f"{_percent(newest.metrics.get('evaluate/success'))} {when}")
        names = (f"evaluate/gain{end}" for end in ("", "_low", "_high"))
        gain, low, high = (newest.metrics.get(name) for name in names)
        if gain is not None and low is not None and high is not None:
            level = 100 * (run.config.get("evaluate") or {}).get("confidence", 0.95)
            told[-1] += f" ({100 * gain:+.1f} points on the tasks of both, {level:g} % interval "
            told[-1] += f"{100 * low:.1f} to {100 * high:.1f})"
    return ", ".join(told)


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.1f} %"


def _stages(stages: list[StageSummary]) -> Table:
    rows = [
        (
            stage.stage,
            str(stage.num_steps),
            str(stage.last_step),
            str(stage.num_trajectories - stage.num_without_turn),
            _rewards(stage),
            ", ".join(f"{how} {count}" for how, count in _ends(stage).items()),
        )
        for stage in stages
    ]
    return make_table(("stage", "steps", "last", "trajectories", "mean reward", "ended"), rows)


def _ends(stage: StageSummary) -> dict[str, int]:
    """Counts of the ends of episodes, for each role."""
    ends = {status.value: count for status, count in stage.statuses.items()}
    return ends | ({NO_TURN: stage.num_without_turn} if stage.num_without_turn else {})


def _rewards(stage: StageSummary) -> str:
    """The mean reward; of each role where there are several."""
    means = {role: mean for role, mean in stage.rewards.items() if mean is not None}
    if len(means) < 2:
        return number(stage.mean_reward)
    return ", ".join(f"{role} {number(mean)}" for role, mean in means.items())


def _metrics(first: Mapping[str, float], last: Mapping[str, float]) -> Table:
    rows = [(name, number(first.get(name)), number(value)) for name, value in last.items()]
    return make_table(("metric", "first", "last"), rows)
