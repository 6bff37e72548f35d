"""What a run refuses when it is resumed: changes without effect, and checkpoints that are gone."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.config.load import lookup
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, LudusError
from ludus.store.folders import RunFolder
from ludus.train.checkpoint.listing import list_checkpoints


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
    steps = config.rl.steps if config.rl else 0
    for newest in list_checkpoints(folder.checkpoints)[-1:]:
        if "rl.steps" in changes and newest.stage == "rl" and newest.step > steps:
            raise ConfigError(
                f"rl.steps: run {folder.id} is at RL step {newest.step}, so {steps} has no effect: "
                "leave it out, or start a new run"
            )
    of_sft = [key for key in changes if key.partition(".")[0] == "sft"]
    if of_sft and (why := _after_sft(folder, before, config)):
        raise ConfigError(
            f"{', '.join(of_sft)}: SFT of run {folder.id} has ended ({why}), so the change has no "
            "effect: leave it out, or start a new run"
        )


def refuse_lost_checkpoints(folder: RunFolder, *, complete: bool) -> None:
    """Refuse to start over a run whose checkpoints are gone: its results would be discarded.

    Errors: LudusError.
    """
    path = folder.checkpoints
    if path.exists() and not path.is_dir():
        raise LudusError(f"{path} is not a folder: restore the run's checkpoints, or remove it")
    found = [child for child in path.iterdir() if child.is_dir()] if path.exists() else []
    if complete and not found:
        raise LudusError(
            f"run {folder.id} is complete, but has no checkpoints in {path}, so it would start "
            "over: restore that folder, or start a new run"
        )


def _after_sft(folder: RunFolder, before: RunConfig, config: RunConfig) -> str:
    """The evidence that SFT is over, with the settings of before and with the new; empty: it goes
    on, or more steps of it are asked for."""
    checkpoints = list_checkpoints(folder.checkpoints)
    if not checkpoints:
        return ""
    newest = checkpoints[-1]
    if newest.stage == "rl":
        return f"RL is at step {newest.step}"
    if any(c.sft is None or newest.step < c.sft.steps for c in (before, config)):
        return ""
    return f"after step {newest.step}"
