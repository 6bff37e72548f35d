"""Punishes long answers before they reach the limit."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ludus.core.errors import ConfigError, Unscorable
from ludus.core.types import Score, Task, Trajectory


class OverlongJudge:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, equation 13).

    With |y| sampled tokens, L_max = `max_tokens` and L_cache = `buffer`:

        |y| <= L_max - L_cache              0
        L_max - L_cache < |y| <= L_max      ((L_max - L_cache) - |y|) / L_cache
        L_max < |y|                         -1

    The paper adds it to a correctness of 1 or -1, with 20,480 and 4,096. Tokens of all turns count;
    those that were appended (results of tools, observations) do not. A part of the judge `sum`.

    Errors: Unscorable if the trajectory has no token ids (an endpoint's text alone).
    """

    def __init__(
        self,
        max_tokens: Annotated[int, Field(ge=1, description="Tokens from which the score is -1.")],
        buffer: Annotated[
            int, Field(ge=1, description="Tokens before `max_tokens` over which it falls from 0.")
        ],
    ) -> None:
        if buffer > max_tokens:
            raise ConfigError(f"buffer: {buffer} exceeds max_tokens, {max_tokens}")
        self._max, self._buffer = max_tokens, buffer

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        length = trajectory.num_sampled_tokens
        if not length:
            raise Unscorable(f"trajectory {trajectory.id} has no sampled token ids to count")
        excess = length - (self._max - self._buffer)
        value = -min(max(excess / self._buffer, 0.0), 1.0) or 0.0  # no -0.0
        return Score(value=value, explanation=f"{length:,} sampled tokens")
