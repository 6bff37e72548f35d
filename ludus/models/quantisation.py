"""Base weights in 4 bits under adapters, by bitsandbytes (QLoRA, Dettmers et al. 2023,
arXiv:2305.14314).

The base of a pretrained model is packed as it is loaded: NF4 in blocks of 64 with scales quantised
again, about 0.52 bytes a weight. Embeddings, norms and the output layer stay in `model.dtype`, as
do products. A sampler reads unpacked weights: it computes with the same numbers as the learner.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ludus.config.sections import ModelConfig
from ludus.core.errors import MissingDependency
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

BYTES_PER_WEIGHT = 0.516
"""Half a byte, a byte of scale for 64 weights, and the scales of scales."""


def loading(config: ModelConfig) -> dict[str, Any]:
    """Arguments of `from_pretrained` that pack the base; none without `model.lora.quantise`.

    Errors: MissingDependency without bitsandbytes.
    """
    if config.lora is None or config.lora.quantise is None:
        return {}
    if not config.quantised:
        log.info("model.lora.quantise is for a GPU: plain LoRA here", device=config.device)
        return {}
    for package in ("bitsandbytes", "accelerate"):
        if find_spec(package) is None:
            raise MissingDependency(package, "qlora", "model.lora.quantise: nf4")
    from transformers import BitsAndBytesConfig

    packing = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, config.dtype),
    )
    return {"quantization_config": packing, "device_map": {"": config.device}}


def is_packed(module: Any) -> bool:
    """True for a linear layer whose weights are packed; False for the adapter around one."""
    return not hasattr(module, "base_layer") and _has_packed(module)


def _has_packed(module: Any) -> bool:
    return getattr(getattr(module, "weight", None), "quant_state", None) is not None


def keep_packing(model: nn.Module) -> None:
    """Let no forward pass pack the weights anew: on some CPUs bitsandbytes does in evaluations, and
    the weights' digest would change."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        if is_packed(module) and hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def weight_of(module: Any) -> Tensor:
    """The weight [outputs, inputs] of a linear layer, unpacked."""
    weight: Tensor = module.weight.detach()
    if not is_packed(module):
        return weight
    from bitsandbytes.functional import dequantize_4bit

    state = module.weight.quant_state
    unpacked: Tensor = dequantize_4bit(weight, state)
    return unpacked.to(state.dtype)


def unpacked_copy(model: Any) -> Any:
    """A copy without packed weights: adapters on packed layers are merged into the unpacked
    weights; others stay. A model without packed weights is copied as it is."""
    copied = copy.deepcopy(model)
    base = copied.get_base_model() if hasattr(copied, "get_base_model") else copied
    for name, module in list(base.named_modules()):
        inner = getattr(module, "base_layer", module)
        if not is_packed(inner) or name.endswith(".base_layer"):
            continue
        weight = weight_of(inner)
        if inner is not module:
            for adapter in module.active_adapters:
                weight = weight + module.get_delta_weight(adapter).detach().to(weight.dtype)
        plain = nn.Linear(
            weight.shape[1], weight.shape[0], inner.bias is not None, weight.device, weight.dtype
        )
        plain.weight = nn.Parameter(weight, requires_grad=False)
        if inner.bias is not None:
            plain.bias = nn.Parameter(inner.bias.detach(), requires_grad=False)
        parent, _, own = name.rpartition(".")
        setattr(base.get_submodule(parent), own, plain)
    _forget(base)
    return copied


def _forget(base: Any) -> None:
    """Remove what transformers keeps of the packing, which it would write with the model."""
    for owner, names in (
        (base.config, ("quantization_config",)),
        (base, ("hf_quantizer", "is_loaded_in_4bit", "is_quantized", "quantization_method")),
    ):
        for name in names:
            if name in vars(owner):
                delattr(owner, name)
