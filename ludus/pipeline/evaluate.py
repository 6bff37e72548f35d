"""Evaluating and exporting the checkpoints of runs that are over, or still going on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console

from ludus.config.load import load_config
from ludus.core.errors import ConfigError, did_you_mean
from ludus.evaluate import compare, render_comparison, render_evaluation
from ludus.evaluate.results import Evaluation
from ludus.pipeline import TrainingRun
from ludus.pipeline.assemble import read_splits
from ludus.pipeline.progress import Display
from ludus.store.folders import RunFolder, find_run
from ludus.train.checkpoint.export import export_hf
from ludus.train.checkpoint.store import CheckpointInfo, CheckpointStore, load


def evaluate_checkpoints(
    run: str,
    runs_dir: str,
    checkpoints: Sequence[str | None],
    num_tasks: int | None,
    samples: int,
    temperature: float,
) -> list[Evaluation]:
    """Play the held-out tasks with each checkpoint (None: the newest); print and return results.

    Two checkpoints are compared by a paired test. Nothing is written to the run.
    """
    folder = find_run(runs_dir, run)
    infos = [_checkpoint(folder, name) for name in checkpoints]
    changes = {"num_tasks": num_tasks, "samples_per_task": samples, "temperature": temperature}
    prepared = _open(folder, [f"evaluate.{key}={json.dumps(changes[key])}" for key in changes])
    if not prepared.heldout:
        raise ConfigError(f"run {folder.id} has no held-out tasks: tasks.heldout is null")
    settings = prepared.config.evaluate
    console = Console()
    results: list[Evaluation] = []
    with closing(prepared.backend):
        for info in infos:
            state = load(info.path, model=prepared.model)
            prepared.backend.sampler.publish(state["policy_version"])
            _, result = asyncio.run(prepared.play("evaluate", 0, settings))
            result = result.model_copy(update={"label": info.path.name})
            console.print(render_evaluation(result))
            results.append(result)
    if len(results) == 2:
        console.print(render_comparison(compare(*results)))
    return results


def export_checkpoint(
    run: str, runs_dir: str, checkpoint: str | None, path: Path, *, merge: bool, overwrite: bool
) -> None:
    """Write a checkpoint as a Hugging Face folder."""
    folder = find_run(runs_dir, run)
    info = _checkpoint(folder, checkpoint)
    prepared = _open(folder)
    load(info.path, model=prepared.model)
    export_hf(
        prepared.model,
        prepared.tokenizer,
        path,
        merge=merge,
        overwrite=overwrite,
        stop_token_ids=prepared.renderer.stop_token_ids,
        name=f"{folder.id}, {info.path.name}",
    )


def _open(folder: RunFolder, overrides: Sequence[str] = ()) -> TrainingRun:
    """The run's objects, built for reading."""
    if not folder.tokenizer.exists():
        raise ConfigError(f"run {folder.id} stopped before it had a tokenizer: resume it first")
    config = load_config(folder.config, overrides)
    prepared = TrainingRun(folder, config, None, None, Display())
    prepared.build(read_splits(config)[1])
    return prepared


def _checkpoint(folder: RunFolder, name: str | None) -> CheckpointInfo:
    store = CheckpointStore(folder.checkpoints)
    if name is None:
        newest = store.latest()
        if newest is None:
            raise ConfigError(f"run {folder.id} has no checkpoint yet")
        return newest
    known = {info.path.name: info for info in store.list()}
    if name not in known:
        raise ConfigError(f"run {folder.id} has no checkpoint {name!r}{did_you_mean(name, known)}")
    return known[name]
