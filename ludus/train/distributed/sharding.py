"""A model sharded over ranks by FSDP2: each rank holds a part of every tensor.

`fully_shard` gathers the weights of a module around its forward and backward passes. ludus' passes
use weights outside of `forward` (the head, by chunks), so they run within the forward pass of a
`Shell` around the model:

    Shell         embeddings, final norm, head, tied or not
      layer 0     its own weights, gathered for its own pass
      layer 1     ...

Gradients are summed over the ranks, for the loss has the weights of the whole batch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from ludus.config.schema import LearnerConfig
from ludus.core.types import Sample
from ludus.train.batches.packing import MicroBatch, pack
from ludus.train.distributed.parallel import HEAD_NORMS, parallelize
from ludus.train.distributed.settings import ShardSettings
from ludus.train.forward import Forward
from ludus.train.kernels.logprobs import backbone

T = TypeVar("T")


class Shell(nn.Module):
    """A module around a model, within whose forward pass any work with the model runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        return work()


def shard(model: nn.Module, mesh: DeviceMesh, settings: ShardSettings) -> Shell:
    """Shard a model in place over the ranks of a mesh; returns the shell of its passes.

    Every rank has to hold the same model.
    """
    if settings.tensor_parallel > 1:
        for layer in layers_of(model):
            parallelize(layer, mesh["tp"])
    half = any(p.dtype == torch.bfloat16 for p in model.parameters())
    options: dict[str, Any] = {
        "mesh": mesh["dp"],
        "reshard_after_forward": settings.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None),
        "offload_policy": CPUOffloadPolicy() if settings.cpu_offload else OffloadPolicy(),
    }
    for layer in layers_of(model):
        fully_shard(layer, **options)
    shell = Shell(model)
    # Always resharded: gathered weights would survive a pass without backward, and get stale.
    fully_shard(shell, **{**options, "reshard_after_forward": True})
    for module in _sharded_modules(shell):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return shell


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Returns the decoder's layers: the longest list of modules in the model's backbone."""
    lists = [list(m) for m in backbone(model).children() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _sharded_modules(shell: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in shell.modules() if isinstance(module, FSDPModule))


class ShardedForward(Forward):
    """Passes of a sharded model. All ranks have to make the same number of them.

    The model is tested before it is sharded: the constructor runs on the whole model.
    """

    shell: Shell | None = None

    def shard(self, mesh: DeviceMesh, settings: ShardSettings) -> None:
        """Shard the model."""
        if settings.tensor_parallel > 1:
            self._layers = None  # they compute with whole matrices
        self.shell = shard(self.model, mesh, settings)

    def compute(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """As in `Forward`, with the weights of each layer gathered for its pass."""
        work = partial(super().compute, micro_batch)
        if self.shell is None:
            return work()
        with warnings.catch_warnings():
            # FSDP2 sets requires_grad of views in its hooks, which torch warns about.
            warnings.simplefilter("ignore")
            done: tuple[Tensor, Tensor, Tensor] = self.shell(work)
        return done

    @cached_property
    def idle(self) -> MicroBatch:
        """Two tokens without a loss, for a rank that has nothing to compute in a pass."""
        ids_S = None if self.vocabulary is None else self.vocabulary.ids_S
        token = 0 if ids_S is None else int(ids_S[0])
        sample = Sample([token] * 2, [False, True], [0.0] * 2, [0.0] * 2, "")
        return pack([sample], [[0.0] * 2], tokens_per_batch=2, pad_id=0).micro_batches[0]

    def with_temperature(self, temperature: float) -> ShardedForward:
        """Returns passes of the same model under another temperature."""
        other = copy.copy(self)
        other.temperature = temperature
        return other

    @contextmanager
    def released(self) -> Iterator[None]:
        """Context of passes without backward; no gathered weights are left after it."""
        try:
            yield
        finally:
            if self.shell is not None:
                for module in _sharded_modules(self.shell):
                    module.reshard()


def skeleton_of(model: nn.Module) -> nn.Module:
    """Returns a copy of a model whose parameters have no memory (device `meta`); ties are kept."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


@torch.no_grad()
def copy_of(
    forward: ShardedForward, skeleton: nn.Module, mesh: DeviceMesh, settings: ShardSettings
) -> ShardedForward:
    """Returns passes of a frozen copy of a sharded model, made from a `skeleton_of` it.

    No rank ever holds more than its part of the copy.
    """
    policy, made = forward.model, copy.copy(forward)
    made.model = model = copy.deepcopy(skeleton).requires_grad_(False).eval()
    made.settings = LearnerConfig()
    made.shard(mesh, settings)
    source, buffers = dict(local_parameters(policy)), dict(policy.named_buffers())
    model.to_empty(device=next(iter(source.values())).device)
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name].clone()
    for name, part in local_parameters(model):
        part.copy_(source[name])
    if forward.head is not None:
        made.head = replace(forward.head, linear=model.get_output_embeddings())  # type: ignore[operator]
    modules = dict(model.named_modules())
    twins: dict[int, Any] = {id(m): modules[name] for name, m in policy.named_modules()}
    made._layers = copy.deepcopy(forward._layers, twins)
    return made


def local_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """This rank's parts of the parameters, by name; they share memory with the parameters."""
    for name, parameter in model.named_parameters():
        yield name, local(parameter)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from all ranks."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Parts:
    """This rank's parts of the trained parameters, as parameters of an optimizer.

    AdamW computes entry by entry, so it needs no other part.
    """

    def __init__(self, model: nn.Module) -> None:
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.sharded: dict[str, nn.Parameter] = dict(trained)
        self._parts = {name: nn.Parameter(local(p)) for name, p in trained}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As of a model."""
        return iter(self._parts.items())

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return list(self._parts.values())

    @property
    def of_heads(self) -> list[nn.Parameter]:
        """Those whose gradient each of the ranks that share matrices has a summand of."""
        return [part for name, part in self._parts.items() if HEAD_NORMS.search(name)]

    @property
    def shared(self) -> list[nn.Parameter]:
        """Those that all of the ranks that share matrices have."""
        return [
            part
            for name, part in self._parts.items()
            if getattr(self.sharded[name], "device_mesh", None) is None
            or cast(DTensor, self.sharded[name]).device_mesh.ndim == 1
        ]

    def collect(self) -> None:
        """Add the gradients of the last backward pass to those of the parts."""
        for name, parameter in self.sharded.items():
            if parameter.grad is None:
                continue
            grad, part = local(parameter.grad), self._parts[name]
            if part.grad is None:
                wide = getattr(part, "grad_dtype", None) or grad.dtype
                part.grad = grad.to(wide)
            else:
                part.grad += grad
            parameter.grad = None
