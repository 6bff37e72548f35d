"""The weights of a sharded model for its samplers: whole tensors, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.errors import ConfigError
from ludus.train.checkpoint.state import all_tensors, trained_tensors
from ludus.train.distributed.sharding import full

ADAPTED = "base_model.model."
"""Begins the names of a model's tensors once peft has wrapped it."""


@torch.no_grad()
def buckets(model: nn.Module, num_bytes: int, *, merged: bool) -> Iterator[dict[str, Tensor]]:
    """Yields whole tensors by name, at most `num_bytes` at once; a larger tensor is alone.

    Args:
        merged: all tensors of the plain model, with adapters merged; else the trained tensors.
    """
    tensors = _merged(model) if merged else _trained(model)
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > num_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


def _trained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in trained_tensors(model).items():
        yield name, full(tensor)


def _merged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    if not hasattr(model, "merge_and_unload"):
        yield from ((name, full(tensor)) for name, tensor in all_tensors(model).items())
        return
    modules = dict(model.named_modules())
    for name, tensor in all_tensors(model).items():
        if ".lora_" in name:
            continue
        whole = full(tensor)
        owner, _, kind = name.rpartition(".base_layer.")
        if owner and kind == "weight":
            whole = whole + _delta(modules[owner], owner).to(whole.dtype)
        yield name.removeprefix(ADAPTED).replace(".base_layer.", "."), whole


def _delta(module: Any, name: str) -> Tensor:
    """The sum of a linear layer's adapters: scale B A, as peft merges them."""
    from peft.tuners.lora import Linear as LoraLinear  # takes seconds; a model without has none

    if not isinstance(module, LoraLinear) or module.fan_in_fan_out:
        raise ConfigError(
            f"model.lora.targets: the adapter of {name} ({type(module).__name__}) cannot be merged "
            "by a sharded learner; adapt linear layers only"
        )
    total: Any = 0.0
    for adapter in module.active_adapters:
        low, high = (full(part[adapter].weight) for part in (module.lora_A, module.lora_B))
        total = total + (high.float() @ low.float()) * module.scaling[adapter]
    return total  # type: ignore[no-any-return]
