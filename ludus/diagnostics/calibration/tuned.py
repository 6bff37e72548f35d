"""The configuration as the measurements of the trials tune it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ludus.config.schema import RunConfig, TasksConfig
from ludus.core.system.machine import num_cores
from ludus.core.types import Spec
from ludus.diagnostics.calibration import choices
from ludus.diagnostics.calibration.trials.dtypes import at_dtype
from ludus.diagnostics.calibration.trials.rl import groups_of
from ludus.diagnostics.calibration.trials.trial import Trial
from ludus.pipeline.monitoring.rl_end import can_end

MAX_DEMONSTRATIONS = 6000
"""Most demonstrations of a recipe."""

DEMONSTRATIONS_SHARE = 0.2
"""Share of the minutes in which the expert may play them."""

FEW_MEASURED = 16
"""Episodes of a measurement of `sft.until` where steps take long."""

NUM_BETWEEN = 128
"""Held-out tasks of an evaluation during RL."""


def with_measurement(config: RunConfig, num_train: int) -> RunConfig:
    """The recipe that measures the end of SFT on the tasks that it does not show, or on all where
    these are too few."""
    if config.sft is None or config.sft.until is None:
        return config
    num_tasks, samples = choices.measured_episodes(num_train)
    measured = {"num_tasks": num_tasks, "samples_per_task": samples}
    until = config.sft.until.model_copy(update=measured)
    return config.model_copy(update={"sft": config.sft.model_copy(update={"until": until})})


def with_few_episodes(config: RunConfig) -> RunConfig:
    """The recipe for an environment whose steps take long: fewer episodes in each step."""
    assert config.sft is not None
    assert config.rl is not None
    until = config.sft.until
    if until is not None:
        num_tasks = min(until.num_tasks, FEW_MEASURED)
        samples = min(until.samples_per_task, -(-FEW_MEASURED // num_tasks))
        until = until.model_copy(update={"num_tasks": num_tasks, "samples_per_task": samples})
    few = {"groups_per_step": 8, "group_size": 4, "minibatches": 1}
    return config.model_copy(
        update={
            "sft": config.sft.model_copy(update={"until": until}),
            "rl": config.rl.model_copy(update=few),
        }
    )


def with_target(config: RunConfig, chance: float) -> RunConfig:
    """The recipe whose SFT ends at a success that a policy has not by chance."""
    assert config.sft is not None
    assert config.sft.until is not None
    until = config.sft.until.model_copy(update={"success": choices.target(chance)})
    return config.model_copy(update={"sft": config.sft.model_copy(update={"until": until})})


def with_choices(
    config: RunConfig,
    trial: Trial,
    minutes: float,
    episodes_per_s: float,
    episode_tokens: float,
) -> tuple[RunConfig, choices.Steps]:
    """Type of products, learning rate, temperature and steps, by the trials.

    Args:
        episode_tokens: tokens that an episode samples, by those of the expert's.
    """
    assert config.sft is not None
    assert config.rl is not None
    until = config.sft.until
    assert until is not None
    success = choices.target_after(trial, until.success)
    until = until.model_copy(update={"success": success})
    num_train = num_tasks_of(config.tasks.train)
    for_seconds = DEMONSTRATIONS_SHARE * 60 * minutes * episodes_per_s
    expected = choices.expected_sft(trial, until.success)
    wanted = max(2 * (expected or 10**6) * config.sft.episodes_per_step, 1000)
    demonstrated = num_train - choices.undemonstrated(num_train)
    number = int(min(MAX_DEMONSTRATIONS, demonstrated, max(for_seconds, 64), wanted))
    groups = groups_of(trial.rl_step_s, config.rl.groups_per_step)
    trial = replace(trial, rl_step_s=trial.rl_step_s * groups / config.rl.groups_per_step)
    tasks, evaluations_s = fewer_heldout(
        config.tasks, trial.eval_s / (until.num_tasks * until.samples_per_task), minutes
    )
    num_heldout = num_tasks_of(tasks.heldout)
    plan = partial(
        choices.steps,
        trial,
        minutes,
        number / episodes_per_s,
        success=until.success,
        evaluations_s=evaluations_s,
    )
    every = choices.measure_every(trial, until.success)
    planned = plan(every)
    if expected is None or expected > planned.sft:
        rarely = choices.measure_every(trial, until.success, choices.MEASURED_HARD)
        every = max(rarely, planned.sft // choices.MOST_MEASURED)
        planned = plan(every)
    if every > (often := max(planned.sft // choices.LEAST_MEASURED // 10 * 10, 10)):
        every, planned = often, plan(often)
    every = min(every, planned.sft)
    patience = choices.patience(planned.sft, every, until.patience)
    until = until.model_copy(
        update={
            "every": every,
            "patience": patience,
            "min_gain": choices.MIN_GAIN,
            "min_steps": choices.min_steps(trial, planned.sft, every),
        }
    )
    minibatches = choices.minibatches(groups * config.rl.group_size)
    free = {"lr": choices.RL_RATE_FREE, "target_kl": None}
    held = {"lr": choices.RL_RATE, "target_kl": choices.target_kl(episode_tokens)}
    updates: dict[str, Any] = {
        "tasks": tasks,
        "sft": config.sft.model_copy(
            update={
                "steps": planned.sft,
                "until": until,
                "optimizer": config.sft.optimizer.model_copy(update={"lr": trial.rate}),
            }
        ),
        "rl": config.rl.model_copy(
            update={
                "steps": planned.rl,
                "steps_per_unused_sft_step": planned.more,
                "groups_per_step": groups,
                "minibatches": minibatches,
                "min_success_to_stop": choices.STOP if success >= choices.NEARLY_ALL else None,
                "optimizer": config.rl.optimizer.model_copy(
                    update={"warmup_steps": min(10, planned.likely // 5)}
                    | (held if minibatches > 1 else free)
                ),
            }
        ),
        "rollout": config.rollout.model_copy(update={"temperature": choices.temperature(trial)}),
        "evaluate": config.evaluate.model_copy(
            update={
                "every": planned.every,
                "num_tasks_between": NUM_BETWEEN if num_heldout > NUM_BETWEEN else None,
            }
        ),
    }
    if config.demonstrations is not None:
        updates["demonstrations"] = config.demonstrations.model_copy(
            update={"num_episodes": max(number, 1), "num_workers": num_cores()}
        )
    if can_end(updates["rl"], updates["sft"]):
        updates["rl"] = updates["rl"].model_copy(update={"min_signal": choices.MIN_SIGNAL})
    config = config.model_copy(update=updates)
    return at_dtype(config, trial.dtype) if trial.step_s else config, planned


def fewer_heldout(
    tasks: TasksConfig, episode_s: float, minutes: float
) -> tuple[TasksConfig, float]:
    """As many of the held-out tasks as the minutes allow, and the seconds of all evaluations: two
    of them all, and about four of NUM_BETWEEN during RL."""
    assert tasks.heldout is not None
    number = choices.affordable_heldout(num_tasks_of(tasks.heldout), episode_s, minutes)
    key = "num_tasks" if "num_tasks" in tasks.heldout.args else "limit"
    fewer = tasks.heldout.model_copy(update={"args": {**tasks.heldout.args, key: number}})
    seconds = (2 * number + 4 * min(number, NUM_BETWEEN)) * episode_s
    return tasks.model_copy(update={"heldout": fewer}), seconds


def num_tasks_of(reader: Spec | None) -> int:
    """Number of tasks of one of the recipe's readers."""
    if reader is None:
        return 0
    return int(reader.args.get("num_tasks", reader.args.get("limit", 0)))
