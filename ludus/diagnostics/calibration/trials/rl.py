"""The trial of RL: groups at each temperature, and the seconds of a step."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from ludus.config.schema import RunConfig
from ludus.config.training import RLConfig, SFTUntilConfig
from ludus.core.types import Group, Status
from ludus.data.conversations import Conversation
from ludus.diagnostics.calibration.trials.steps import Metrics, run_steps
from ludus.diagnostics.calibration.trials.trial import Trial
from ludus.loop.metrics import group_metrics
from ludus.pipeline import sft_end
from ludus.pipeline.build import Run
from ludus.pipeline.rollout_processes import can_share
from ludus.pipeline.stages import rl_stage
from ludus.train.algorithms.credit import Outcome

RL_STEPS = 2
"""Steps of RL that are timed, after one that warms up."""

TEMPERATURES = (1.0, 1.2)
"""Rollout temperatures that are tried."""

NUM_GROUPS = 32
"""Groups that are played at each temperature."""

KEPT_S = 0.3e-3
"""Seconds per episode that a run takes to keep a step and that the trial's steps do not: measured
with short episodes, where it is a fifth of a step (docs/log.md)."""

GROUPS_S = 5.0
"""Seconds of these groups above which there are fewer, and likewise in the timed steps of RL."""

TRAINED = 0.65
"""Share of the groups that train in a step of RL: 0.43 to 0.72, and 0.62 on average, in six runs of
docs/benchmarks/init.md, where trials had 0.12 to 0.88."""

PLAYED = 0.75
"""Seconds of a step's episodes in two processes, over those in the trial's one (docs/log.md)."""

FEW_GROUPS = 4
"""The same in a slow environment."""

LONGEST_STEP_S = 5.0
"""Seconds of an RL step above which it has fewer groups: many steps beat large ones."""

LONG_S = 20.0
"""Seconds of 8 groups above which FEW_GROUPS are played."""


async def measure(
    run_: Run,
    trial: Trial,
    until: float,
    say: Callable[[str], object],
    slow: bool,
    turns: float,
) -> None:
    """Play groups at each temperature, then time RL, whose episodes will have about `turns`."""
    rl = run_.config.rl
    assert rl is not None
    number = FEW_GROUPS if slow else affordable(trial, run_.config, NUM_GROUPS)
    tasks = sft_end.unseen(run_, number)
    for temperature in TEMPERATURES[:1] if slow else TEMPERATURES:
        collector = run_.collector.with_config("trial", temperature=temperature)
        groups = await collector.collect(tasks, 0, rl.group_size)
        if not trial.signal:
            trial.growth = growth(groups, turns)
        measured = group_metrics(groups)
        trial.signal[temperature] = measured["rollout/groups_with_signal"]
        trial.success[temperature] = measured.get("rollout/success", 0.0)
        played = sum(len(group.trajectories) for group in groups)
        say(
            f"at temperature {temperature:g} {trial.success[temperature]:.0%} of {played:,} "
            f"sampled episodes of training tasks succeed, and {trial.signal[temperature]:.0%} of "
            f"the {len(groups)} groups have different rewards"
        )
        if time.perf_counter() > until:
            break  # the time of all trials is over
    number = rl.groups_per_step if slow else affordable(trial, run_.config, rl.groups_per_step)
    trial.rl_step_s = await time_rl(
        partial(seconds_of_a_group, run_, trial, until), number, until, rl
    )
    trial.eval_s *= trial.growth


def turns_at_start(config: RunConfig, conversations: Sequence[Conversation]) -> float:
    """Turns of an episode when RL begins: where it succeeds those of the expert, else all."""
    until = (config.sft and config.sft.until) or SFTUntilConfig()
    of_expert = fmean(sum(m.role == "assistant" for m in c.messages) for c in conversations)
    most = config.rollout.max_turns
    longest = most if isinstance(most, int) else 1
    return until.success * of_expert + (1 - until.success) * longest


def growth(groups: Sequence[Group], turns: float) -> float:
    """Turns of these episodes if those that a turn without an end cut go on for `turns`, over their
    turns now."""
    now = then = 0.0
    for played in (t for group in groups for t in group.trajectories if t.status.trainable):
        cut = played.status is Status.TRUNCATED_LENGTH and "context" not in (played.error or "")
        own = max(played.num_turns, 1)
        now, then = now + own, then + (max(own, turns) if cut else own)
    return then / now if now else 1.0


async def time_rl(
    seconds_a_group: Callable[[int], Awaitable[float]], number: int, until: float, rl: RLConfig
) -> float:
    """Seconds of a step of RL with the groups of `rl`, by steps with `number` of them. Where the
    recipe will have fewer, because a step takes long, by steps with so many: few take longer each.
    """
    group_s = await seconds_a_group(number)
    fewer = groups_of(group_s * rl.groups_per_step, rl.groups_per_step)
    if fewer < number and time.perf_counter() < until:
        group_s = await seconds_a_group(fewer)
    return group_s * rl.groups_per_step


def groups_of(step_s: float, groups_per_step: int) -> int:
    """Groups of a step, so few that it takes at most LONGEST_STEP_S, but at least 8; `step_s`: of a
    step with 32."""
    while groups_per_step > 8 and step_s * groups_per_step / 32 > LONGEST_STEP_S:
        groups_per_step //= 2
    return groups_per_step


async def seconds_of_a_group(run_: Run, trial: Trial, until: float, number: int) -> float:
    """Seconds of a step of RL with so many groups, over that number, when RL begins: timed with
    all groups, of which TRAINED will train."""
    rl = run_.config.rl
    assert rl is not None
    still = rl.optimizer.model_copy(update={"lr": 1e-8})  # the policy stays as it is
    smaller = rl.model_copy(update={"groups_per_step": number, "optimizer": still})
    timed = replace(run_, config=run_.config.model_copy(update={"rl": smaller}))
    stage, metrics = rl_stage(timed), Metrics()
    stage.algorithm = replace(stage.algorithm, keep=None, advantages=Outcome(_apart))
    await run_steps(timed, stage, metrics, 0, 1)
    if time.perf_counter() < until:
        await run_steps(timed, stage, metrics, 1, 1 + RL_STEPS)
    play_s, train_s = (metrics.mean(f"time/{part}_s", RL_STEPS) for part in ("rollout", "train"))
    if can_share(run_.config, run_.backend):
        play_s *= PLAYED
    step_s = trial.growth * (play_s + TRAINED * train_s)
    return step_s / number + KEPT_S * rl.group_size


def _apart(rewards: Sequence[float]) -> list[float]:
    """Advantages with which all episodes train: few groups of the trial may have different
    rewards, and which ones is chance."""
    return [(-1.0) ** index for index in range(len(rewards))]


def affordable(trial: Trial, config: RunConfig, most: int) -> int:
    """Groups that are played in about GROUPS_S by the measurement of SFT's end; at least 8, or half
    of them where 8 take LONG_S."""
    assert config.rl is not None
    until = (config.sft and config.sft.until) or SFTUntilConfig()
    each_s = trial.eval_s / (until.num_tasks * until.samples_per_task)
    group_s, number = config.rl.group_size * each_s, most
    while number > 8 and number * group_s > GROUPS_S:
        number //= 2
    return min(number, FEW_GROUPS) if number * group_s > LONG_S else number
