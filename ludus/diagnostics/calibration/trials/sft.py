"""The trial of SFT: its learning rate, and success while it learns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import cast

from ludus.backends.local import LocalBackend
from ludus.config.schema import RunConfig
from ludus.config.training import SFTConfig, SFTUntilConfig
from ludus.core.errors import DataError
from ludus.core.types import Group
from ludus.data.conversations import Conversation, replay_all
from ludus.diagnostics.calibration.trials.steps import Metrics, run_steps
from ludus.diagnostics.calibration.trials.trial import Trial
from ludus.loop.loop import Stage
from ludus.pipeline import sft_end
from ludus.pipeline.build import Run
from ludus.train.scoring import Scorer

RATES = (2e-3, 1e-3, 4e-3)
"""Learning rates of SFT that are tried, for a model from scratch; the likeliest first, for where
time allows only one."""

RATE_STEPS, RATE_STEPS_SMALL = 20, 40
"""Steps of SFT at each rate; the second for `small_steps`."""

NUM_UNSEEN = 64
"""Episodes of the expert that a trial of SFT does not show, for the loss; at most a fifth."""

MEASURED_S = 6.0
"""Seconds of a measurement above which held-out tasks are not measured too."""

MEASURED_TURNS = 16_000
"""Turns of one measurement of success above which fewer tasks are played."""


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


def small_steps(sft: SFTConfig) -> bool:
    """True where long episodes leave a step of SFT fewer than the default."""
    default: int = SFTConfig.model_fields["episodes_per_step"].default
    return sft.episodes_per_step < default


def at_rate(config: RunConfig, rate: float) -> RunConfig:
    """The configuration with this learning rate of SFT."""
    assert config.sft is not None
    optimizer = config.sft.optimizer.model_copy(update={"lr": rate})
    return config.model_copy(update={"sft": config.sft.model_copy(update={"optimizer": optimizer})})


async def to_its_end(
    run_: Run,
    stage: Stage,
    step: int,
    trial: Trial,
    until: float,
    say: Callable[[str], object],
) -> None:
    """Continue SFT from `step` until its measured end, or the time is over."""
    of_recipe = (run_.config.sft and run_.config.sft.until) or SFTUntilConfig()
    settings, metrics = measurable(of_recipe, run_.config), Metrics()
    while True:
        started = time.perf_counter()
        _, result = await sft_end.measure(run_, settings, step)
        measured_s = time.perf_counter() - started
        trial.eval_s = measured_s * of_recipe.num_tasks / settings.num_tasks
        trial.curve.append((step, result.success.value))
        say(
            f"after {step} steps of SFT {result.success.value:.0%} of {result.num_episodes} "
            "sampled episodes of training tasks succeed"
        )
        ended = sft_end.reason_to_end(settings, trial.curve)
        if ended or step >= stage.steps or time.perf_counter() > until:
            if result.success.value > 0 and measured_s <= MEASURED_S:
                tasks = run_.splits.heldout
                try:
                    _, heldout = await sft_end.measure(run_, settings, step, tasks)
                except DataError as error:  # the recipe can be written all the same
                    trial.unplayed = str(error)
                    return
                trial.trained, trial.heldout = result.success, heldout.success
                say(
                    f"{heldout.success.value:.0%} of {heldout.num_episodes} sampled episodes of "
                    "held-out tasks succeed"
                )
            return
        as_long = math.ceil(measured_s / trial.sft_step_s) if trial.sft_step_s else 0
        more = max(settings.every, 10 * (step // 30), as_long)  # fewer measurements as it goes on
        await run_steps(run_, stage, metrics, step, step + more)
        step += more


def measurable(until: SFTUntilConfig, config: RunConfig) -> SFTUntilConfig:
    """The same measurement with so few tasks that the trial can wait for it; at least 8."""
    turns = config.rollout.max_turns
    longest = until.samples_per_task * (turns if isinstance(turns, int) else 1)
    number = min(until.num_tasks, max(MEASURED_TURNS // longest, 8))
    return until.model_copy(update={"num_tasks": number})
