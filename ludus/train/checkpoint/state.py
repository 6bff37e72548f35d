"""State of a model, an optimizer and the random generators, as tensors and JSON.

The trained tensors of a model are the parameters that require gradients and the persistent
buffers: all tensors in full training, the adapters (and `modules_to_save`) in LoRA. The other
tensors are the base, which is not saved but identified by a digest.
"""

from __future__ import annotations

import base64
import hashlib
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ludus.core.errors import CheckpointError

_MIN_BYTES_FOR_THREADS = 1 << 24


class Named(Protocol):
    """A model, or a part of one: parameters with names."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As of a torch module."""


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and persistent buffers by name; tied parameters once."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    with_aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in model.state_dict().items():
        if name in with_aliases:
            continue
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name} of {type(model).__name__} is not a tensor: it cannot be saved"
            )
        tensors[name] = value
    return tensors


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the trained tensors; in a frozen model, all tensors."""
    tensors = all_tensors(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return tensors
    packed = packed_names(model, tensors)
    return {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.requires_grad or not (isinstance(tensor, nn.Parameter) or name in packed)
    }


def packed_names(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Returns those of the tensors' names that belong to packed weights (`model.lora.quantise`):
    the weights, and their scales."""
    packed = {name for name, p in model.named_parameters() if hasattr(p, "quant_state")}
    return {name for name in names if _weight_of(name) in packed} if packed else set()


def _weight_of(name: str) -> str:
    """`a.weight` of `a.weight`, and of `a.weight.absmax`."""
    head, found, _ = name.partition(".weight")
    return head + found


def fingerprint(model: nn.Module) -> str:
    """Returns a digest of all weights as 32 hexadecimal digits.

    Independent of device, process and platform. Published weights carry the fingerprint.
    """
    return digest(all_tensors(model))


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns BLAKE2b over names, types, shapes and bytes, in the order of the names."""
    names = sorted(tensors)
    if sum(tensor.nbytes for tensor in tensors.values()) < _MIN_BYTES_FOR_THREADS:
        return digest_each((name, tensors[name]) for name in names)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        parts = list(pool.map(lambda name: _content(tensors[name]), names))
    whole = hashlib.blake2b(digest_size=16)
    for name, part in zip(names, parts, strict=True):
        whole.update(f"{name} {layout(tensors[name])} ".encode() + part)
    return whole.hexdigest()


def digest_each(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The `digest` of tensors in the order of their names, of which one at a time is needed."""
    whole = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        whole.update(f"{name} {layout(tensor)} ".encode() + _content(tensor))
    return whole.hexdigest()


def layout(tensor: Tensor) -> str:
    """Returns type and shape, e.g. `float32[64, 8]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def raw(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor on the CPU: uint8 [num_bytes]."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _content(tensor: Tensor) -> bytes:
    return hashlib.blake2b(raw(tensor).numpy().data).digest()


def optimizer_state(
    optimizer: torch.optim.Optimizer, model: Named
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns an optimizer as tensors, named `parameter/key`, and JSON: class, groups, scalars.

    Errors: CheckpointError for a parameter of another model, or a value that is not JSON.
    """
    names = _parameter_names(optimizer, model)
    raw_state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for index, entries in raw_state["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{names[index]}/{key}"] = value
            else:
                scalars.setdefault(names[index], {})[key] = value
    groups = [
        {**group, "params": [names[index] for index in group["params"]]}
        for group in raw_state["param_groups"]
    ]
    described = {"class": type(optimizer).__name__, "groups": groups, "scalars": scalars}
    require_json(described, "optimizer")
    return tensors, described


def require_same_optimizer(
    optimizer: torch.optim.Optimizer, model: Named, described: dict[str, Any]
) -> None:
    """Errors: CheckpointError if class or groups differ from the saved ones."""
    if type(optimizer).__name__ != described["class"]:
        raise CheckpointError(
            f"it holds the state of {described['class']}, the run uses {type(optimizer).__name__}"
        )
    names = iter(_parameter_names(optimizer, model))
    now = [[next(names) for _ in group["params"]] for group in optimizer.param_groups]
    saved = [group["params"] for group in described["groups"]]
    if now != saved:
        raise CheckpointError(
            f"its optimizer has parameter groups of {[len(group) for group in saved]} parameters, "
            f"the run's has {[len(group) for group in now]}, or their order differs"
        )


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    model: Named,
    tensors: Mapping[str, Tensor],
    described: dict[str, Any],
) -> None:
    """Load the saved state; `require_same_optimizer` must accept the optimizer."""
    index_of = {name: i for i, name in enumerate(_parameter_names(optimizer, model))}
    state: dict[int, dict[str, Any]] = {}
    for place, tensor in tensors.items():
        name, key = place.rsplit("/", 1)
        state.setdefault(index_of[name], {})[key] = tensor
    for name, entries in described["scalars"].items():
        state.setdefault(index_of[name], {}).update(entries)
    groups = [
        {
            key: tuple(value) if isinstance(now.get(key), tuple) else value
            for key, value in {
                **saved,
                "params": [index_of[name] for name in saved["params"]],
            }.items()
        }
        for saved, now in zip(described["groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    # torch casts moments to the parameter's type; fp32 moments of bf16 weights must stay fp32.
    for index, parameter in enumerate(_parameters(optimizer)):
        for key, saved_value in state.get(index, {}).items():
            now_value = optimizer.state[parameter][key]
            if isinstance(saved_value, Tensor) and saved_value.dtype != now_value.dtype:
                optimizer.state[parameter][key] = saved_value.to(now_value.device)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _parameter_names(optimizer: torch.optim.Optimizer, model: Named) -> list[str]:
    """Returns the parameters' names, in the order of `Optimizer.state_dict`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    try:
        return [names[id(parameter)] for parameter in _parameters(optimizer)]
    except KeyError:
        raise CheckpointError("the optimizer holds a parameter that is not in the model") from None


def random_state() -> dict[str, Any]:
    """Returns the state of the random generators of Python, NumPy and torch, as JSON."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": _to_base64(torch.get_rng_state()),
        "cuda": [_to_base64(state) for state in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
    }


def seed_random(seed: int) -> None:
    """Seed the global random generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the state of `random_state`.

    Errors: CheckpointError if the number of CUDA devices differs.
    """
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(state["cuda"]) != num_devices:
        raise CheckpointError(
            f"the random state is of {len(state['cuda'])} CUDA devices, this machine has "
            f"{num_devices}: resume with the same number"
        )
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_from_base64(state["torch"]))
    torch.cuda.set_rng_state_all([_from_base64(text) for text in state["cuda"]])


def _to_base64(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _from_base64(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def require_json(value: Any, place: str) -> None:
    """Refuse values that JSON changes or cannot hold: objects, tensors, keys that are not strings.

    Tuples are allowed; they are read back as lists. Errors: CheckpointError with the place.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{place}: the key {key!r} must be a string")
            require_json(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            require_json(item, f"{place}[{i}]")
    elif not isinstance(value, str | int | float | bool | None):
        raise CheckpointError(
            f"{place} is of type {type(value).__name__}: use numbers, strings, lists, dictionaries"
        )
