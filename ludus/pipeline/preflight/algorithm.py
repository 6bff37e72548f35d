"""The functions of `rl.algorithm` on made-up episodes and tokens.

One of one's own that raises is told before demonstrations and SFT, and by `--quick-test`, whose
groups may have nothing to train on.
"""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import torch

from ludus.config.schema import RunConfig
from ludus.core.errors import LudusError
from ludus.core.modules import told
from ludus.core.types import Group, Message, Segment, Task, Trajectory
from ludus.pipeline.preflight.limits import Findings
from ludus.train import ALGORITHMS
from ludus.train.algorithms.base import Assignment
from ludus.train.algorithms.credit import Earned, Outcome, spread
from ludus.train.algorithms.losses import LossInputs, computed, require_unit
from ludus.train.algorithms.own import OwnFunctionError
from ludus.train.optimizers.trust_region import NOT_MEASURED

NUM_TOKENS = 8
"""Of two trajectories."""

MOST_EPISODES = 1024
"""Made-up episodes of a group, at most."""

_OWN = (Earned, Trajectory, Segment, Task, list)
"""Objects whose attributes an algorithm has to know."""


def try_loss(config: RunConfig) -> Iterator[str]:
    """Yields what is wrong with the loss: an error, a wrong result, no gradient."""
    if config.rl is None:
        return
    algorithm: Any = ALGORITHMS.build(config.rl.algorithm, "rl.algorithm")

    def logprobs(first: float) -> torch.Tensor:
        return torch.linspace(first, -0.1, NUM_TOKENS)

    def where(needed: object, values: torch.Tensor) -> torch.Tensor | None:
        return values if needed else None

    halves = torch.arange(NUM_TOKENS) * 2 // NUM_TOKENS
    critic = algorithm.critic_lr is not None
    policy = logprobs(-2.0).requires_grad_()
    inputs = LossInputs(
        logprobs_N=policy,
        old_logprobs_N=logprobs(-2.1),
        advantages_N=1.0 - 2.0 * halves,
        trajectory_N=halves,
        ref_logprobs_N=where(algorithm.reference, logprobs(-2.2)),
        entropy_N=-policy * policy.exp(),
        values_N=where(critic, logprobs(-1.0).requires_grad_()),
        old_values_N=where(critic, logprobs(-1.1)),
        returns_N=where(critic, 1.0 - halves),
        consistency_N=where(algorithm.needs_consistency, torch.full((NUM_TOKENS,), 0.5)),
    )
    try:
        require_unit(algorithm.loss, inputs)
        output = computed(algorithm.loss, inputs)
    except LudusError as error:
        yield f"{error} (tried on {NUM_TOKENS} made-up tokens)"
        return
    if config.rl.optimizer.target_kl is not None and "kl" not in output.metrics:
        yield NOT_MEASURED


def try_advantages(config: RunConfig, found: Findings) -> None:
    """Add a fault where `advantages` or `keep` raises, or returns what cannot train.

    What a function of whole episodes raises is only noted, unless it is a wrong name: it may read
    what the environment measures, which made-up episodes do not have.
    """
    if config.rl is None:
        return
    algorithm: Any = ALGORITHMS.build(config.rl.algorithm, "rl.algorithm")
    size = min(config.rl.group_size, MOST_EPISODES)
    rewards = ([float(number % 2) for number in range(size)], [0.25] * size)
    tried = f"(tried on {2 * size} made-up episodes of two turns, with rewards of 0, 0.25 and 1)"
    try:
        groups = [_group(number, row) for number, row in enumerate(rewards)]
        found.notes += _upside_down(algorithm.assign(groups), tried)
    except BdbQuit:  # the user's, at a breakpoint
        raise
    except Exception as error:  # a user's code, and what ludus computes with its results
        text = f"{error}" if isinstance(error, LudusError) else f"rl.algorithm: {told(error)}"
        if _may_need_real_episodes(error, algorithm):
            found.notes.append(f"{text} {tried}: go on if real episodes have what it needs")
        else:
            found.faults.append(f"{text} {tried}")


def _upside_down(assigned: Assignment, tried: str) -> Iterator[str]:
    """Notes that rewards of 1 get no higher advantages than rewards of 0 in the same group."""
    means: dict[float, list[float]] = {0.0: [], 1.0: []}
    for trajectory, advantage in assigned.pairs:
        values = [value for row in spread(trajectory, advantage) for value in row]
        if trajectory.reward in means and values:
            means[trajectory.reward].append(fmean(values))
    if not all(means.values()):
        return
    low, high = (fmean(means[reward]) for reward in (0.0, 1.0))
    if low == high:
        yield (
            "rl.algorithm: episodes with a reward of 1 get the same advantage as those of 0, so "
            f"nothing is learned {tried}"
        )
    elif low > high:
        yield (
            f"rl.algorithm: episodes with a reward of 1 get an advantage of {high:.3g}, those of 0 "
            f"one of {low:.3g}, so the policy learns to fail {tried}"
        )


def _may_need_real_episodes(error: Exception, algorithm: Any) -> bool:
    """True for what `advantages` raises if it is given episodes, not rewards; a wrong name is wrong
    for all."""
    if not isinstance(error, OwnFunctionError) or error.part != "advantages":
        return False
    by_rewards = isinstance(algorithm.advantages, Outcome)
    return not by_rewards and not _is_wrong_name(error.__cause__)


def _is_wrong_name(error: BaseException | None) -> bool:
    """True for a name that is not defined, or that ludus' own objects do not have."""
    attribute = isinstance(error, AttributeError) and isinstance(error.obj, _OWN)
    return attribute or isinstance(error, NameError | ImportError)


def _group(number: int, rewards: Sequence[float]) -> Group:
    """Episodes with these rewards; all that models tell of their tokens is there."""
    question, answer = Message(role="user", content="?"), Message(role="assistant", content="!")
    task = Task(id=f"made-up-{number}", prompt=[question], answer="1", consistency=0.5)

    def turn(parent: int, reward: float | None = None) -> Segment:
        values = [-0.5, -0.25]
        return Segment(
            parent, [3, 4], values, answer, policy_version=0, reward=reward,
            learner_logprobs=values, ref_logprobs=[-0.6, -0.2], values=[0.4, 0.5, 0.0],
            entropies=[0.5, 0.5],
        )  # fmt: skip

    def given(parent: int) -> Segment:
        return Segment(parent, [1, 2], message=question, values=[0.4, 0.4, 0.4])

    return Group(
        f"made-up/g{number}",
        task,
        [
            Trajectory(
                f"made-up/g{number}/{index}",
                f"made-up/g{number}",
                task.id,
                [given(-1), turn(0, 0.0), given(1), turn(2, reward)],
                reward=reward,
                metrics={"success": float(reward >= 1)},
            )
            for index, reward in enumerate(rewards)
        ],
    )
