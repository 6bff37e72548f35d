"""Held-out evaluation of a policy; evaluation and export of a run's checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console

from ludus.config.load import load_config
from ludus.config.schema import EvaluateConfig
from ludus.core.errors import ConfigError
from ludus.core.signals import run as run_async
from ludus.core.types import Group
from ludus.envs import ENVS
from ludus.evaluate import compare, render_comparison, render_evaluation, summarise
from ludus.evaluate.results import Evaluation
from ludus.pipeline.build import Run, build
from ludus.pipeline.registries import check_samples
from ludus.pipeline.splits import read_splits
from ludus.pipeline.tokenizer import make_renderer
from ludus.store.folders import find_run
from ludus.train.checkpoint.export import export_hf
from ludus.train.checkpoint.policy import find_checkpoint, restore_policy, run_tokenizer


async def evaluate(
    run: Run, settings: EvaluateConfig, label: str, step: int = 0
) -> tuple[list[Group], Evaluation]:
    """Play held-out tasks with the current weights. Records nothing."""
    collector = run.collector.with_config(
        f"evaluate/{label}", temperature=settings.temperature, top_p=1.0, top_k=0
    )
    started = time.perf_counter()
    tasks = run.splits.heldout[: settings.num_tasks]
    groups = await collector.collect(tasks, step, settings.samples_per_task)
    env = ENVS.build(run.config.env, "env") if run.config.env else None
    result = summarise(
        groups,
        success_at=env.success_at if env else 1.0,
        success_of=env.success_of if env and env.members() else None,
        confidence=settings.confidence,
        label=f"{label} {step}" if step else label,
        policy_version=run.backend.sampler.policy_version,
        temperature=settings.temperature,
        seconds=time.perf_counter() - started,
    )
    return groups, result


def evaluate_checkpoints(
    run_id: str,
    runs_dir: str,
    checkpoints: Sequence[str | None],
    num_tasks: int | None,
    samples: int,
    temperature: float,
) -> list[Evaluation]:
    """Evaluate each checkpoint (None: the newest) on the held-out tasks; print the results.

    Compares two checkpoints by a paired test. Writes nothing to the run.
    """
    folder = find_run(runs_dir, run_id)
    infos = [find_checkpoint(folder, name) for name in checkpoints]
    tokenizer = run_tokenizer(folder)
    changes = {"num_tasks": num_tasks, "samples_per_task": samples, "temperature": temperature}
    config = load_config(
        folder.config, [f"evaluate.{key}={json.dumps(value)}" for key, value in changes.items()]
    )
    check_samples(config.evaluate)
    splits = read_splits(config, folder)
    if not splits.heldout:
        raise ConfigError(f"run {folder.id} has no held-out tasks: tasks.heldout is null")
    run = build(config, folder, splits, tokenizer)
    console = Console()
    results: list[Evaluation] = []
    with closing(run.backend):
        for info in infos:
            run.backend.load_weights(info.path)
            _, result = run_async(evaluate(run, config.evaluate, "evaluate"))
            result = result.model_copy(update={"label": info.path.name})
            console.print(render_evaluation(result))
            results.append(result)
    if len(results) == 2:
        console.print(render_comparison(compare(*results)))
    return results


def export_checkpoint(
    run_id: str, runs_dir: str, checkpoint: str | None, path: Path, *, merge: bool, overwrite: bool
) -> None:
    """Write a checkpoint as a Hugging Face folder."""
    folder = find_run(runs_dir, run_id)
    info = find_checkpoint(folder, checkpoint)
    tokenizer = run_tokenizer(folder)
    config = load_config(folder.config)
    model, _ = restore_policy(config.model, tokenizer, config.seed, info.path)
    export_hf(
        model,
        tokenizer,
        path,
        merge=merge,
        overwrite=overwrite,
        stop_token_ids=make_renderer(config, tokenizer).stop_token_ids,
        name=f"{folder.id}, {info.path.name}",
    )
