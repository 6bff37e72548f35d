"""Checks of a run that is resumed: changes without effect, and files that are gone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ludus.config.load import lookup
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, LudusError
from ludus.pipeline.sft_end import ended, rl_steps
from ludus.store.folders import RunFolder
from ludus.telemetry.metrics import MetricsLog
from ludus.train.checkpoint.listing import CheckpointInfo, list_checkpoints


def refuse_changes(
    folder: RunFolder, before: RunConfig, config: RunConfig, changes: Sequence[str]
) -> None:
    """Refuse what would have no effect, or what the run's results would no longer be of.

    Args:
        changes: dotted keys that differ between `before` and `config`.

    Errors: ConfigError.
    """
    if "env.name" in changes:
        raise ConfigError(
            f"env.name: run {folder.id} is of {lookup(before, 'env.name')}, not of "
            f"{lookup(config, 'env.name')}: start a new run for another environment"
        )
    for newest in list_checkpoints(folder.checkpoints)[-1:]:
        if newest.stage == "rl":
            _refuse_after_rl(folder, newest.step, config, changes)
        if "evaluate.before_sft" in changes:
            raise ConfigError(
                f"evaluate.before_sft: run {folder.id} is at {newest.path.name}, so the change has "
                "no effect: leave it out, or start a new run"
            )
        _refuse_after_sft(folder, newest, before, config, changes)


def _refuse_after_rl(
    folder: RunFolder, step: int, config: RunConfig, changes: Sequence[str]
) -> None:
    """Refuse changes of RL that come too late: the run is at `step` of it."""
    if config.rl is None:
        return
    steps = rl_steps(config, folder)
    of_steps = [key for key in ("rl.steps", "rl.steps_per_unused_sft_step") if key in changes]
    if of_steps and step > steps:
        left = steps - config.rl.steps
        told = f"{config.rl.steps} has"
        if left:
            told = f"{config.rl.steps} and the {left} that SFT has left have"
        raise ConfigError(
            f"{', '.join(of_steps)}: run {folder.id} is at RL step {step}, so {told} no effect: "
            "leave it out, or start a new run"
        )
    others = [key for key in changes if key.startswith("rl.") and key not in of_steps]
    if others and step >= steps:
        raise ConfigError(
            f"{', '.join(others)}: RL of run {folder.id} has ended (after step {step}), so the "
            "change has no effect: leave it out, give more rl.steps or start a new run"
        )


def _refuse_after_sft(
    folder: RunFolder,
    newest: CheckpointInfo,
    before: RunConfig,
    config: RunConfig,
    changes: Sequence[str],
) -> None:
    """Refuse changes of SFT that come too late."""
    of_sft = [key for key in changes if key.partition(".")[0] == "sft"]
    if of_sft and (why := _after_sft(folder, newest, before, config)):
        raise ConfigError(
            f"{', '.join(of_sft)}: SFT of run {folder.id} has ended ({why}), so the change has no "
            "effect: leave it out, or start a new run"
        )
    steps = config.sft.steps if config.sft else newest.step
    if "sft.steps" in changes and newest.stage == "sft" and newest.step > steps:
        raise ConfigError(
            f"sft.steps: run {folder.id} is at SFT step {newest.step} and cannot end at {steps}: "
            f"sft.steps={newest.step} ends SFT there"
        )


def require_files(folder: RunFolder) -> None:
    """Refuse a folder or a pipe in place of a file that the run writes. Errors: LudusError."""
    written = ("timings.json", "findings.json", "budget.json", "log.jsonl", "report.html")
    for path in (folder.path / name for name in written):
        if path.exists() and not path.is_file():
            raise LudusError(f"{path} is not a file, and the run has to write it: remove it")


def refuse_lost_checkpoints(folder: RunFolder, before: RunConfig, *, complete: bool) -> None:
    """Refuse to start over a run whose checkpoints are gone: its results would be discarded.

    Errors: LudusError.
    """
    path = folder.checkpoints
    if path.exists() and not path.is_dir():
        raise LudusError(f"{path} is not a folder: restore the run's checkpoints, or remove it")
    if path.exists() and any(child.is_dir() for child in path.iterdir()):
        return
    state = "complete" if complete else _beyond_a_checkpoint(folder, before)
    if state:
        raise LudusError(
            f"run {folder.id} is {state}, but has no checkpoints in {path}, so it would start "
            "over: restore that folder, or start a new run"
        )


def _beyond_a_checkpoint(folder: RunFolder, config: RunConfig) -> str:
    """The stage and step that the run has recorded, where a checkpoint was saved before it."""
    steps = _recorded_steps(folder)
    for stage in ("rl", "sft"):
        done = steps.get(stage, 0)
        if done > config.checkpoint.every or (stage == "rl" and done and "sft" in steps):
            return f"at step {done} of {stage}"
    return ""


def _recorded_steps(folder: RunFolder) -> dict[str, int]:
    """The number of steps of each stage in the metrics. Errors: DataError for a damaged line."""
    if not folder.metrics.exists():
        return {}
    return {line.stage: line.step + 1 for line in MetricsLog.read(folder.metrics)}


def losses(folder: RunFolder, *, known: bool) -> Iterator[str]:
    """Yields what a resumed run has lost of what its newest checkpoint was saved with.

    Args:
        known: the store has a row of the run.

    Errors: DataError for a damaged line of metrics.
    """
    steps = _recorded_steps(folder)
    for newest in list_checkpoints(folder.checkpoints)[-1:]:
        if steps.get(newest.stage, 0) < newest.step:
            yield (
                f"{folder.metrics} lacks steps before {newest.path.name}: so will the report, and "
                "its curves"
            )
        if not folder.budget.exists():
            yield f"{folder.budget} is missing: time and tokens count from 0, for limits too"
        if not known:
            yield "the store has no record of the run: earlier rollouts are missing from it"
        if folder.identity() is None:
            yield f"{folder.facts} is missing: checkpoints of another run cannot be told from its"


def _after_sft(
    folder: RunFolder, newest: CheckpointInfo, before: RunConfig, config: RunConfig
) -> str:
    """The evidence that SFT is over, with the settings of before and with the new; empty: it goes
    on, or more steps of it are asked for."""
    if newest.stage == "rl":
        return f"RL is at step {newest.step}"

    def is_over(recipe: RunConfig) -> bool:
        sft = recipe.sft
        return sft is not None and (
            newest.step >= sft.steps or ended(folder, recipe, newest.step) is not None
        )

    return f"after step {newest.step}" if is_over(before) and is_over(config) else ""
