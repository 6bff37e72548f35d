"""A step's experiences between Trinity's explorer and trainer, whatever their number.

Trinity's trainer reads a fixed number of experiences a step. With failed episodes there are fewer,
with branches more: then it would wait for those of the next step, or train with stale ones.

    CountRows    in the explorer: writes the step's number of experiences on each
    WholeStep    in the trainer: reads that many
"""

from __future__ import annotations

from typing import Any

from trinity.algorithm.sample_strategy.sample_strategy import DefaultSampleStrategy
from trinity.buffer.operators.experience_operator import ExperienceOperatorV1
from trinity.common.experience import Experience

ROWS = "ludus_rows"


class CountRows(ExperienceOperatorV1):  # type: ignore[misc]
    """Counts the experiences of a step."""

    async def process(
        self, experiences: list[Experience]
    ) -> tuple[list[Experience], dict[str, float]]:
        """Returns the experiences."""
        for experience in experiences:
            experience.info[ROWS] = len(experiences)
        return experiences, {}


class WholeStep(DefaultSampleStrategy):  # type: ignore[misc]
    """Reads all experiences of the next step."""

    async def sample(
        self, step: int, **_: Any
    ) -> tuple[list[Experience], dict[str, Any], list[Any]]:
        """Returns the experiences, and metrics about them."""
        from trinity.utils.timer import Timer

        metrics: dict[str, Any] = {}
        with Timer(metrics, "time/read_experience"):
            found = await self.exp_buffer.read(batch_size=1)
            if more := int(found[0].info[ROWS]) - 1:
                found += await self.exp_buffer.read(batch_size=more)
        self.set_model_version_metric(found, metrics)
        return found, metrics, []
