"""Reads a Hugging Face model as a Llama-shaped decoder, from its module structure.

Llama-shaped: embeddings; layers that add attention (rotary positions, grouped heads) and a gated
MLP, each after an RMS norm, to the residual stream; a final norm; the output head. Variants: Qwen3
has norms on queries and keys, Qwen2 has biases, Gemma has norms of 1 + weight and scaled
embeddings. `read` refuses unknown modules by name, and the sampler then uses its generic path.
Deviations that the structure does not show are found by a trial pass (`probe`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ludus.models.quantisation import is_packed, weight_of

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
"""Rotary types whose frequencies do not depend on the sequence length."""

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class NotLlama(Exception):
    """The model is not Llama-shaped; the message names the part that differs."""


@dataclass(frozen=True)
class Norm:
    """An RMS norm: x / rms(x) * (weight + offset)."""

    module: Any
    offset: float

    def scale(self) -> Tensor:
        """Returns the factor of the normalised values."""
        weight: Tensor = self.module.weight.detach()
        return weight + self.offset if self.offset else weight


@dataclass(frozen=True)
class Linear:
    """A linear layer, with or without low-rank adapters."""

    module: Any

    def weight(self) -> Tensor:
        """Returns the weight [outputs, inputs] with active adapters merged."""
        module = self.module
        base = getattr(module, "base_layer", module)
        weight = weight_of(base)
        if base is not module and not module.disable_adapters and not module.merged:
            for name in module.active_adapters:
                weight = weight + module.get_delta_weight(name).detach().to(weight.dtype)
        return weight

    def bias(self) -> Tensor | None:
        """Returns the bias [outputs]."""
        bias = getattr(self.module, "base_layer", self.module).bias
        return None if bias is None else bias.detach()


@dataclass(frozen=True)
class LlamaLayer:
    """Modules of one layer."""

    attention_norm: Norm
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    mlp_norm: Norm
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True)
class Llama:
    """Sizes and modules of a decoder; weights are read from the model's own parameters.

    `cosine_TD` and `sine_TD` are the rotary tables of all positions of the context, [T, rotary
    dimensions], in float32.
    """

    model: Any
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    eps: float
    activation: str
    attention_scale: float
    embedding_scale: float
    embedding: nn.Embedding
    layers: tuple[LlamaLayer, ...]
    final_norm: Norm
    head: Linear
    cosine_TD: Tensor
    sine_TD: Tensor

    def norms(self) -> list[Norm]:
        """Returns the norms of all layers, and the final one."""
        layers = [
            (layer.attention_norm, layer.query_norm, layer.key_norm, layer.mlp_norm)
            for layer in self.layers
        ]
        return [*[norm for layer in layers for norm in layer if norm is not None], self.final_norm]


@torch.no_grad()
def read(model: Any, context_length: int) -> Llama:
    """Returns the model as a Llama-shaped decoder. Errors: NotLlama."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    _require(_children(base) == {"model", "lm_head"}, f"{type(base).__name__} has other parts")
    core = base.model
    children = {"embed_tokens", "layers", "norm", "rotary_emb"}
    _require(_children(core) == children, f"{type(core).__name__} has other parts")
    config = base.config.get_text_config()
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    _require(activation in ACTIVATIONS, f"activation {activation!r}")
    embedding = core.embed_tokens
    _require(isinstance(embedding, nn.Embedding), f"embeddings of type {type(embedding).__name__}")
    layers = tuple(_layer(layer) for layer in core.layers)
    attention = core.layers[0].self_attn
    hidden, head_dim = config.hidden_size, attention.head_dim
    layer = layers[0]
    eps = {_eps(module) for module in base.modules() if _is_norm(module)}
    _require(len(eps) == 1, "norms of several epsilons")
    scales = {float(layer.self_attn.scaling) for layer in core.layers}
    _require(len(scales) == 1, "layers of several attention scales")
    cosine_TD, sine_TD = _rotary(core.rotary_emb, context_length, embedding.weight.device)
    return Llama(
        model=model,
        hidden=hidden,
        heads=layer.query.weight().shape[0] // head_dim,
        kv_heads=layer.key.weight().shape[0] // head_dim,
        head_dim=head_dim,
        inner=layer.up.weight().shape[0],
        vocab=base.lm_head.weight.shape[0],
        eps=eps.pop(),
        activation=ACTIVATIONS[activation],
        attention_scale=scales.pop(),
        embedding_scale=float(getattr(embedding, "embed_scale", 1.0)),
        embedding=embedding,
        layers=layers,
        final_norm=_norm(core.norm),
        head=_linear(base.lm_head),
        cosine_TD=cosine_TD,
        sine_TD=sine_TD,
    )


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise NotLlama(reason)


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _layer(layer: Any) -> LlamaLayer:
    _require(_children(layer) == _LAYER, f"{type(layer).__name__} has other parts")
    attention, mlp = layer.self_attn, layer.mlp
    has_norms = {"q_norm", "k_norm"} <= _children(attention)
    expected = _ATTENTION | ({"q_norm", "k_norm"} if has_norms else set())
    _require(_children(attention) == expected, f"{type(attention).__name__} has other parts")
    _require(_children(mlp) == _MLP, f"{type(mlp).__name__} has other parts")
    if has_norms:
        width = attention.q_norm.weight.shape[0]
        _require(width == attention.head_dim, "norms over all heads together")
    return LlamaLayer(
        attention_norm=_norm(layer.input_layernorm),
        query=_linear(attention.q_proj),
        key=_linear(attention.k_proj),
        value=_linear(attention.v_proj),
        output=_linear(attention.o_proj),
        query_norm=_norm(attention.q_norm) if has_norms else None,
        key_norm=_norm(attention.k_norm) if has_norms else None,
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
    )


def _linear(module: Any) -> Linear:
    """A plain linear layer, or a peft layer with plain low-rank adapters."""
    base = getattr(module, "base_layer", module)
    plain = type(base) is nn.Linear or is_packed(base)
    _require(plain, f"a linear layer of type {type(base).__name__}")
    if base is not module:
        plain = hasattr(module, "get_delta_weight")
        variants = ("use_dora", "lora_bias")
        plain &= not any(value for key in variants for value in getattr(module, key, {}).values())
        _require(plain, f"adapters of type {type(module).__name__}")
    return Linear(module)


def _is_norm(module: nn.Module) -> bool:
    return hasattr(module, "variance_epsilon") or type(module).__name__.endswith("RMSNorm")


def _eps(module: Any) -> float:
    return float(getattr(module, "variance_epsilon", None) or module.eps)


def _norm(module: Any) -> Norm:
    """RMS norm; its output for a row of ones tells whether its factor is weight or 1 + weight."""
    _require(_is_norm(module) and _children(module) == set(), f"norm {type(module).__name__}")
    weight = module.weight
    output = module(torch.ones_like(weight)).float()
    for offset in (0.0, 1.0):
        expected = (weight.float() + offset) / (1 + _eps(module)) ** 0.5
        if torch.allclose(output, expected, rtol=1e-2, atol=1e-4) or not weight.isfinite().all():
            return Norm(module, offset)
    raise NotLlama(f"norm {type(module).__name__}")


def _rotary(module: Any, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the cosine and sine tables [length, rotary dimensions]."""
    kind = getattr(module, "rope_type", None)
    _require(kind in ROPE_TYPES, f"rotary positions of type {kind!r}")
    like = torch.zeros(1, device=device, dtype=torch.float32)
    cosine, sine = module(like, torch.arange(length, device=device)[None])
    return cosine[0].contiguous(), sine[0].contiguous()
