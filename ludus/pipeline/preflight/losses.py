"""The loss of `rl.algorithm` on made-up tokens: a loss of one's own that raises is told before
demonstrations and SFT, and by `--quick-test`, whose groups may have nothing to train on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ludus.config.schema import RunConfig
from ludus.core.errors import LudusError
from ludus.train import ALGORITHMS
from ludus.train.algorithms.losses import LossInputs, computed, require_unit
from ludus.train.optimizers.trust_region import NOT_MEASURED

NUM_TOKENS = 8
"""Of two trajectories."""


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
