"""Schedules over the steps of a stage."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.config.schema import RunConfig


def horizon(schedule: Sequence[tuple[int, int]], step: int) -> int:
    """The turns that an episode may have in `step`: those of the last entry that has begun.

    ScalingInter-RL, Xi et al. 2025 (AgentGym-RL, arXiv:2509.08755), section 4.3: short episodes
    first, to learn what single actions do; longer ones later, to explore. A function of the step
    alone, so a resumed run goes on with the same.
    """
    return [turns for first, turns in schedule if first <= step][-1]


def turn_limit(config: RunConfig, step: int) -> int | dict[str, int] | None:
    """`rollout.max_turns` in a step of RL: as `rl.horizon` has it, for the parts it speaks of."""
    limit = config.rollout.max_turns
    schedule = config.rl.horizon if config.rl else None
    if isinstance(schedule, dict):
        grown = {part: horizon(of_part, step) for part, of_part in schedule.items()}
        return {**limit, **grown} if isinstance(limit, dict) else grown
    return horizon(schedule, step) if schedule else limit
