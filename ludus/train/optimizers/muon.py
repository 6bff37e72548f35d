"""Muon: each update of a matrix is orthogonal, all of its directions equally long.

AdamW's update of a matrix is dominated by a few directions, those of the frequent tokens. Muon (K.
Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces it by the nearest orthogonal matrix,
so that rare ones, such as the words of an environment's answers, are learned in fewer steps:

    M <- 0.95 M + 0.05 G                        momentum of the gradient G
    U  = orthogonal(0.95 M + 0.05 G)            Nesterov's look ahead, then Newton-Schulz
    W <- W (1 - lr d) - lr 0.2 sqrt(max(rows, columns)) U        d: weight decay

The factor gives the entries of an update the root mean square 0.2, about that of AdamW, so that a
learning rate holds for both (Liu et al. 2025, arXiv:2502.16982, section 2.2). AdamW trains what is
no matrix of a hidden layer: embeddings, the head, gains and biases. A weight has 4 bytes of state
in place of 8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ludus.config.schema import OptimizerConfig
from ludus.train.optimizers.adamw import (
    MOMENTS,
    AdamW,
    MasterWeights,
    stochastic_round,
    with_gradient,
)

AVERAGE = "momentum"
"""Name of the gradient's running average in the state of a matrix."""

MOMENTUM = 0.95

UPDATE_RMS = 0.2
"""Root mean square of an update's entries, over the learning rate."""

COEFFICIENTS, NUM_ITERATIONS = (3.4445, -4.7750, 2.0315), 5
"""Of the quintic Newton-Schulz iteration: singular values end between 0.7 and 1.2."""


def hidden_matrices(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Those of the parameters that Muon trains: matrices, and stacks of them (experts), that are
    neither embeddings nor the head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outer = [m for m in model.modules() if isinstance(m, nn.Embedding) or m is head]
    excluded = {id(p) for module in outer for p in module.parameters()}
    stacks = {id(p) for name, p in model.named_parameters() if "experts" in name and p.ndim == 3}
    return [p for p in parameters if id(p) not in excluded and (p.ndim == 2 or id(p) in stacks)]


def orthogonal(matrices_BRC: Tensor) -> Tensor:
    """The orthogonal matrices nearest to a stack of them [B, R, C], about; zeros stay zeros.

    All iterates are P X, with a polynomial P in the symmetric G = X X^T, so that the iteration
    needs the shorter side alone: less than half of the time of the usual form on one core, for the
    matrices of a small model (docs/log.md).
    """
    tall = matrices_BRC.shape[-2] > matrices_BRC.shape[-1]
    x = matrices_BRC.mT.contiguous() if tall else matrices_BRC
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    gram = x @ x.mT
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    a, b, c = COEFFICIENTS
    product = None
    for iteration in range(1, NUM_ITERATIONS + 1):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c) + a * eye
        product = factor if product is None else factor @ product
        if iteration < NUM_ITERATIONS:
            gram = factor @ gram @ factor
    nearest: Tensor = product @ x
    return nearest.mT if tall else nearest


def make_optimizer(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    config: OptimizerConfig,
    master_weights: MasterWeights = "float32",
) -> AdamW:
    """The configured optimizer of a model's trained parameters."""
    if config.name == "adamw":
        return AdamW(parameters, config, master_weights)
    return Muon(parameters, hidden_matrices(model, parameters), config, master_weights)


class Muon(AdamW):
    """Muon for the hidden layers' matrices, AdamW for the rest; weights in bfloat16 as there.

    Args:
        hidden: of the parameters, the matrices.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        hidden: Sequence[nn.Parameter],
        config: OptimizerConfig,
        master_weights: MasterWeights = "float32",
    ) -> None:
        self._hidden = {id(parameter) for parameter in hidden}
        super().__init__(parameters, config, master_weights)

    def _groups(self, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        others = [p for p in parameters if id(p) not in self._hidden]
        hidden = [p for p in parameters if id(p) in self._hidden]
        return [*super()._groups(others), {"params": hidden}]

    def _moments(self, parameter: Tensor) -> tuple[str, ...]:
        return (AVERAGE,) if id(parameter) in self._hidden else MOMENTS

    def _step_groups(self, groups: list[dict[str, Any]], generator: torch.Generator) -> None:
        if not self._hidden:
            super()._step_groups(groups, generator)
            return
        *others, matrices = groups
        updates = list(self._updates(matrices))  # they take memory: before a weight changes
        super()._step_groups(others, generator)
        for parameter, update in updates:
            self._apply(parameter, update, matrices, generator)

    def _updates(self, matrices: dict[str, Any]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yields the matrices of a group that have a gradient, and their updates, which have
        orthogonal rows or columns; those of equal shape are computed at once."""
        by_shape: dict[tuple[Any, ...], list[tuple[nn.Parameter, Tensor]]] = {}
        for parameter in with_gradient(matrices):
            average = self.state[parameter][AVERAGE]
            grad = parameter.grad.to(average.dtype)  # type: ignore[union-attr]
            average.lerp_(grad, 1 - MOMENTUM)
            ahead = grad.lerp(average, MOMENTUM)
            key = (parameter.device, *parameter.shape[-2:])
            by_shape.setdefault(key, []).append((parameter, ahead))
        for items in by_shape.values():
            stacked = torch.cat([ahead.reshape(-1, *ahead.shape[-2:]) for _, ahead in items])
            made = torch.split(orthogonal(stacked.float()), [_stack(p) for p, _ in items])
            yield from ((p, u.reshape(p.shape)) for (p, _), u in zip(items, made, strict=True))

    def _apply(
        self,
        parameter: nn.Parameter,
        update: Tensor,
        group: dict[str, Any],
        generator: torch.Generator,
    ) -> None:
        state, rounded = self.state[parameter], self._is_rounded(parameter)
        step = group["lr"] * UPDATE_RMS * math.sqrt(max(parameter.shape[-2:]))
        exact = parameter.float() if rounded else state.get("master", parameter)
        exact.mul_(1 - group["lr"] * group["weight_decay"])
        exact.add_(update, alpha=-step)
        if rounded:
            parameter.copy_(stochastic_round(exact, generator))
        elif exact is not parameter:
            parameter.copy_(exact)
        state["step"] += 1


def _stack(parameter: Tensor) -> int:
    """The number of matrices in a parameter."""
    return parameter.numel() // math.prod(parameter.shape[-2:])
