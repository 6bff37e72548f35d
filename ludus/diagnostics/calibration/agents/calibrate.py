"""Calibrates the recipe of a user's agent: its episodes with a pretrained model are measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, pstdev
from tempfile import TemporaryDirectory
from typing import Any

from ludus.config.schema import RunConfig
from ludus.core.system.signals import run
from ludus.diagnostics.calibration import tokens
from ludus.diagnostics.calibration import warnings as foretold
from ludus.diagnostics.calibration.agents.episodes import AgentPlay, play_agent
from ludus.diagnostics.calibration.agents.subject import AgentSubject
from ludus.diagnostics.calibration.agents.warnings import of_play, of_steps, refuse_fruitless
from ludus.diagnostics.calibration.choices import NUM_HELDOUT, RESERVE_S
from ludus.diagnostics.calibration.distinct import num_distinct
from ludus.diagnostics.calibration.first import with_splits, with_tasks
from ludus.diagnostics.calibration.pretrained import device, with_starting_values
from ludus.diagnostics.calibration.starting import Start
from ludus.diagnostics.episodes import Usage
from ludus.diagnostics.hardware import find_hardware
from ludus.diagnostics.plan import plan, shape_of
from ludus.pipeline.parts.checks import check
from ludus.pipeline.parts.registries import check_judges
from ludus.tasks.readers import TaskList

PLAY_S = 40.0
"""Seconds for the agent's episodes."""

MAX_TOKENS = {"cpu": 256, "cuda": 1024}
"""Most tokens of a turn while the agent is measured."""

MAX_CONTEXT = {"cpu": 4096, "cuda": 16384}
"""Longest context of a recipe for an agent."""

CONCURRENCY = 64
"""Most episodes at the same time; each agent has a thread."""

CACHE = 0.25
"""Share of the memory that the keys and values of concurrent episodes may take."""

FEW_GROUPS, ENOUGH_STEPS = 8, 20
"""A step has fewer groups, but not fewer than these, until so many steps fit into the minutes."""

EVALUATION = 0.1
"""Share of the minutes for each whole evaluation, and for those in between together."""


@dataclass
class AgentCalibration:
    """Measurements and the configuration that follows from them; `warnings` in words.

    Args:
        step_s: expected seconds of a step of RL.
        seconds: that the calibration took.
    """

    subject: AgentSubject
    config: RunConfig
    play: AgentPlay
    distinct: float
    start: Start
    step_s: float
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0


def calibrate_agent(
    subject: AgentSubject, model: str, minutes: float, seed: int, say: Callable[[str], object]
) -> AgentCalibration:
    """Measure and choose. Errors: ConfigError, DataError where no recipe can learn."""
    begun = time.perf_counter()
    with TemporaryDirectory(prefix="ludus-init-", ignore_cleanup_errors=True) as folder:
        made = _calibrate(subject, model, minutes, seed, say, Path(folder))
    return replace(made, seconds=time.perf_counter() - begun)


def _calibrate(
    subject: AgentSubject,
    model: str,
    minutes: float,
    seed: int,
    say: Callable[[str], object],
    folder: Path,
) -> AgentCalibration:
    config = base(subject, seed, model)
    tokenizer = tokens.trained(config, (), ())  # a model that cannot be loaded is told first
    config = with_room(config)
    check(config)
    check_judges(config)
    known = subject.tasks.tasks or subject.tasks.take(NUM_HELDOUT, 0)
    distinct, reset_s = num_distinct(subject.tasks, known)
    config = with_tasks(config, subject.tasks, distinct, reset_s)
    config, splits = with_splits(config, subject.tasks)
    train = TaskList(splits.train[:NUM_HELDOUT])
    say(f"the agent plays with {model} for at most {PLAY_S:.0f} s")
    play = run(play_agent(config, tokenizer, train, folder, PLAY_S))
    refuse_fruitless(play, subject, PLAY_S)
    for line in lines(play):
        say(line)
    config = without_unused_judge(config, play)
    config = with_measured(config, play)
    config, start = with_starting_values(with_cache(config), minutes, say)
    config, step_s = with_steps(config, play, minutes, len(splits.train), len(splits.heldout))
    warnings = [
        *of_play(play, subject, config),
        *foretold.of_tasks(distinct, len(splits.heldout), subject.tasks.kind),
        *of_steps(config, step_s, minutes),
    ]
    return AgentCalibration(subject, config, play, distinct, start, step_s, warnings)


def base(subject: AgentSubject, seed: int, model: str) -> RunConfig:
    """The recipe with which the agent is measured."""
    where = device()
    kind = where.partition(":")[0]
    context = MAX_CONTEXT[kind]
    data: dict[str, Any] = {
        "name": subject.name,
        "seed": seed,
        "model": {"path": model, "device": where, "context_length": context},
        "agent": subject.agent,
        "env": subject.tasks.env,
        "judge": subject.judge,
        "tools": list(subject.tools),
        "limits": subject.limits,
        "tasks": {"train": subject.tasks.reader_of(64, 0)},
        "rollout": {
            "deterministic": False,  # an agent calls at any time
            "max_tokens_per_turn": MAX_TOKENS[kind],
            "tool_calls": subject.tool_calls,
            "concurrency": CONCURRENCY,
        },
        "rl": {"steps": 1, "tokens_per_batch": context},
    }
    return RunConfig.model_validate(data)


def with_room(config: RunConfig) -> RunConfig:
    """The recipe with a context of at most the model's own. Errors: ConfigError: no such model."""
    own = getattr(shape_of(config).get_text_config(), "max_position_embeddings", None)
    context = min(config.model.context_length, own or config.model.context_length)
    most = min(config.rollout.max_tokens_per_turn, max(context // 2, 1))
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"context_length": context}),
            "rollout": config.rollout.model_copy(update={"max_tokens_per_turn": most}),
        }
    )


def lines(play: AgentPlay) -> list[str]:
    """The measurements, in words."""
    calls, turns, lengths, rewards = play.calls, play.turns, play.lengths, play.rewards
    return [
        f"agent: {len(play.episodes)} episodes of {len(play.groups)} tasks, {fmean(calls):.1f} "
        f"calls (to {calls[-1]}); {len(play.failed)} failed, {play.overflown} outgrew the context",
        f"seconds: {play.episode_s:.2g} an episode where {play.waves[-1][1]} play at the same time;"
        f" one spends {play.own_s:.2g} besides its model's turns",
        f"tokens: first prompts to {lengths.prompt_max}, turns {fmean(turns):.0f} to {turns[-1]} "
        f"({play.cut_turns:.0%} cut at {play.max_tokens}), conversations "
        f"{lengths.episode_mean:.0f} to {lengths.episode_max}",
        f"rewards: {fmean(rewards):.2f} (standard deviation {pstdev(rewards):.2f}), "
        f"{play.signal:.0%} of {len(play.groups)} groups of "
        f"{len(play.groups[0].trajectories)} have different ones",
    ]


def without_unused_judge(config: RunConfig, play: AgentPlay) -> RunConfig:
    """The recipe without a judge that no episode needed: the agent returns its rewards."""
    return config if play.judged else config.model_copy(update={"judge": None})


def with_measured(config: RunConfig, play: AgentPlay) -> RunConfig:
    """Calls, tokens of a turn and the context, by the measured episodes."""
    lengths, calls = play.lengths, play.calls
    room = play.max_tokens
    if not play.cut_turns:
        room = min(32 * math.ceil(1.25 * (lengths.turn_max + 1) / 32), room)
    # A policy that learns may need more calls than its first episodes; an agent has limits of its
    # own for those that it makes in vain.
    most = max(2 * calls[-1], 2)
    in_row = play.turns_in_row if play.turns_in_row == 1 else math.ceil(1.25 * play.turns_in_row)
    grown = 1.25 * lengths.prompt_max + in_row * (lengths.per_turn_max + room - lengths.turn_mean)
    context = play.context if play.overflown else min(64 * math.ceil(grown / 64), play.context)
    context = max(context, room + 1)
    deadline = config.rollout.episode_deadline_s
    rollout = config.rollout.model_copy(
        update={
            "max_turns": most,
            "max_tokens_per_turn": room,
            "episode_deadline_s": max(deadline, 30.0 * math.ceil(play.longest_s / 3)),
        }
    )
    assert config.rl is not None
    return config.model_copy(
        update={
            "rollout": rollout,
            "model": config.model.model_copy(update={"context_length": context}),
            "rl": config.rl.model_copy(update={"tokens_per_batch": max(8192, context)}),
        }
    )


def with_cache(config: RunConfig) -> RunConfig:
    """As many episodes at the same time as have room in memory for their keys and values."""
    hardware = find_hardware("here", config.model)
    concurrency = CONCURRENCY
    while concurrency > 4:
        rollout = config.rollout.model_copy(update={"concurrency": concurrency})
        config = config.model_copy(update={"rollout": rollout})
        if plan(config, hardware).memory["KV cache"] <= CACHE * hardware.memory:
            break
        concurrency //= 2
    return config


def usage_of(play: AgentPlay) -> Usage:
    """The sizes of the measured episodes, for the estimate."""
    lengths = play.lengths
    turns = fmean(play.calls)
    sampled = lengths.turn_mean
    prompt = min(float(lengths.prompt_max), lengths.episode_mean)
    observed = max((lengths.episode_mean - prompt) / turns - sampled, 0.0)
    return Usage(prompt=prompt, observed=observed, sampled=sampled, turns=turns)


def with_steps(
    config: RunConfig, play: AgentPlay, minutes: float, num_train: int, num_heldout: int
) -> tuple[RunConfig, float]:
    """Steps, groups of a step and evaluations that fit into the minutes: an episode takes as long
    as measured, training as long as estimated. Returns the seconds of a step, too."""
    assert config.rl is not None
    hardware = find_hardware("here", config.model)
    one = config.rl.model_copy(update={"steps": 1})
    planned = plan(config.model_copy(update={"rl": one}), hardware, usage=usage_of(play))
    whole = 60.0 * minutes
    num = max(min(num_heldout, int(EVALUATION * whole / max(play.episode_s, 1e-3))), 8)
    num = min(num, num_heldout)
    left = whole - RESERVE_S - 2 * num * play.episode_s - EVALUATION * whole
    groups = min(config.rl.groups_per_step, num_train)
    while True:
        share = groups / config.rl.groups_per_step
        step_s = groups * config.rl.group_size * play.episode_s
        step_s += share * planned.seconds["rl: training"]
        steps = int(left / max(step_s, 1e-3))
        if steps >= ENOUGH_STEPS or groups <= FEW_GROUPS:
            break
        groups = max(groups // 2, FEW_GROUPS)
    steps = max(min(steps, 300), 1)
    every = max(steps // 4, 1)
    between = max(min(num, num // 2 + 1, 128), 1)
    optimizer = config.rl.optimizer.model_copy(update={"warmup_steps": min(5, steps // 5)})
    updates = {"steps": steps, "groups_per_step": groups, "optimizer": optimizer}
    evaluate = {"num_tasks": num, "num_tasks_between": between, "every": every}
    return config.model_copy(
        update={
            "rl": config.rl.model_copy(update=updates),
            "evaluate": config.evaluate.model_copy(update=evaluate),
        }
    ), step_s
