"""Outcomes: the result that an agent returns, and the rewards that follow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from ludus.core.errors import Unscorable
from ludus.rollout.hosts.host import LARGEST
from ludus.rollout.sessions.agent_session import AgentSession


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an agent's episode.

    Args:
        reward: None: the judge or the environment scores the episode. All roles get it.
        rewards: the reward of each role, in place of `reward`; fixed roles may be left out, but
            for the first.
        turn_rewards: the rewards of each role's turns, in their order, in place of `rewards`: a
            role's reward is their sum.
        success: None: a reward of at least 1 is a success.
        scores: named parts of the reward. metrics: numbers for the run's metrics.
        explanation: for people who read the rollout.
    """

    reward: float | None = None
    success: bool | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    explanation: str = ""
    rewards: Mapping[str, float] | None = None
    turn_rewards: Mapping[str, Sequence[float]] | None = None


def record_outcome(session: AgentSession, outcome: Any) -> None:
    """Set the reward of an outcome. Errors: Unscorable where it is none."""
    if outcome is None:
        return
    if (number := _number(outcome)) is not None:
        outcome = Outcome(reward=number)
    if not isinstance(outcome, Outcome):
        raise Unscorable(
            f"the agent returned {outcome!r:.80}; it has to return an Outcome, a number or None"
        )
    try:
        parts = {str(name): float(value) for name, value in outcome.scores.items()}
        metrics = {str(name): float(value) for name, value in outcome.metrics.items()}
    except (AttributeError, TypeError, ValueError):
        raise Unscorable("the agent's scores and metrics have to be names with numbers") from None
    session.trajectory.metrics.update(metrics)
    rewards = _rewards(session, outcome)
    if rewards is None:
        return
    explanation = str(outcome.explanation)
    session.set_rewards(rewards, explanation=explanation)
    reward = session.trajectory.reward
    if reward is not None:
        success = reward >= 1 if outcome.success is None else outcome.success
        session.set_reward(reward, parts, success=success, explanation=explanation)


def _number(value: Any) -> float | None:
    """A number of Python, NumPy or torch as a float; None for anything else."""
    if not isinstance(value, Real) and getattr(value, "shape", None) == ():
        value = value.item()
    return float(value) if isinstance(value, Real) else None


def _rewards(session: AgentSession, outcome: Outcome) -> dict[str, float] | None:
    """The reward of each role; None: the judge or the environment scores. Errors: Unscorable."""
    given: Mapping[str, Any] | None = outcome.rewards
    if outcome.turn_rewards is not None:
        if given is not None:
            raise Unscorable("the agent's Outcome has `rewards` and `turn_rewards`; one is needed")
        given = _of_turns(session, outcome.turn_rewards)
    if given is None and outcome.reward is None:
        return None
    if given is not None and outcome.reward is not None:
        raise Unscorable("the agent's Outcome has `reward` and `rewards`; it has to have one")
    if given is None:
        given = dict.fromkeys(session.roles, outcome.reward)
    if not isinstance(given, Mapping) or (unknown := [n for n in given if n not in session.roles]):
        told = f"no role {unknown[0]!r:.80}" if isinstance(given, Mapping) else f"{given!r:.80}"
        raise Unscorable(f"the agent's rewards: {told}; the roles are {[*session.roles]}")
    rewards: dict[str, float] = {}
    for name, reward in given.items():
        number = _number(reward)
        if number is None or not abs(number) <= LARGEST:
            role = f" of {name}" if outcome.rewards is not None else ""
            kind = "a number" if number is None else f"finite, at most {LARGEST:g} in size"
            raise Unscorable(f"the agent's reward{role} is {reward!r:.80}; it has to be {kind}")
        rewards[name] = number
    idle = [name for name, role in session.roles.items() if not role.trajectory.num_turns]
    idle = idle if outcome.turn_rewards is not None else []
    if missing := [n for n in session.trained_roles if n not in given and n not in idle]:
        raise Unscorable(f"the agent's rewards lack the role {missing[0]!r}, which trains")
    if (first := session.trajectory.role) not in given:
        raise Unscorable(f"the agent's rewards lack the first role, {first!r}, which is measured")
    return rewards


def _of_turns(session: AgentSession, turns: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Record the rewards of turns; returns the sum of each role's. Errors: Unscorable."""
    sums: dict[str, float] = {}
    for name, rewards in turns.items():
        if name not in session.roles:
            raise Unscorable(
                f"the agent's turn_rewards: no role {name!r:.80}; the roles are {[*session.roles]}"
            )
        try:
            numbers = [float(reward) for reward in rewards]
        except (TypeError, ValueError):
            raise Unscorable(f"the agent's turn_rewards of {name} have to be numbers") from None
        role = session.roles[name]
        if not role.set_turn_rewards(numbers):
            raise Unscorable(
                f"the agent's turn_rewards of {name} are {len(numbers)}; its turns are "
                f"{role.trajectory.num_turns}"
            )
        sums[name] = math.fsum(numbers)
    return sums
