"""AdamW for weights in float32 and in bfloat16.

bfloat16 has 8 bits of precision: a weight of 0.02 has neighbours 6e-5 away, so an update of 1e-6
rounds to nothing, and a moment that decays by 0.1 % a step stands still. Two ways to keep updates:

    master_weights         weights   gradients  moments   master    bytes a weight
    (weights in float32)   float32   float32    float32   -         16
    float32                bfloat16  float32    float32   float32   18
    stochastic_rounding    bfloat16  bfloat16   bfloat16  -          8

- float32: AdamW updates the master; the weight is the master, rounded to nearest (Micikevicius et
  al. 2018, arXiv:1710.03740, section 3.1). Gradients of micro-batches are summed in float32 where
  torch can (2.10 and later), else in bfloat16.
- stochastic_rounding: the step is computed in float32; weights and moments are rounded up or down
  at random, so that their expectations are exact (Zamirai et al. 2020, arXiv:2010.06192).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ludus.config.schema import OptimizerConfig

MasterWeights = Literal["float32", "stochastic_rounding"]

MOMENTS = ("exp_avg", "exp_avg_sq")

CHUNK = 1 << 22
"""Elements that stochastic rounding computes at once in float32."""
WORK = 8
"""Float32 tensors of a chunk that exist at once."""


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW; bfloat16 weights as `master_weights` says, others as torch does.

    Weight decay is for matrices only, not for gains of norms and biases. All state of a step is
    created before the first weight changes.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        config: OptimizerConfig,
        master_weights: MasterWeights = "float32",
    ) -> None:
        super().__init__(
            [group for group in self._groups(parameters) if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._stochastic = master_weights == "stochastic_rounding"
        for parameter in parameters:
            if self._has_master(parameter) and hasattr(parameter, "grad_dtype"):
                parameter.grad_dtype = torch.float32

    def _groups(self, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        """The parameters by their options."""
        return [
            {"params": [p for p in parameters if p.ndim > 1]},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore moments, masters and step counts; the options stay the configuration's."""
        options = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        super().load_state_dict(state_dict)
        for group, own in zip(self.param_groups, options, strict=True):
            group.update(own)

    @torch.no_grad()
    def prepare(self) -> None:
        """Create the missing state of parameters with a gradient: all of it, or nothing if memory
        does not suffice. State that another `master_weights` saved is converted."""
        parameters = [p for group in self.param_groups for p in with_gradient(group)]
        states: dict[Tensor, Any] = {p: self._state_of(p) for p in parameters}
        if sizes := [p.numel() for p in parameters if self._is_rounded(p)]:
            torch.empty(WORK * min(CHUNK, max(sizes)), device=parameters[0].device)  # is it there?
        self.state.update(states)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights from their gradients."""
        assert closure is None
        self.prepare()
        self._step_groups(self.param_groups, self._generator())

    def _step_groups(self, groups: list[dict[str, Any]], generator: torch.Generator) -> None:
        # Gradients are cast before the first weight changes, because that takes memory.
        exact = [self._exact_inputs(group) for group in groups]
        for group, inputs in zip(groups, exact, strict=True):
            parameters, masters, grads, averages, squares, steps = inputs
            _adamw(masters, grads, averages, squares, steps, group)
            for parameter, master in zip(parameters, masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
            for parameter in filter(self._is_rounded, with_gradient(group)):
                self._rounded_step(parameter, group, generator)

    def _generator(self) -> torch.Generator:
        """Returns the random bits of a step: the same in a resumed run."""
        first = self.param_groups[0]["params"][0]
        step = next((state["step"] for state in self.state.values()), 0)
        return torch.Generator(first.device).manual_seed(int(step))

    def _exact_inputs(self, group: dict[str, Any]) -> tuple[list[Any], ...]:
        """Returns parameters, masters, gradients, both moments and step counts, without those of
        stochastic rounding."""
        rows = []
        for parameter in with_gradient(group):
            if not self._is_rounded(parameter):
                state = self.state[parameter]
                master = state.get("master", parameter)
                grad = parameter.grad.to(master.dtype)  # type: ignore[union-attr]
                kept = (state[name] for name in (*MOMENTS, "step"))
                rows.append((parameter, master, grad, *kept))
        return tuple(map(list, zip(*rows, strict=True))) if rows else ([], [], [], [], [], [])

    def _rounded_step(
        self, parameter: nn.Parameter, group: dict[str, Any], generator: torch.Generator
    ) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        step = state["step"]
        stored = [parameter.detach(), *(state[name] for name in MOMENTS)]
        flat = [tensor.view(-1) for tensor in stored] + [parameter.grad.reshape(-1)]
        for *parts, grad in zip(*(torch.split(x, CHUNK) for x in flat), strict=True):
            weight, average, square = (part.float() for part in parts)
            _adamw([weight], [grad.float()], [average], [square], [step.clone()], group)
            for part, value in zip(parts, (weight, average, square), strict=True):
                part.copy_(stochastic_round(value, generator))
        step += 1

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Returns the state that a step needs, without changing the present state."""
        state = self.state.get(parameter, {})
        dtype = torch.float32 if self._has_master(parameter) else parameter.dtype
        new = {"step": state.get("step", torch.zeros((), device=parameter.device))}
        for name in self._moments(parameter):
            found = state.get(name)
            new[name] = (
                torch.zeros_like(parameter, dtype=dtype) if found is None else found.to(dtype)
            )
        if self._has_master(parameter):
            master = state.get("master")
            new["master"] = parameter.detach().float() if master is None else master
        return new

    def _moments(self, parameter: Tensor) -> tuple[str, ...]:
        """Names of the running averages of a parameter's gradient."""
        return MOMENTS

    def _has_master(self, parameter: Tensor) -> bool:
        return parameter.dtype == torch.bfloat16 and not self._stochastic

    def _is_rounded(self, parameter: Tensor) -> bool:
        return parameter.dtype == torch.bfloat16 and self._stochastic


def stochastic_round(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 values to one of their two bfloat16 neighbours, at random, with the value as
    expectation."""
    noise = torch.randint(
        1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    # bfloat16 is the upper half of a float32; a carry from the lower half goes to the neighbour.
    bits = (values.view(torch.int32) + noise) & -(1 << 16)
    return bits.view(torch.float32).to(torch.bfloat16)


def _adamw(
    weights: list[Tensor],
    grads: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    group: dict[str, Any],
) -> None:
    """torch's fused AdamW step, in place."""
    if not weights:
        return
    beta1, beta2 = group["betas"]
    adamw(
        weights,
        grads,
        averages,
        squares,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def with_gradient(group: dict[str, Any]) -> list[nn.Parameter]:
    """The parameters of a group that a step changes."""
    return [parameter for parameter in group["params"] if parameter.grad is not None]
