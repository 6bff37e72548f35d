"""The native layers and scores are the model's own, in values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_tree import COMMON, TILED, branching, outcome, require_equal
from transformers import AutoModelForCausalLM, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config

from ludus.train.forward import Forward
from ludus.train.kernels import logprobs
from ludus.train.kernels.bindings import Kernels, kernels

pytestmark = pytest.mark.skipif(
    kernels(torch.float32) is None, reason="no C compiler here, or LUDUS_NATIVE=0"
)
FUSED = {
    "llama": TILED["llama"],
    "gemma": TILED["gemma"],
    "qwen2": Qwen2Config(**COMMON, num_key_value_heads=2),
    "qwen3": Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=8),
    "phi3": Phi3Config(**COMMON, num_key_value_heads=2),
    "window": MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=8),
    "some windows": Qwen3Config(
        **COMMON,
        num_key_value_heads=2,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
    ),
}


def make(family: str) -> Any:
    torch.manual_seed(0)
    config = (FUSED | TILED)[family]
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


@pytest.mark.parametrize("family", FUSED)
def test_layers(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    model, samples = make(family), branching(7)
    assert Forward(model)._layers is not None
    assert all("forward" not in vars(layer) for layer in model.model.layers)
    found = outcome(model, samples, "tree", 200)
    monkeypatch.setattr(Forward, "_fused", lambda _: None)
    monkeypatch.setattr(logprobs, "_kernels", lambda *_: None)
    require_equal(found, outcome(model, samples, "tree", 200))


def test_a_scaled_residual_keeps_its_own_layers() -> None:
    """Granite has Llama's modules, and a factor of its own."""
    model = AutoModelForCausalLM.from_config(
        type(TILED["granite"])(**COMMON, num_key_value_heads=2, residual_multiplier=0.5),
        attn_implementation="sdpa",
    )
    assert Forward(model)._layers is None


@pytest.mark.parametrize("sharper", [1.0, 4.0, 8.0, 16.0])
def test_layers_of_sharp_heads(sharper: float) -> None:
    """Their gradients of queries and keys cancel, so rounding is a large part of them."""
    model = make("qwen3")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.mul_(sharper)
            layer.self_attn.k_norm.weight.mul_(sharper)
    assert Forward(model)._layers is not None


@pytest.mark.parametrize("sharper", [1.0, 8.0, 16.0])
def test_wrong_layers_are_not_used(monkeypatch: pytest.MonkeyPatch, sharper: float) -> None:
    model = make("qwen3")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.mul_(sharper)
            layer.self_attn.k_norm.weight.mul_(sharper)
    own = Kernels.rotate_back

    def wrong(*args: Any) -> Any:
        dqkv, dnorms = own(*args)
        heads, kv_heads, dim = args[1]
        dqkv[:, : (heads + kv_heads) * dim] *= -1  # queries and keys alone
        return dqkv, dnorms

    monkeypatch.setattr(Kernels, "rotate_back", wrong)
    assert Forward(model)._layers is None
