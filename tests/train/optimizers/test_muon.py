"""Muon against torch's own; which weights it trains; bfloat16, adapters, resumes, refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_helpers import check_resume, make_batch, make_samples, policy
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ludus.config.schema import LearnerConfig, LoraConfig, OptimizerConfig, RunConfig
from ludus.core.errors import CheckpointError, ConfigError
from ludus.models.build import _with_lora
from ludus.train.algorithms.losses import clipped, cross_entropy
from ludus.train.checkpoint.loading import load
from ludus.train.distributed.settings import ShardSettings, check_supported
from ludus.train.learner import Learner
from ludus.train.optimizers.muon import Muon, hidden_matrices, make_optimizer, orthogonal

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def learner_of(model: Any, name: str = "muon", mode: Any = "float32", **options: Any) -> Learner:
    config = OptimizerConfig.model_validate({"name": name, "lr": 1e-3, **options})
    settings = LearnerConfig(master_weights=mode)
    return Learner(model, config, num_steps=100, context_length=64, settings=settings)


def named(model: nn.Module) -> list[str]:
    """Names of the weights that Muon trains."""
    names = {id(p): name for name, p in model.named_parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    return [names[id(p)] for p in hidden_matrices(model, trained)]


def test_singular_values_are_about_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 16, 16), (3, 48, 16), (1, 8, 40)):
        made = orthogonal(torch.randn(shape, generator=generator) * 1e-4)
        values = torch.linalg.svdvals(made)
        assert values.shape == (shape[0], min(shape[1:]))
        assert 0.5 < float(values.min()) < float(values.max()) < 1.3
    assert torch.equal(orthogonal(torch.zeros(1, 4, 6)), torch.zeros(1, 4, 6))


def test_steps_are_those_of_torch() -> None:
    """torch multiplies in bfloat16, so updates are equal up to its rounding; AdamW's exactly."""
    ours = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))
    theirs = copy.deepcopy(ours)
    start = copy.deepcopy(ours)
    config = OptimizerConfig(name="muon", lr=1e-2, weight_decay=0.1)
    optimizer = make_optimizer(ours, list(ours.parameters()), config)
    hidden = hidden_matrices(theirs, list(theirs.parameters()))
    others = [p for p in theirs.parameters() if not any(p is matrix for matrix in hidden)]
    muon = torch.optim.Muon(
        hidden, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    decays = [
        {"params": [p for p in others if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in others if p.ndim <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(decays, lr=1e-2, betas=(0.9, 0.95), fused=True)
    for seed in range(4):
        for model, steps in ((ours, [optimizer.step]), (theirs, [muon.step, adamw.step])):
            generator = torch.Generator().manual_seed(seed)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            for step in steps:
                step()
    assert len(hidden) == 7
    for one, other, first in zip(
        ours.parameters(), theirs.parameters(), start.parameters(), strict=True
    ):
        if any(other is matrix for matrix in hidden):
            moved, wanted = (one - first).detach(), (other - first).detach()
            assert float((moved - wanted).norm() / wanted.norm()) < 0.03
        else:
            assert torch.equal(one, other)


def test_embeddings_head_and_vectors_are_adamw_s() -> None:
    layer = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    for tied in (True, False):
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied))
        assert [name.split(".")[-2] for name in named(model)] == layer
    experts = Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=8, num_experts_per_tok=2)
    names = named(Qwen3MoeForCausalLM(experts))
    assert any("experts" in name for name in names)
    assert not any("embed" in name or "lm_head" in name or "norm" in name for name in names)


def test_adapters_train() -> None:
    model = _with_lora(policy(), LoraConfig(rank=2))
    learner = learner_of(model)
    assert all("lora" in name for name in named(model))
    before = [p.detach().clone() for p in learner.parameters]
    batch = make_batch(make_samples(8))
    losses = [learner.train_step(batch, cross_entropy)["loss"] for _ in range(20)]
    assert losses[-1] < losses[0] - 0.05
    moved = [
        not torch.equal(p.detach(), b) for p, b in zip(learner.parameters, before, strict=True)
    ]
    assert all(moved)


@pytest.mark.parametrize("mode", ["float32", "stochastic_rounding"])
def test_bfloat16_follows_float32(mode: str) -> None:
    start = policy().bfloat16()
    exact, half = copy.deepcopy(start).float(), copy.deepcopy(start)
    batch = make_batch(make_samples(3))
    learners = [learner_of(exact, lr=1e-4), learner_of(half, mode=mode, lr=1e-4)]
    losses = [[x.train_step(batch, cross_entropy)["loss"] for _ in range(40)] for x in learners]
    fall = losses[0][0] - losses[0][-1]
    assert fall > 0.05
    assert losses[1][-1] == pytest.approx(losses[0][-1], abs=0.15 * fall)


@pytest.mark.parametrize("mode", [None, "float32", "stochastic_rounding"])
def test_resumed_training_has_the_same_bits(tmp_path: Path, mode: str | None) -> None:
    def fresh() -> Learner:
        return learner_of(policy() if mode is None else policy().bfloat16(), mode=mode or "float32")

    path = check_resume(fresh, tmp_path, clipped(0.2, 0.28), half=2)
    other = learner_of(policy() if mode is None else policy().bfloat16(), "adamw")
    with pytest.raises(CheckpointError, match="state of Muon, the run uses AdamW"):
        load(path, model=other.model, optimizer=other.optimizer)


def test_a_model_without_matrices_has_adamw_alone() -> None:
    model = nn.Embedding(4, 2)
    optimizer = make_optimizer(model, list(model.parameters()), OptimizerConfig(name="muon"))
    assert isinstance(optimizer, Muon)
    model.weight.grad = torch.ones(4, 2)
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def config_of(**stages: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"architecture": "qwen3", "tokenizer": "words", "chat_template": "plain"},
            "env": "babyai",
            "tasks": {"train": {"name": "env"}},
            "rl": {"algorithm": "grpo"},
            **stages,
        }
    )


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_ranks_that_share_a_model_refuse_it(stage: str) -> None:
    muon = {"optimizer": {"name": "muon"}}
    stages: dict[str, Any] = (
        {"sft": {**muon}, "demonstrations": {}}
        if stage == "sft"
        else {"rl": {"algorithm": "grpo", **muon}}
    )
    with pytest.raises(ConfigError, match=rf"{stage}\.optimizer\.name: muon .*whole matrix"):
        check_supported(config_of(**stages), ShardSettings(), 2)
