"""Held-out evaluation of a policy; export of a run's checkpoints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ludus.config.schema import EvaluateConfig
from ludus.core.types import Group, Spec, Task
from ludus.envs import ENVS
from ludus.envs.base import Env, limits_of
from ludus.evaluate import summarise
from ludus.evaluate.results import Evaluation
from ludus.models.chat.template import load_template
from ludus.pipeline.build import Run
from ludus.pipeline.parts.tokenizer import make_renderer
from ludus.rollout.collect import Collector
from ludus.rollout.hosts.host import LocalEnvs
from ludus.store.folders import find_run
from ludus.store.settings import run_config
from ludus.train.checkpoint.export import export_hf
from ludus.train.checkpoint.policy import find_checkpoint, restore_policy, run_tokenizer


async def evaluate(
    run: Run, settings: EvaluateConfig, label: str, step: int = 0
) -> tuple[list[Group], Evaluation]:
    """Play held-out tasks with the current weights. Records nothing."""
    groups, result = await play_heldout(
        run.collector, run.splits.heldout, run.config.env, settings, label, step
    )
    return groups, result.model_copy(update={"policy_version": run.backend.sampler.policy_version})


async def play_heldout(
    collector: Collector,
    heldout: Sequence[Task],
    env_spec: Spec | None,
    settings: EvaluateConfig,
    label: str,
    step: int = 0,
) -> tuple[list[Group], Evaluation]:
    """Play and summarise held-out tasks with any collector.

    Errors: DataError where no episode could be scored.
    """
    collector = collector.with_config(
        f"evaluate/{label}", temperature=settings.temperature, top_p=1.0, top_k=0
    )
    collector = replace(collector, roles=collector.evaluated_roles)
    started = time.perf_counter()
    groups = await collector.collect(heldout[: settings.num_tasks], step, settings.samples_per_task)
    seconds = time.perf_counter() - started
    return groups, summarised(groups, collector, heldout, env_spec, settings, label, step, seconds)


def summarised(
    groups: Sequence[Group],
    collector: Collector,
    heldout: Sequence[Task],
    env_spec: Spec | None,
    settings: EvaluateConfig,
    label: str,
    step: int,
    seconds: float,
) -> Evaluation:
    """Returns the result of played held-out tasks. Errors: as `play_heldout`."""
    env = ENVS.build(env_spec, "env") if env_spec else None
    score_range, success_at = limits_of(env) if env else (None, 1.0)
    judged = collector.judge is not None or any(task.judge for task in heldout)
    of_its_own = any(task.judge or task.env for task in heldout)
    return summarise(
        groups,
        success_at=success_at,
        success_of=partial(_success_of, collector, LocalEnvs(env_spec), env)
        if of_its_own or (env and env.members())
        else None,
        score_range=None if judged else score_range,
        confidence=settings.confidence,
        label=f"{label} {step}" if step else label,
        temperature=settings.temperature,
        seconds=seconds,
    )


def _success_of(collector: Collector, envs: LocalEnvs, env: Env | None, task: Task) -> float:
    """The reward from which a task counts as solved: a judge's is 1."""
    if collector.judge or task.judge or envs.spec_of(task) is None:
        return 1.0
    return (env if env and task.env is None else envs.make(task)).success_of(task)


def export_checkpoint(
    run_id: str, runs_dir: str, checkpoint: str | None, path: Path, *, merge: bool, overwrite: bool
) -> None:
    """Write a checkpoint as a Hugging Face folder."""
    folder = find_run(runs_dir, run_id)
    info = find_checkpoint(folder, checkpoint)
    tokenizer = run_tokenizer(folder)
    config = run_config(folder)
    model, _ = restore_policy(config.model, tokenizer, config.seed, info.path)
    export_hf(
        model,
        tokenizer,
        path,
        merge=merge,
        overwrite=overwrite,
        chat_template=load_template(template) if (template := config.model.chat_template) else None,
        stop_token_ids=make_renderer(config, tokenizer).stop_token_ids,
        name=f"{folder.id}, {info.path.name}",
    )
