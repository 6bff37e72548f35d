"""Short trials of a recipe: SFT at several learning rates, then a few steps of RL.

Nothing is kept: the runs live in a temporary folder, and the recipe starts from the beginning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError
from ludus.data.conversations import Conversation
from ludus.data.splits import Splits
from ludus.diagnostics.calibration.trials import rl, sft
from ludus.diagnostics.calibration.trials.dtypes import DTYPE_S, at_dtype, time_dtypes
from ludus.diagnostics.calibration.trials.steps import Metrics, close, run_steps
from ludus.diagnostics.calibration.trials.trial import Trial
from ludus.loop.loop import Stage
from ludus.pipeline.build import Run, build
from ludus.pipeline.stages import sft_stage
from ludus.store.folders import RunFolder
from ludus.train.learner import OutOfMemory

NUM_FEW = 500
"""Episodes of the expert that these steps show: replaying all takes longer."""


async def try_out(
    config: RunConfig,
    folder: Path,
    splits: Splits,
    tokenizer: Any,
    conversations: Sequence[Conversation],
    seconds: float,
    say: Callable[[str], object],
    *,
    heldout: Sequence[Conversation] = (),
    slow: bool = False,
) -> Trial:
    """Try the SFT and RL of a recipe in about `seconds`.

    Args:
        heldout: the expert's episodes of held-out levels.
        slow: a step of the environment takes so long that groups are played at one temperature
            only, and few of them.
    """
    trial, begun = Trial(), time.perf_counter()
    number = min(sft.NUM_UNSEEN, max(len(conversations) // 5, 1))
    shown, held = conversations[number:] or conversations, conversations[:number]
    few = shown[:NUM_FEW]
    runs: list[tuple[float, Run, Stage, int]] = []
    assert config.sft is not None
    rate_steps = sft.RATE_STEPS_SMALL if sft.small_steps(config.sft) else sft.RATE_STEPS
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
        for rate in sft.RATES:
            made = build(sft.at_rate(config, rate), RunFolder(folder), splits, tokenizer, shown)
            metrics, stage = Metrics(), sft_stage(made, lambda _: None)[0]
            try:
                await run_steps(made, stage, metrics, 0, rate_steps, begun + seconds / 2)
            finally:
                runs.append((rate, made, stage, len(metrics.rows)))
            trial.sft_step_s = metrics.mean("time/step_s", rate_steps // 2)
            if len(metrics.rows) < rate_steps and trial.losses:
                break  # after fewer steps, its loss compares with no other
            trial.losses[rate] = sft.unseen_loss(made, held)
            say(
                f"SFT at {rate:g}: loss {trial.losses[rate]:.3f} on unseen episodes after "
                f"{len(metrics.rows)} steps"
            )
            if time.perf_counter() - begun > seconds / 2:
                break
        _, best, stage, step = next(item for item in runs if item[0] == trial.rate)
        await sft.to_its_end(best, stage, step, trial, begun + 0.7 * seconds, say)
        if heldout:
            own, others = trial.gap = sft.unseen_loss(best, held), sft.unseen_loss(best, heldout)
            say(
                f"loss of the expert's turns: {own:.2f} nats a token in unseen episodes of "
                f"training tasks, {others:.2f} in those of held-out levels"
            )
        await rl.measure(
            best, trial, begun + seconds, say, slow, rl.turns_at_start(config, conversations)
        )
    except OutOfMemory as error:  # its keys are those of a recipe, which does not exist yet
        raise ConfigError(
            "memory does not suffice for a step of training with a context of "
            f"{config.model.context_length} tokens: choose shorter episodes (fewer turns, shorter "
            "observations, easier levels) or a smaller model, or end other programs"
        ) from error
    finally:
        for _, made, _, _ in runs:
            await close(made)
    return trial
