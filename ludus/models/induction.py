"""Induction heads at the start of a new model: it can look words up in its prompt before it trains.

An induction head (Olsson et al. 2022, arXiv:2209.11895) finds an earlier place of the current token
and copies what followed it there. Training forms it late and suddenly, if at all: a small model
names *some* price of a menu long before the price of the good that it is to buy.

    layer 0    query head n of the first group attends to the token n + 1 places back; head 0 writes
               a projection P of that token into a subspace R of the residual stream
    layer 1    the first group's queries are P of the current token, its keys what R holds, so a
               token attends to the places behind its earlier ones; head 0 copies the token there

Only first weights are set: the model keeps its shape, and training may change each of them. A
constant coordinate of the embeddings gives the heads of layer 0 queries and keys that depend on
positions only. With tied embeddings it adds the same to all logits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ludus.core.errors import ConfigError

NEAR = 0.1
"""Radians a token. Rotary frequencies from here on tell neighbours apart and make layer 0's heads;
those below turn little within a prompt, and are left for layer 1's comparison of tokens."""

CONSTANT = 0.5
"""The constant coordinate, as a part of the other coordinates' norm."""

PEAK = 16.0
"""Attention logit at the place that a head looks for."""

MIN_HEAD_DIM = 16
"""Below it a query's few coordinates do not tell tokens apart."""

SMALLEST_INIT, LARGEST_INIT = 1e-3, 1.2
"""Limits of init_range, the upper one as a multiple of hidden_size ** -0.5: twice the default takes
the attention of layer 1 from 0.87 to 0.03; at 1e-4 it is the epsilon of the norms."""

RANDOM = 0.03
"""Factor of all other weights that write to the residual stream: at 1, their random sums would
drown the tokens that the heads compare."""


def check_induction_heads(shape: PreTrainedConfig) -> None:
    """Refuse a shape without room for them. Errors: ConfigError."""
    key = "model.architecture.args.induction_heads"
    _, near = _frequencies(shape)
    small = shape.num_hidden_layers < 2 or shape.hidden_size < 2 * shape.head_dim
    if small or shape.head_dim < MIN_HEAD_DIM or near.all():
        raise ConfigError(
            f"{key}: takes num_layers of at least 2, a head_dim of at least {MIN_HEAD_DIM}, a "
            f"hidden_size of at least 2 head_dim, and rotary frequencies below {NEAR} (rope_theta "
            f"10,000 has some); here num_layers: {shape.num_hidden_layers}, head_dim: "
            f"{shape.head_dim}, hidden_size: {shape.hidden_size}, rope_theta: "
            f"{shape.rope_parameters['rope_theta']:g}"
        )
    most = LARGEST_INIT * shape.hidden_size**-0.5
    if not SMALLEST_INIT <= shape.initializer_range <= most:
        raise ConfigError(
            f"{key}: takes an init_range from {SMALLEST_INIT:g} to {most:.2g} ({LARGEST_INIT:g} / "
            f"sqrt(hidden_size)), here {shape.initializer_range:g}: beyond it other weights drown "
            "the heads"
        )


@torch.no_grad()
def set_induction_heads(model: PreTrainedModel) -> None:
    """Set the first weights of a new Qwen3 or Llama model; draws from torch's global generator."""
    config = model.config
    hidden, dim = config.hidden_size, config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    frequencies, near = _frequencies(config)
    near_dims = torch.cat([near, near])
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight *= RANDOM
        layer.mlp.down_proj.weight *= RANDOM
    first, second = (layer.self_attn for layer in model.model.layers[:2])

    # Embeddings: a constant, and nothing in the subspace that layer 0 writes to.
    norm = config.initializer_range * hidden**0.5
    subspace = torch.cat([torch.zeros(1, dim), _orthogonal(hidden - 1, dim)])
    embeddings = model.get_input_embeddings().weight
    embeddings -= embeddings @ subspace @ subspace.T
    embeddings[:, 0] = CONSTANT * norm
    if not config.tie_word_embeddings:  # else the copied token would not be read as that token
        model.get_output_embeddings().weight.copy_(embeddings)
    project = torch.randn(dim, hidden) / hidden**0.5
    project -= project @ subspace @ subspace.T
    project[:, 0] = 0

    seen = CONSTANT * (hidden / (1 + CONSTANT**2)) ** 0.5  # the constant behind the layer's norm
    size = (PEAK * dim**0.5 / int(near.sum())) ** 0.5 / seen
    for number in range(group):
        _set(first.q_proj.weight, number, size * _at(-number, frequencies, near, hidden))
    _set(first.k_proj.weight, 0, size * _at(1, frequencies, near, hidden))
    _set(first.v_proj.weight, 0, project)
    written = norm * ((1 + CONSTANT**2) / dim) ** 0.5  # of the norm of an embedding
    first.o_proj.weight[:, :dim] = written * subspace

    # The stream has now three parts: the token, the constant, the token before.
    stream = 2 + CONSTANT**2
    match = int((~near_dims).sum()) * (hidden / dim) ** 0.5 / stream
    for number in range(group):
        compared = project * (~near_dims)[:, None] * (PEAK * dim**0.5 / match)
        _set(second.q_proj.weight, number, compared)
    _set(second.k_proj.weight, 0, subspace.T * (~near_dims)[:, None])
    copied = _orthogonal(hidden, dim).T
    _set(second.v_proj.weight, 0, copied)
    second.o_proj.weight[:, :dim] = norm * (stream / dim) ** 0.5 * copied.T

    for attention, dims in ((first, near_dims), (second, ~near_dims)):
        for name in ("q_norm", "k_norm"):  # Qwen3 makes each query and key of norm sqrt(dim)
            if hasattr(attention, name):
                getattr(attention, name).weight[dims] *= (PEAK / dim**0.5) ** 0.5


def _frequencies(shape: PreTrainedConfig) -> tuple[Tensor, Tensor]:
    """Rotary frequencies in radians a token [dim / 2], and which of them tell neighbours apart."""
    half = shape.head_dim // 2
    frequencies = shape.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    return frequencies, frequencies > NEAR * 0.999


def _at(places: int, frequencies: Tensor, near: Tensor, hidden: int) -> Tensor:
    """Weights [dim, hidden] that read the constant as a vector rotated by `places`.

    A query at m of _at(q) and a key at n of _at(k) have the logit sum(cos((m - n + q - k) * f)).
    """
    weights = torch.zeros(2 * len(frequencies), hidden)
    angles = places * frequencies
    weights[:, 0] = torch.cat([near * angles.cos(), near * angles.sin()])
    return weights


def _orthogonal(rows: int, columns: int) -> Tensor:
    """A random matrix [rows, columns] of orthonormal columns."""
    return torch.nn.init.orthogonal_(torch.empty(rows, columns))


def _set(weight: Tensor, head: int, value: Tensor) -> None:
    dim = len(value)
    weight[head * dim : (head + 1) * dim] = value
