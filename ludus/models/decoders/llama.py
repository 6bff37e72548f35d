"""Reads a Hugging Face model as a Llama-shaped decoder, from its module structure.

Llama-shaped: embeddings; layers that add attention (rotary positions, grouped heads) and a gated
MLP to the residual stream, with RMS norms; a final norm; the output head. `parts` lists what may
differ: Qwen3 has norms on queries and keys, Qwen2 biases, Gemma norms of 1 + weight, soft caps and
sliding windows, OLMo 2 norms after attention and MLP, Phi-3 joint matrices, GLM-4 interleaved
positions, Granite factors, Qwen3-MoE experts. `read` refuses unknown modules by name, and the
sampler then uses its generic path. Deviations that the structure does not show are found by a trial
pass (`probe`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ludus.models.decoders.parts import Experts, Linear, Llama, LlamaLayer, Norm, Rotary, Stacked
from ludus.models.quantisation import is_packed
from ludus.models.windows import UnknownAttention, layer_windows

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
"""Rotary types whose frequencies do not depend on the sequence length. Those of "longrope" change
once, at a length that the config tells."""

_NORMS: dict[frozenset[str], tuple[str | None, ...]] = {
    frozenset(name for name in names if name): names
    for names in (
        ("input_layernorm", None, "post_attention_layernorm", None),
        (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        (
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_mlp_layernorm",
        ),
    )
}
"""Norms before and after attention, before and after the MLP, by the names of all that a layer has.
The same name stands at different places."""
_SEPARATE = {"q_proj", "k_proj", "v_proj", "o_proj"}
_JOINT = {"qkv_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_JOINT_MLP = {"gate_up_proj", "down_proj"}
_EXPERTS = {"gate", "experts"}


class NotLlama(Exception):
    """The model is not Llama-shaped; the message names the part that differs."""


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
    try:
        windows = layer_windows(config, context_length)
    except UnknownAttention as reason:
        raise NotLlama(str(reason)) from None
    rotary, places = _rotary(core, context_length, embedding.weight.device)
    parts = zip(core.layers, windows, places, strict=True)
    layers = tuple(_layer(layer, config, window, place) for layer, window, place in parts)
    attention = core.layers[0].self_attn
    head_dim = attention.head_dim
    head_norm = layers[0].query_norm
    eps = {_eps(module) for module in base.modules() if _is_norm(module)}
    scale: Any = getattr(embedding, "embed_scale", None) or getattr(core, "embedding_multiplier", 1)
    return Llama(
        model=model,
        context_length=context_length,
        hidden=config.hidden_size,
        heads=layers[0].query.weight().shape[0] // head_dim,
        kv_heads=layers[0].key.weight().shape[0] // head_dim,
        head_dim=head_dim,
        inner=next((layer.up.weight().shape[0] for layer in layers if layer.up), 0),
        vocab=base.lm_head.weight.shape[0],
        eps=_same(eps, "norms of several epsilons"),
        activation=ACTIVATIONS[activation],
        attention_scale=_same(
            {float(layer.self_attn.scaling) for layer in core.layers},
            "layers of several attention scales",
        ),
        embedding_scale=float(scale),
        residual_scale=_same(
            {float(getattr(layer, "residual_multiplier", 1.0)) for layer in core.layers},
            "layers of several residual factors",
        ),
        logit_scale=1.0 / float(getattr(config, "logits_scaling", None) or 1.0),
        attention_softcap=_same(
            {float(getattr(x.self_attn, "attn_logit_softcapping", None) or 0) for x in core.layers},
            "layers of several soft caps",
        ),
        logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0),
        interleaved=_interleaved(attention),
        whole_norms=head_norm is not None and len(head_norm.module.weight) != head_dim,
        embedding=embedding,
        layers=layers,
        final_norm=_norm(core.norm),
        head=_linear(base.lm_head),
        rotary=rotary,
    )


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise NotLlama(reason)


def _same(values: set[float], reason: str) -> float:
    _require(len(values) == 1, reason)
    return values.pop()


def _children(module: nn.Module) -> set[str]:
    return {
        name
        for name, child in module.named_children()
        if not isinstance(child, nn.Dropout) and not name.startswith("act")  # act_fn
    }


def _layer(layer: Any, config: Any, window: int, rotary: int | None) -> LlamaLayer:
    names = _NORMS.get(frozenset(_children(layer) - {"self_attn", "mlp"}))
    if names is None or not {"self_attn", "mlp"} <= _children(layer):
        raise NotLlama(f"{type(layer).__name__} has other parts")
    attention, mlp = layer.self_attn, layer.mlp
    before, after, mlp_before, mlp_after = (
        _norm(getattr(layer, name)) if name else None for name in names
    )
    has_norms = _children(attention) >= _HEAD_NORMS
    query, key, value = _heads(attention, config)
    if has_norms:
        sizes = (len(query.weight()), len(key.weight()))
        widths = (len(attention.q_norm.weight), len(attention.k_norm.weight))
        _require(widths in {(attention.head_dim,) * 2, sizes}, "norms over some of the heads")
    mixture = _experts(mlp) if _children(mlp) == _EXPERTS else None
    gate, up, down = (None, None, None) if mixture is not None else _gated(mlp)
    return LlamaLayer(
        attention_norm=before,
        query=query,
        key=key,
        value=value,
        output=_linear(attention.o_proj),
        query_norm=_norm(attention.q_norm) if has_norms else None,
        key_norm=_norm(attention.k_norm) if has_norms else None,
        attention_post_norm=after,
        mlp_norm=mlp_before,
        gate=gate,
        up=up,
        down=down,
        experts=mixture,
        mlp_post_norm=mlp_after,
        window=window,
        rotary=rotary,
    )


def _heads(attention: Any, config: Any) -> list[Linear]:
    """Layers of queries, keys and values."""
    parts = _children(attention) - _HEAD_NORMS
    _require(parts in (_SEPARATE, _JOINT), f"{type(attention).__name__} has other parts")
    if parts == _SEPARATE:
        return [_linear(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj")]
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    sizes = [count * attention.head_dim for count in (heads, kv_heads, kv_heads)]
    return _split(attention.qkv_proj, sizes)


def _gated(mlp: Any) -> list[Linear]:
    """Layers gate, up and down of an MLP."""
    parts = _children(mlp)
    _require(parts in (_MLP, _JOINT_MLP), f"{type(mlp).__name__} has other parts")
    if parts == _MLP:
        return [_linear(getattr(mlp, name)) for name in ("gate_proj", "up_proj", "down_proj")]
    down = _linear(mlp.down_proj)
    return [*_split(mlp.gate_up_proj, [down.weight().shape[1]] * 2), down]


def _split(module: Any, sizes: Sequence[int]) -> list[Linear]:
    """The layers of a joint module, by their outputs."""
    total = len(_linear(module).weight())
    _require(total == sum(sizes), f"a joint layer of {total} outputs, not {sum(sizes)}")
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [Linear(module, (stop - size, stop)) for size, stop in zip(sizes, stops, strict=True)]


def _experts(mlp: Any) -> Experts:
    """A mixture of experts whose weights are stacked, as transformers keeps them."""
    gate, experts = _unwrapped(mlp.gate), _unwrapped(mlp.experts)
    names = {name for name, _ in experts.named_parameters()}
    plain = names == {"gate_up_proj", "down_proj"}
    plain &= getattr(experts, "is_concatenated", False) and not experts.is_transposed
    plain &= {name for name, _ in gate.named_parameters()} == {"weight"}
    plain &= hasattr(gate, "top_k")
    _require(plain, f"{type(mlp).__name__} has other parts")
    count, _, inner = experts.down_proj.shape
    return Experts(
        module=mlp,
        router=Stacked(mlp.gate, "weight"),
        gate_up=Stacked(mlp.experts, "gate_up_proj"),
        down=Stacked(mlp.experts, "down_proj"),
        count=count,
        inner=inner,
        top=int(gate.top_k),
        normalised=_normalised(gate),
    )


def _normalised(gate: Any) -> bool:
    """True if the shares of a token's experts add up to 1: Mixtral's do, Qwen3-MoE's may."""
    try:
        _, shares, _ = gate(torch.ones_like(gate.weight[:1]))
        return bool((shares.float().sum() - 1).abs() < 1e-2)
    except (TypeError, ValueError, AttributeError) as error:
        raise NotLlama(f"a router of type {type(gate).__name__}: {error}") from None


def _unwrapped(module: Any) -> Any:
    """The module inside of peft's adapters of single parameters."""
    while hasattr(module, "base_layer"):
        plain = hasattr(module, "parameter_name") and hasattr(module, "get_delta_weight")
        _require(plain, f"adapters of type {type(module).__name__}")
        module = module.base_layer
    return module


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


def _rotary(
    core: Any, length: int, device: torch.device
) -> tuple[tuple[Rotary, ...], list[int | None]]:
    """Returns the tables of all kinds of layers, and each layer's table; None: no positions."""
    module = core.rotary_emb
    rope_type = getattr(module, "rope_type", None)
    types = rope_type if isinstance(rope_type, dict) else {None: rope_type}
    like = torch.zeros(1, device=device, dtype=torch.float32)
    positions = torch.arange(length, device=device)[None]
    tables: dict[Any, Rotary] = {}
    for kind, name in types.items():
        _require_constant(name, core.config.rope_parameters, kind, length)
        cosine, sine = module(like, positions, *([] if kind is None else [kind]))
        tables[kind] = Rotary(cosine[0].contiguous(), sine[0].contiguous())
    widths = {table.cosine_TD.shape[1] for table in tables.values()}
    _require(len(widths) == 1, "rotary positions of several widths")
    order = list(tables)
    kinds = core.config.layer_types if None not in types else [None] * len(core.layers)
    places = [
        order.index(kind) if getattr(layer.self_attn, "use_rope", True) else None
        for layer, kind in zip(core.layers, kinds, strict=True)
    ]
    return tuple(tables.values()), places


def _require_constant(name: Any, parameters: Any, kind: Any, length: int) -> None:
    """Errors: NotLlama for rotary frequencies that may change within the context."""
    if name == "longrope":
        own = parameters if kind is None else parameters[kind]
        first = own.get("original_max_position_embeddings") or 0
        _require(length <= first, f"rotary positions of type 'longrope' beyond {first} tokens")
    else:
        _require(name in ROPE_TYPES, f"rotary positions of type {name!r}")


def _interleaved(attention: Any) -> bool:
    """True if rotary pairs are neighbours (0 1), (2 3): asks `rotate_half` of the model's file."""
    source = sys.modules[type(attention).__module__]
    rotate_half = getattr(source, "rotate_half", None)
    if rotate_half is None:
        return False
    turned: list[float] = rotate_half(torch.arange(4.0)).tolist()
    return turned == [-1.0, 0.0, -3.0, 2.0]
