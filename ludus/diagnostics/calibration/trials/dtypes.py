"""Time steps of SFT with products in float32 and in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, median

from ludus.config.schema import RunConfig
from ludus.diagnostics.calibration.trials.steps import Metrics, close, run_steps
from ludus.diagnostics.calibration.trials.trial import DTYPES
from ludus.loop.loop import Stage
from ludus.pipeline.build import Run
from ludus.pipeline.stages import sft_stage

DTYPE_STEPS = 4
"""Steps of SFT that are timed of each type, twice in turns."""

COMPUTED = "train/unique_tokens"
"""The metric of a step's tokens, those of a common prefix once."""

DTYPE_S = 12.0
"""Most seconds for that, besides those of the other trials."""


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
    runs: dict[str, tuple[Run, Stage, Metrics]] = {}
    try:
        for dtype in DTYPES:
            made = make(at_dtype(config, dtype))
            runs[dtype] = made, sft_stage(made, lambda _: None)[0], Metrics()
        for turn in range(3):
            for dtype, (made, stage, metrics) in runs.items():
                start, end = len(metrics.rows), DTYPES[dtype] + turn * DTYPE_STEPS
                await run_steps(made, stage, metrics, start, end, until)
                if len(metrics.rows) < end:
                    return {}
    finally:
        for made, _, _ in runs.values():
            await close(made)
    timed = {dtype: metrics.rows[-2 * DTYPE_STEPS :] for dtype, (_, _, metrics) in runs.items()}
    tokens = fmean(row[COMPUTED] for rows in timed.values() for row in rows)
    return {
        dtype: tokens * median(row["time/step_s"] / row[COMPUTED] for row in rows)
        for dtype, rows in timed.items()
    }


def at_dtype(config: RunConfig, dtype: str) -> RunConfig:
    """The configuration with this `learner.dtype`."""
    return config.model_copy(update={"learner": config.learner.model_copy(update={"dtype": dtype})})
