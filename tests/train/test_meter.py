"""Step metrics: FLOPs by hand, extents of trees, the metrics of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from ludus.core.types import Group, Segment, Task, Trajectory
from ludus.models.flops import Shape, peak_flops
from ludus.train.meter import Meter, extent, memory


def qwen() -> Any:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=50,
            hidden_size=8,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=6,
            intermediate_size=10,
            tie_word_embeddings=True,
        )
    )


def trajectory() -> Trajectory:
    """P0 of 3, A0 of 2 after it, E0 of 4 after that, and A1 of 1: a branch from P0."""
    return Trajectory(
        "t",
        "g",
        "task",
        segments=[
            Segment(parent=-1, token_ids=[1, 2, 3]),
            Segment(parent=0, token_ids=[4, 5], logprobs=[-0.1, -0.2]),
            Segment(parent=1, token_ids=[6, 7, 8, 9]),
            Segment(parent=0, token_ids=[4], logprobs=[-0.3]),
        ],
    )


def test_shape_of_a_model() -> None:
    shape = Shape.of(qwen())
    attention = 8 * 24 + 2 * 8 * 12 + 24 * 8  # q, k and v, o
    assert shape == Shape(body=3 * (attention + 3 * 8 * 10), head=50 * 8, width=3 * 4 * 6)
    assert shape.forward(2, 1, 3) == 2 * shape.body * 2 + 2 * 400 + 4 * 72 * 3


def test_shape_of_a_model_with_convolutions_for_layers() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=8, n_layer=2, n_head=2))
    assert Shape.of(model) == Shape(body=2 * (8 * 24 + 8 * 8 + 2 * 8 * 32), head=400, width=16)


def test_extent_of_a_tree() -> None:
    # 1+2+3, then 4+5, then 6+7+8+9, then the branch's 4
    assert extent(trajectory()) == (10, 6 + 9 + 30 + 4)


def test_metrics_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.train.meter.peak_flops", lambda device, dtype: 1e6)
    sampler = SimpleNamespace(num_prefill_tokens=100, num_decode_tokens=10)
    sampler.num_evicted_tokens, sampler.cache_peak_bytes, sampler.weight_bytes = 5, 3e9, 2e9
    meter = Meter(qwen(), sampler)
    with meter.rollout():
        sampler.num_prefill_tokens += 7
    sampler.num_prefill_tokens += 1000  # an evaluation's
    with meter.rollout():
        sampler.num_decode_tokens += 3
    step = {"time/sample_s": 2.0, "time/train_s": 4.0, "time/wall_s": 10.0}
    step |= {"train/optimizer_steps": 2.0, "train/tokens": 9.0, "train/unique_tokens": 5.0}
    step |= {"train/loss_tokens": 1.5}
    got = meter.metrics([Group("g", Task(id="task"), [trajectory()])], step)
    shape = Shape.of(qwen())
    sampled = shape.forward(10, 3, 49)
    trained = 3 * shape.forward(10, 3, 49)
    assert got["rollout/unique_tokens"] == 10
    assert got["time/sample_mfu"] == pytest.approx(sampled / 2 / 1e6)
    assert got["time/train_mfu"] == pytest.approx(trained / 4 / 1e6)
    assert got["time/mfu"] == pytest.approx((sampled + trained) / 10 / 1e6)
    assert got["time/peak_gflops"] == 1e-3
    assert got["memory/sampler_weights_gb"] == 2
    assert got["memory/kv_cache_peak_gb"] == 3
    assert got["rollout/evicted_tokens"] == 5
    sampler.num_evicted_tokens = 7
    assert meter.metrics([], step)["rollout/evicted_tokens"] == 2


def test_no_utilisation_above_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peak that was measured under load is too low: the fastest step so far replaces it."""
    monkeypatch.setattr("ludus.train.meter.peak_flops", lambda device, dtype: 1e3)
    meter = Meter(qwen(), object())
    work = {"train/optimizer_steps": 1.0, "train/tokens": 50.0, "train/loss_tokens": 10.0}

    def step(train_s: float) -> dict[str, float]:
        times = {"time/sample_s": 1.0, "time/train_s": train_s, "time/wall_s": train_s + 1}
        return meter.metrics([], {**times, **work})

    first, fastest, last = step(2.0), step(1.0), step(4.0)
    assert first["time/train_mfu"] == fastest["time/train_mfu"] == 1
    assert last["time/train_mfu"] == pytest.approx(0.25)
    assert max(x["time/mfu"] for x in (first, fastest, last)) < 1
    flops = 3 * Shape.of(qwen()).forward(50, 10, 0)
    assert last["time/peak_gflops"] == pytest.approx(flops / 1e9)


def test_the_peak_is_that_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        "ludus.train.meter.peak_flops", lambda device, dtype: asked.append(dtype) or 1
    )
    step = {"time/sample_s": 2.0, "time/train_s": 4.0, "time/wall_s": 10.0}
    for half in (False, True):
        Meter(qwen(), object(), half=half).metrics([], step)
    assert asked == [torch.float32, torch.bfloat16]


def test_what_is_not_known_is_not_told() -> None:
    """A remote sampler that counts no tokens; a step that trained nothing."""
    meter = Meter(qwen(), object())
    with meter.rollout():
        pass
    step = {"time/sample_s": 2.0, "time/train_s": 4.0, "time/wall_s": 10.0}
    got = meter.metrics([], step)
    assert not {"time/mfu", "time/sample_mfu", "time/train_mfu", "rollout/unique_tokens"} & set(got)
    assert got["memory/rss_peak_gb"] >= got["memory/rss_gb"] * 0.5 > 0


def test_the_peak_is_measured() -> None:
    assert peak_flops(torch.device("cpu"), torch.float32) > 1e8


def test_memory_grows_with_what_is_held() -> None:
    before = memory(torch.device("cpu"))
    held = torch.ones(50_000_000)
    after = memory(torch.device("cpu"))
    assert after["memory/rss_peak_gb"] >= after["memory/rss_gb"]
    assert after["memory/rss_gb"] - before["memory/rss_gb"] > 0.15
    del held
