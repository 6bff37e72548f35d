"""Tokenizer, model and weights of a run's policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ludus.config.schema import ModelConfig
from ludus.core.errors import CheckpointError, ConfigError, did_you_mean
from ludus.core.seeds import derive_seed
from ludus.models.build import build_model
from ludus.models.chat.tokenizers import load_tokenizer
from ludus.models.vocabulary import fingerprint
from ludus.store.folders import RunFolder, find_run
from ludus.train.checkpoint.listing import CheckpointInfo
from ludus.train.checkpoint.loading import load
from ludus.train.checkpoint.store import CheckpointStore

BEST, LATEST = "best", "latest"
"""Names of a run's checkpoints: the highest metric, and the newest."""


def build_policy(config: ModelConfig, tokenizer: Any, seed: int) -> Any:
    """Returns the model that a run with this seed starts from. Errors: ConfigError."""
    return build_model(config, tokenizer, derive_seed(seed, "model"))


def restore_policy(
    config: ModelConfig, tokenizer: Any, seed: int, checkpoint: Path
) -> tuple[Any, int]:
    """Returns a run's model with the weights of a checkpoint, and its policy version.

    Errors: ConfigError, CheckpointError.
    """
    model = build_policy(config, tokenizer, seed)
    state = load_trained(checkpoint, fingerprint(tokenizer), model=model)
    return model, int(state["policy_version"])


def load_trained(
    checkpoint: Path, own: str, *, model: Any, optimizer: Any = None
) -> dict[str, Any]:
    """Load a checkpoint, as `store.load` does, that was trained with the tokenizer of this
    fingerprint. Old checkpoints have none.

    Errors: CheckpointError.
    """
    state = load(checkpoint, model=model, optimizer=optimizer)
    require_same_tokenizer(checkpoint, state, own)
    return state


def require_same_tokenizer(checkpoint: Path, state: dict[str, Any], own: str) -> None:
    """Errors: CheckpointError where the checkpoint's tokenizer has another fingerprint."""
    if state.get("tokenizer", own) != own:
        raise CheckpointError(
            f"{checkpoint}: its weights were trained with another tokenizer: the run's folder "
            "`tokenizer` has other tokens or other ids. Restore that folder"
        )


def run_tokenizer(folder: RunFolder) -> Any:
    """Load the tokenizer of a run. Errors: ConfigError where the run has none yet."""
    if not folder.tokenizer.exists():
        refuse_lost_tokenizer(folder)
        raise ConfigError(f"run {folder.id} stopped before it had a tokenizer: resume it first")
    return load_tokenizer(str(folder.tokenizer))


def refuse_lost_tokenizer(folder: RunFolder) -> None:
    """Errors: ConfigError where a run without a tokenizer has checkpoints."""
    if any(folder.checkpoints.glob("*/")):
        raise ConfigError(
            f"run {folder.id} has checkpoints, but {folder.tokenizer} is gone: restore that folder "
            "(a new tokenizer would have other ids), or start a new run"
        )


def find_checkpoint(folder: RunFolder, name: str | None = None) -> CheckpointInfo:
    """Returns a run's checkpoint by name; `latest` and None: the newest; `best`: by its metric.

    Errors: ConfigError; CheckpointError where the newest, or the named one, is damaged.
    """
    store = CheckpointStore(folder.checkpoints)
    if name is None or name == LATEST:
        newest = store.latest()
        if newest is None:
            raise ConfigError(f"run {folder.id} has no checkpoint yet")
        return newest
    checkpoints = {info.path.name: info for info in store.list()}
    if name == BEST:
        best = store.best()
        if best is None:
            raise ConfigError(
                f"run {folder.id}: no checkpoint has a metric, so none is the best. An evaluation "
                f"of held-out tasks gives one (tasks.heldout, evaluate.every). Use {LATEST}, or "
                f"name a checkpoint{did_you_mean(name, checkpoints)}"
            )
        return best
    if name not in checkpoints:
        for problem in store.unreadable():
            if problem.checkpoint.name == name:
                raise CheckpointError(str(problem))
        near = did_you_mean(name, [BEST, LATEST, *checkpoints])
        raise ConfigError(f"run {folder.id} has no checkpoint {name!r}{near}")
    return checkpoints[name]


def find_run_checkpoint(runs_dir: str, name: str) -> tuple[RunFolder, str | None]:
    """Returns the run and the checkpoint's name of `RUN` or `RUN/CHECKPOINT`.

    Errors: ConfigError where there is no such run.
    """
    try:
        return find_run(runs_dir, name), None
    except ConfigError:
        run, _, checkpoint = name.rstrip("/").rpartition("/")
        try:
            return find_run(runs_dir, run), checkpoint
        except ConfigError:
            pass
        raise  # the error about the whole name
