"""Short trials of a recipe: SFT at several learning rates, then a few steps of RL.

Nothing is kept: the runs live in a temporary folder, and the recipe starts from the beginning.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, cast

from ludus.backends.local import LocalBackend
from ludus.config.schema import RunConfig
from ludus.config.training import RLConfig, SFTConfig, SFTUntilConfig
from ludus.core.errors import ConfigError
from ludus.core.types import Group, Status
from ludus.data.conversations import Conversation, replay_all
from ludus.data.splits import Splits
from ludus.loop.loop import Stage, run_stage
from ludus.loop.metrics import group_metrics
from ludus.pipeline import sft_end
from ludus.pipeline.build import Run, build
from ludus.pipeline.stages import rl_stage, sft_stage
from ludus.store.folders import RunFolder
from ludus.train.learner import OutOfMemory
from ludus.train.scoring import Scorer

RATES = (2e-3, 1e-3, 4e-3)
"""Learning rates of SFT that are tried, for a model from scratch; the likeliest first, for where
time allows only one."""

RATE_STEPS, RATE_STEPS_SMALL = 20, 40
"""Steps of SFT at each rate; the second for `small_steps`."""

DTYPES = {"float32": 2, "bfloat16": 12}
"""Types of matrix products (`learner.dtype`) that are timed, and first steps that are not counted:
oneDNN prepares products of new shapes. bfloat16 is fast only on processors that multiply it."""

FASTER = 0.85
"""Share of the seconds of a step in float32 below which bfloat16 is taken."""

DTYPE_STEPS = 4
"""Steps of SFT that are timed of each type, twice in turns."""

COMPUTED = "train/unique_tokens"
"""The metric of a step's tokens, those of a common prefix once."""

DTYPE_S = 12.0
"""Most seconds for that, besides those of the other trials."""

NUM_FEW = 500
"""Episodes of the expert that these steps show: replaying all takes longer."""

NUM_UNSEEN = 64
"""Episodes of the expert that a trial of SFT does not show, for the loss; at most a fifth."""

TIE = 0.02
"""Relative difference of losses below which the lower rate is taken."""

RL_STEPS = 2
"""Steps of RL that are timed, after one that warms up."""

TEMPERATURES = (1.0, 1.2)
"""Rollout temperatures that are tried."""

NUM_GROUPS = 32
"""Groups that are played at each temperature."""

MEASURED_TURNS = 16_000
"""Turns of one measurement of success above which fewer tasks are played."""

KEPT_S = 0.3e-3
"""Seconds per episode that a run takes to keep a step and that the trial's steps do not: measured
with short episodes, where it is a fifth of a step (docs/log.md)."""

GROUPS_S = 5.0
"""Seconds of these groups above which there are fewer, and likewise in the timed steps of RL."""

FEW_GROUPS = 4
"""The same in a slow environment."""

LONGEST_STEP_S = 5.0
"""Seconds of an RL step above which it has fewer groups: many steps beat large ones."""

LONG_S = 20.0
"""Seconds of 8 groups above which FEW_GROUPS are played."""


@dataclass
class Trial:
    """Measurements of the trials; seconds are wall time.

    Args:
        step_s: seconds of a mean step of SFT, by `learner.dtype`; of all of DTYPES, or of none.
        losses: loss per token of unseen episodes after a few steps of SFT, by learning rate.
        curve: steps of SFT and success of sampled episodes.
        signal: share of groups with different rewards, by temperature; `success` likewise.
        rl_step_s: of a step with the groups of the configuration.
        growth: turns of an episode when RL begins, over those of the trial, which a policy that
            does not end its turns cuts short.
        chance: success of random actions.
    """

    step_s: dict[str, float] = field(default_factory=dict)
    losses: dict[float, float] = field(default_factory=dict)
    sft_step_s: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)
    signal: dict[float, float] = field(default_factory=dict)
    success: dict[float, float] = field(default_factory=dict)
    rl_step_s: float = 0.0
    eval_s: float = 0.0
    growth: float = 1.0
    chance: float = 0.0

    @property
    def rate(self) -> float:
        """The rate with the lowest loss, or a lower one that is as good."""
        best = min(self.losses.values())
        return min(rate for rate, loss in self.losses.items() if loss <= best * (1 + TIE))

    @property
    def dtype(self) -> str:
        """bfloat16 where it was clearly faster; else float32, whose sampler agrees to the digit."""
        exact, half = (self.step_s.get(dtype, math.inf) for dtype in DTYPES)
        return "bfloat16" if half <= FASTER * exact < math.inf else "float32"

    @property
    def told_dtypes(self) -> str:
        """The seconds that decided on `dtype`; empty where they were not measured."""
        if not self.step_s:
            return ""
        exact, half = (self.step_s[dtype] for dtype in DTYPES)
        return f": {half:.2f} s a step of SFT, in float32 {exact:.2f} s"


@dataclass
class _Metrics:
    """A recorder of a stage that keeps the metrics."""

    rows: list[dict[str, float]] = field(default_factory=list)

    def record(
        self, stage: str, step: int, groups: Sequence[Group], metrics: dict[str, float]
    ) -> None:
        self.rows.append(metrics)

    def mean(self, name: str, last: int) -> float:
        return fmean(row.get(name, 0.0) for row in self.rows[-last:])


async def try_out(
    config: RunConfig,
    folder: Path,
    splits: Splits,
    tokenizer: Any,
    conversations: Sequence[Conversation],
    seconds: float,
    say: Callable[[str], object],
    *,
    slow: bool = False,
) -> Trial:
    """Try the SFT and RL of a recipe in about `seconds`. `slow`: a step of the environment takes so
    long that groups are played at one temperature only, and few of them."""
    trial, begun = Trial(), time.perf_counter()
    number = min(NUM_UNSEEN, max(len(conversations) // 5, 1))
    shown, held = conversations[number:] or conversations, conversations[:number]
    few = shown[:NUM_FEW]
    runs: list[tuple[float, Run, Stage, int]] = []
    assert config.sft is not None
    rate_steps = RATE_STEPS_SMALL if small_steps(config.sft) else RATE_STEPS
    try:
        started = time.perf_counter()
        trial.step_s = await time_dtypes(
            config,
            lambda of_dtype: build(of_dtype, RunFolder(folder), splits, tokenizer, few),
            started + DTYPE_S,
        )
        begun += time.perf_counter() - started
        config = at_dtype(config, trial.dtype)
        if trial.dtype != "float32":
            say(f"products in bfloat16{trial.told_dtypes}")
        for rate in RATES:
            made = build(_at_rate(config, rate), RunFolder(folder), splits, tokenizer, shown)
            metrics, stage = _Metrics(), sft_stage(made, lambda _: None)[0]
            try:
                await _steps(made, stage, metrics, 0, rate_steps, begun + seconds / 2)
            finally:
                runs.append((rate, made, stage, len(metrics.rows)))
            trial.sft_step_s = metrics.mean("time/step_s", rate_steps // 2)
            if len(metrics.rows) < rate_steps and trial.losses:
                break  # after fewer steps, its loss compares with no other
            trial.losses[rate] = unseen_loss(made, held)
            say(
                f"SFT at {rate:g}: loss {trial.losses[rate]:.3f} on unseen episodes after "
                f"{len(metrics.rows)} steps"
            )
            if time.perf_counter() - begun > seconds / 2:
                break
        _, best, stage, step = next(item for item in runs if item[0] == trial.rate)
        await _sft(best, stage, step, trial, begun + 0.7 * seconds, say)
        await _rl(best, trial, begun + seconds, say, slow, turns_at_start(config, conversations))
    except OutOfMemory as error:  # its keys are those of a recipe, which does not exist yet
        raise ConfigError(
            "memory does not suffice for a step of training with a context of "
            f"{config.model.context_length} tokens: choose shorter episodes (fewer turns, shorter "
            "observations, easier levels) or a smaller model, or end other programs"
        ) from error
    finally:
        for _, made, _, _ in runs:
            await _close(made)
    return trial


async def time_dtypes(
    config: RunConfig, make: Callable[[RunConfig], Run], until: float
) -> dict[str, float]:
    """Time steps of SFT in both of DTYPES, in turns, so that a busy moment meets both; until a
    time. Empty where that allows too few steps.

    The two do not see the same episodes, for more steps of bfloat16 are not counted: what is
    compared is the time of a token.
    """
    if config.model.device != "cpu" or config.learner.dtype != "float32":
        return {}
    runs: dict[str, tuple[Run, Stage, _Metrics]] = {}
    try:
        for dtype in DTYPES:
            made = make(at_dtype(config, dtype))
            runs[dtype] = made, sft_stage(made, lambda _: None)[0], _Metrics()
        for turn in range(3):
            for dtype, (made, stage, metrics) in runs.items():
                start, end = len(metrics.rows), DTYPES[dtype] + turn * DTYPE_STEPS
                await _steps(made, stage, metrics, start, end, until)
                if len(metrics.rows) < end:
                    return {}
    finally:
        for made, _, _ in runs.values():
            await _close(made)
    timed = {dtype: metrics.rows[-2 * DTYPE_STEPS :] for dtype, (_, _, metrics) in runs.items()}
    tokens = fmean(row[COMPUTED] for rows in timed.values() for row in rows)
    return {
        dtype: tokens * median(row["time/step_s"] / row[COMPUTED] for row in rows)
        for dtype, rows in timed.items()
    }


async def _close(made: Run) -> None:
    await made.collector.close()
    made.backend.close()


def at_dtype(config: RunConfig, dtype: str) -> RunConfig:
    """The configuration with this `learner.dtype`."""
    return config.model_copy(update={"learner": config.learner.model_copy(update={"dtype": dtype})})


def unseen_loss(made: Run, conversations: Sequence[Conversation]) -> float:
    """Loss per trained token of conversations that SFT has not shown; infinite where none fits the
    context, so that all rates are alike."""
    config, trainer = made.config, cast(LocalBackend, made.backend).trainer
    assert config.sft is not None
    tasks, played, _ = replay_all(conversations, made.renderers, config.model.context_length)
    if not played:
        return math.inf
    scorer = Scorer(trainer.learner.forward, config.sft.tokens_per_batch, pad_id=0)
    scored = scorer([Group("unseen", tasks[0], played)], "learner_logprobs")[0].trajectories
    return -fmean(p for t in scored for s in t.segments for p in s.learner_logprobs or ())


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


def small_steps(sft: SFTConfig) -> bool:
    """True where long episodes leave a step of SFT fewer than the default."""
    default: int = SFTConfig.model_fields["episodes_per_step"].default
    return sft.episodes_per_step < default


def _at_rate(config: RunConfig, rate: float) -> RunConfig:
    assert config.sft is not None
    optimizer = config.sft.optimizer.model_copy(update={"lr": rate})
    return config.model_copy(update={"sft": config.sft.model_copy(update={"optimizer": optimizer})})


async def _steps(
    run_: Run, stage: Stage, metrics: _Metrics, start: int, end: int, until: float = math.inf
) -> None:
    """Run the steps of a stage from `start` to `end`, or until a time; the first call begins it."""
    if start == 0:
        run_.backend.begin_stage(stage.settings, stage.algorithm)

    async def before(step: int) -> bool:
        return step < end and time.perf_counter() < until

    stage.after_step = before
    await run_stage(stage, run_.backend, metrics, start)


async def _sft(
    run_: Run,
    stage: Stage,
    step: int,
    trial: Trial,
    until: float,
    say: Callable[[str], object],
) -> None:
    """Continue SFT from `step` until its measured end, or the time is over."""
    of_recipe = (run_.config.sft and run_.config.sft.until) or SFTUntilConfig()
    settings, metrics = measurable(of_recipe, run_.config), _Metrics()
    while True:
        started = time.perf_counter()
        _, result = await sft_end.measure(run_, settings, step)
        measured_s = time.perf_counter() - started
        trial.eval_s = measured_s * of_recipe.num_tasks / settings.num_tasks
        trial.curve.append((step, result.success.value))
        say(f"after {step} steps of SFT {result.success.value:.0%} of sampled episodes succeed")
        ended = sft_end.reason_to_end(settings, trial.curve)
        if ended or step >= stage.steps or time.perf_counter() > until:
            return
        as_long = math.ceil(measured_s / trial.sft_step_s) if trial.sft_step_s else 0
        more = max(settings.every, 10 * (step // 30), as_long)  # fewer measurements as it goes on
        await _steps(run_, stage, metrics, step, step + more)
        step += more


def measurable(until: SFTUntilConfig, config: RunConfig) -> SFTUntilConfig:
    """The same measurement with so few tasks that the trial can wait for it; at least 8."""
    turns = config.rollout.max_turns
    longest = until.samples_per_task * (turns if isinstance(turns, int) else 1)
    number = min(until.num_tasks, max(MEASURED_TURNS // longest, 8))
    return until.model_copy(update={"num_tasks": number})


async def _rl(
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
        say(
            f"at temperature {temperature:g} {trial.success[temperature]:.0%} succeed, and "
            f"{trial.signal[temperature]:.0%} of the groups have different rewards"
        )
        if time.perf_counter() > until:
            break  # the time of all trials is over
    number = rl.groups_per_step if slow else affordable(trial, run_.config, rl.groups_per_step)
    trial.rl_step_s = await time_rl(
        partial(_seconds_a_group, run_, trial, until), number, until, rl
    )
    trial.eval_s *= trial.growth


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


async def _seconds_a_group(run_: Run, trial: Trial, until: float, number: int) -> float:
    """Seconds of a step of RL with so many groups, over that number, when RL begins."""
    rl = run_.config.rl
    assert rl is not None
    smaller = rl.model_copy(update={"groups_per_step": number})
    timed = replace(run_, config=run_.config.model_copy(update={"rl": smaller}))
    stage, metrics = rl_stage(timed), _Metrics()
    await _steps(timed, stage, metrics, 0, 1)
    if time.perf_counter() < until:
        await _steps(timed, stage, metrics, 1, 1 + RL_STEPS)
    return trial.growth * metrics.mean("time/step_s", RL_STEPS) / number + KEPT_S * rl.group_size


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
