"""Data record of a Llama-shaped decoder: sizes, constants, modules, and what differs between model
families. Decoders branch on these values, never on a model's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ludus.models.quantisation import weight_of


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
    """A linear layer, with or without low-rank adapters.

    Args:
        rows: its outputs, first and after the last, within a module that has the outputs of several
            layers (Phi-3's `qkv_proj`); None: all.
    """

    module: Any
    rows: tuple[int, int] | None = None

    def weight(self) -> Tensor:
        """Returns the weight [outputs, inputs] with active adapters merged."""
        module = self.module
        base = getattr(module, "base_layer", module)
        weight = weight_of(base)
        if base is not module and not module.disable_adapters and not module.merged:
            for name in module.active_adapters:
                weight = weight + module.get_delta_weight(name).detach().to(weight.dtype)
        return weight if self.rows is None else weight[slice(*self.rows)]

    def bias(self) -> Tensor | None:
        """Returns the bias [outputs]."""
        bias: Tensor | None = getattr(self.module, "base_layer", self.module).bias
        if bias is None:
            return None
        return bias.detach() if self.rows is None else bias.detach()[slice(*self.rows)]


def project(parts: Sequence[Linear], x: Tensor) -> list[Tensor]:
    """Returns the outputs of several layers of one input; a module that they share runs once."""
    if parts[0].rows is None:
        return [part.module(x) for part in parts]
    joint = parts[0].module(x)
    return [joint[..., slice(*part.rows)] for part in parts if part.rows is not None]


def weights_of(parts: Sequence[Linear]) -> list[Tensor]:
    """Returns the weights of several layers; a module that they share merges its adapters once."""
    if len(parts) == 1 or parts[0].rows is None:
        return [part.weight() for part in parts]
    joint = Linear(parts[0].module).weight()
    return [joint[slice(*part.rows)] for part in parts if part.rows is not None]


@dataclass(frozen=True)
class Stacked:
    """A parameter that has the weights of all experts, or of their router, with or without low-rank
    adapters.

    Args:
        module: the module that has it, or adapters around that module.
    """

    module: Any
    name: str

    def weight(self) -> Tensor:
        """Returns the parameter with active adapters merged."""
        module, deltas = self.module, []
        while hasattr(module, "base_layer"):
            if module.parameter_name == self.name and not (
                module.disable_adapters or module.merged
            ):
                deltas += [module.get_delta_weight(name) for name in module.active_adapters]
            module = module.base_layer
        weight: Tensor = getattr(module, self.name).detach()
        for delta in deltas:
            weight = weight + delta.detach().to(weight.dtype)
        return weight


@dataclass(frozen=True)
class Experts:
    """A mixture of gated MLPs: a token takes the `top` experts of the highest softmax scores, each
    with its share; `normalised`: the shares are divided by their sum.

    Args:
        module: the whole mixture.
        router: [experts, hidden].
        gate_up: [experts, 2 inner, hidden].
        down: [experts, hidden, inner].
    """

    module: Any
    router: Stacked
    gate_up: Stacked
    down: Stacked
    count: int
    inner: int
    top: int
    normalised: bool


@dataclass(frozen=True)
class LlamaLayer:
    """Modules of one layer.

        x = x + residual_scale * attention_post_norm(attention(attention_norm(x)))
        x = x + residual_scale * mlp_post_norm(mlp(mlp_norm(x)))

    Args:
        attention_norm, attention_post_norm, mlp_norm, mlp_post_norm: None: absent.
        query_norm, key_norm: over each head, or over all heads together (`Llama.whole_norms`).
        gate, up, down: the MLP; None where `experts` is the MLP.
        window: positions that a token attends to, its own included; 0: all.
        rotary: index into `Llama.rotary`; None: no positions.
    """

    attention_norm: Norm | None
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    gate: Linear | None
    up: Linear | None
    down: Linear | None
    experts: Experts | None
    mlp_post_norm: Norm | None
    window: int
    rotary: int | None

    def norms(self) -> list[Norm]:
        """Returns the norms that the layer has."""
        found = (
            self.attention_norm,
            self.query_norm,
            self.key_norm,
            self.attention_post_norm,
            self.mlp_norm,
            self.mlp_post_norm,
        )
        return [norm for norm in found if norm is not None]


@dataclass(frozen=True)
class Rotary:
    """Rotary tables of all positions of the context, [T, rotary dimensions], in float32."""

    cosine_TD: Tensor
    sine_TD: Tensor


@dataclass(frozen=True)
class Llama:
    """Sizes, constants and modules of a decoder; weights are read from the model's own parameters.

    Args:
        inner: of MLPs that are no mixtures; 0 without any.
        interleaved: rotary pairs are neighbouring dimensions, not dimensions of the two halves.
        whole_norms: norms of queries and keys are over all heads together.
        attention_softcap, logit_softcap: cap * tanh(x / cap) of scores and logits; 0: none.
        residual_scale: factor of what attention and MLP add to the residual stream.
        logit_scale: factor of the logits, before the soft cap.
    """

    model: Any
    context_length: int
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
    residual_scale: float
    logit_scale: float
    attention_softcap: float
    logit_softcap: float
    interleaved: bool
    whole_norms: bool
    embedding: nn.Embedding
    layers: tuple[LlamaLayer, ...]
    final_norm: Norm
    head: Linear
    rotary: tuple[Rotary, ...]

    @property
    def rotary_dim(self) -> int:
        """Rotary dimensions of a head; 0 without positions."""
        return self.rotary[0].cosine_TD.shape[1] if self.rotary else 0

    @property
    def experts(self) -> Experts | None:
        """The mixture of the first layer that has one."""
        return next((layer.experts for layer in self.layers if layer.experts), None)

    @property
    def post_norms(self) -> bool:
        """True if a norm follows attention or MLP."""
        return any(
            layer.attention_post_norm is not None or layer.mlp_post_norm is not None
            for layer in self.layers
        )

    def norms(self) -> list[Norm]:
        """Returns the norms of all layers, and the final one."""
        return [*(norm for layer in self.layers for norm in layer.norms()), self.final_norm]


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Returns cap * tanh(x / cap); x for cap 0."""
    return torch.tanh(x / cap) * cap if cap else x


def limited_windows(llama: Llama, most: int | None) -> list[int]:
    """Returns the layers' windows, of at most `most` positions; None: as they are."""
    windows = [layer.window for layer in llama.layers]
    return windows if most is None else [min(window, most) for window in windows]
