"""Schedules over the steps of a stage."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.config.schema import RunConfig


def horizon(schedule: Sequence[tuple[int, int]], step: int) -> int:
    """Maximum turns of an episode in `step`, from entries of (first step, turns).

    ScalingInter-RL, Xi et al. 2025 (AgentGym-RL, arXiv:2509.08755), section 4.3: short episodes
    first, to learn single actions; longer episodes later, to explore. Depends on the step alone, so
    a resumed run continues the schedule.
    """
    return [turns for first, turns in schedule if first <= step][-1]


def turn_limit(config: RunConfig, step: int) -> int | dict[str, int] | None:
    """`rollout.max_turns` in an RL step, replaced by `rl.horizon` for the parts that it names."""
    limit = config.rollout.max_turns
    schedule = config.rl.horizon if config.rl else None
    if isinstance(schedule, dict):
        grown = {part: horizon(of_part, step) for part, of_part in schedule.items()}
        return {**limit, **grown} if isinstance(limit, dict) else grown
    return horizon(schedule, step) if schedule else limit
