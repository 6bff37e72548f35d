"""AdamW on bfloat16 weights: small updates reach them, as in float32; saved, resumed, exhausted."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from learner_helpers import bits, check_resume, make_batch, make_samples, policy, same
from torch import Tensor, nn

from ludus.config.schema import LearnerConfig, LoraConfig, OptimizerConfig
from ludus.core.errors import TrainingError
from ludus.models.build import _with_lora
from ludus.train.algorithms.losses import clipped, cross_entropy
from ludus.train.checkpoint.loading import load
from ludus.train.checkpoint.store import CheckpointStore
from ludus.train.learner import Learner
from ludus.train.optimizers.adamw import AdamW, stochastic_round

Mode = Literal["float32", "stochastic_rounding"]
MODES: list[Mode] = ["float32", "stochastic_rounding"]
SURROGATE = clipped(0.2, 0.28)


def learner_of(model: Any, mode: Mode = "float32", **options: Any) -> Learner:
    config = OptimizerConfig(**{"lr": 1e-6, **options})
    settings = LearnerConfig(master_weights=mode)
    return Learner(model, config, num_steps=100, context_length=64, settings=settings)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def masters(learner: Learner) -> Tensor:
    states = (learner.optimizer.state[p] for p in learner.parameters)
    return torch.cat([state["master"].flatten() for state in states])


# Small updates


def test_masters_move_at_once_and_weights_after_some_steps() -> None:
    """At a learning rate of 1e-6 a step is a hundredth of the spacing of bfloat16 numbers."""
    model = policy().bfloat16()
    before = weights(model)
    learner = learner_of(model)
    batch = make_batch(make_samples(3))
    learner.train_step(batch, cross_entropy)
    assert (masters(learner) != before).float().mean() > 0.9
    for _ in range(99):
        learner.train_step(batch, cross_entropy)
    assert (weights(model) != before).float().mean() > 0.05
    torch.testing.assert_close(weights(model), masters(learner).bfloat16().float(), rtol=0, atol=0)
    assert {g.dtype for g in _gradients(learner, batch)} == {torch.float32}


def _gradients(learner: Learner, batch: Any) -> list[Tensor]:
    learner.forward_backward(batch, cross_entropy)
    found = [p.grad for p in learner.parameters if p.grad is not None]
    learner._zero_grad()
    return found


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_follows_float32(mode: Mode) -> None:
    """60 steps from the same weights: the sum of small updates arrives, and so does the loss."""
    start = policy().bfloat16()
    exact, half = copy.deepcopy(start).float(), copy.deepcopy(start)
    batch = make_batch(make_samples(3))
    learners = [learner_of(exact, lr=5e-5), learner_of(half, mode, lr=5e-5)]
    losses = [[x.train_step(batch, cross_entropy)["loss"] for _ in range(60)] for x in learners]
    fall = losses[0][0] - losses[0][-1]
    assert fall > 0.05
    assert losses[1][-1] == pytest.approx(losses[0][-1], abs=0.1 * fall)
    moved, wanted = (weights(x) - weights(start) for x in (half, exact))
    assert float((moved * wanted).sum() / wanted.square().sum()) == pytest.approx(1, abs=0.1)


def test_adapters_on_bfloat16_weights_are_their_own_masters() -> None:
    """peft keeps adapters in float32; they train as such."""
    model = _with_lora(policy().bfloat16(), LoraConfig(rank=2))
    learner = learner_of(model)
    assert {p.dtype for p in learner.parameters} == {torch.float32}
    before = [p.detach().clone() for p in learner.parameters]
    for _ in range(2):
        learner.train_step(make_batch(make_samples(8)), cross_entropy)
    changed = [(p.detach() != b).float().mean() for p, b in zip(learner.parameters, before)]  # noqa: B905
    assert min(changed) > 0.9


def test_float32_steps_are_those_of_torch() -> None:
    ours, theirs = policy(), policy()
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-6}
    config = OptimizerConfig(**options, weight_decay=0.1)
    optimizer = AdamW(list(ours.parameters()), config)
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in theirs.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        **options,
        fused=True,
    )
    for seed in range(3):
        for model, step in ((ours, optimizer.step), (theirs, plain.step)):
            generator = torch.Generator().manual_seed(seed)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            step()
    assert torch.equal(weights(ours), weights(theirs))
    assert list(optimizer.state_dict()["state"][0]) == list(plain.state_dict()["state"][0])


# Stochastic rounding


def test_a_rounded_value_is_a_neighbour_and_exact_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([1.001, -1.001, 3e-5, 0.0, 2.0]).repeat_interleave(20_000)
    rounded = stochastic_round(values, generator).float()
    assert rounded.view(5, -1).unique(dim=1).shape[1] <= 8
    for row, mean in zip(rounded.view(5, -1), (1.001, -1.001, 3e-5, 0.0, 2.0), strict=True):
        low, high = row.min(), row.max()
        assert high - low <= abs(mean) * 2**-7
        assert float(row.double().mean()) == pytest.approx(mean, rel=2e-4)


def test_chunks_of_a_rounded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight's step does not depend on the chunk, except for the random bits."""
    results = []
    for chunk in (1 << 22, 7):
        monkeypatch.setattr("ludus.train.optimizers.adamw.CHUNK", chunk)
        weight = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8).bfloat16())
        weight.grad = torch.linspace(1, 3, 64).view(8, 8).bfloat16()
        optimizer = AdamW([weight], OptimizerConfig(lr=0.25), "stochastic_rounding")
        optimizer.step()
        assert float(optimizer.state[weight]["step"]) == 1
        results.append(weight.detach().float())
    expected = torch.linspace(-1, 1, 64).view(8, 8) - 0.25
    for result in results:
        torch.testing.assert_close(result, expected, atol=0.02, rtol=0)


# Checkpoints


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_resumed_training_has_the_same_bits(tmp_path: Path, mode: Mode, lora: bool) -> None:
    def fresh() -> Learner:
        model = policy().bfloat16()
        if lora:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                model = _with_lora(model, LoraConfig(rank=2))
        return learner_of(model, mode, lr=1e-4)

    check_resume(fresh, tmp_path, SURROGATE)


@pytest.mark.parametrize("mode", MODES)
def test_a_changed_mode_converts_the_saved_state(tmp_path: Path, mode: Mode) -> None:
    [other] = set(MODES) - {mode}
    old, new = learner_of(policy().bfloat16(), other), learner_of(policy().bfloat16(), mode)
    old.train_step(make_batch(make_samples(8)), SURROGATE)
    store = CheckpointStore(tmp_path)
    path = store.save("rl", 1, model=old.model, optimizer=old.optimizer, state={})
    load(path, model=new.model, optimizer=new.optimizer)
    new.train_step(make_batch(make_samples(8)), SURROGATE)
    state = new.optimizer.state[new.parameters[0]]
    assert float(state["step"]) == 2
    assert ("master" in state) == (mode == "float32")
    wanted = torch.float32 if mode == "float32" else torch.bfloat16
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == wanted


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", 0.5), ("betas", (0.5, 0.6)), ("eps", 0.25), ("weight_decay", 0.125)],
)
def test_a_changed_option_applies_after_resuming(tmp_path: Path, key: str, value: Any) -> None:
    """The options of the parameter groups are the configuration's, not the checkpoint's."""
    usual = {"lr": 1e-2, "weight_decay": 0.1}
    old = learner_of(policy(), **usual)
    old.train_step(make_batch(make_samples(8)), SURROGATE)
    store = CheckpointStore(tmp_path)
    path = store.save("rl", 1, model=old.model, optimizer=old.optimizer, state={})
    same_options = learner_of(policy(), **usual)
    changed = learner_of(policy(), **{**usual, key: value})
    for learner in (same_options, changed):
        load(path, model=learner.model, optimizer=learner.optimizer)
        learner.train_step(make_batch(make_samples(8)), SURROGATE)
    matrices, vectors = changed.optimizer.param_groups
    assert matrices[key] == value
    assert vectors[key] == (0.0 if key == "weight_decay" else value)
    assert not torch.equal(weights(changed.model), weights(same_options.model))


# Memory


@pytest.mark.parametrize("half", [False, True])
def test_memory_for_the_state_runs_out(monkeypatch: pytest.MonkeyPatch, half: bool) -> None:
    """At any of its tensors: nothing has changed, and the next step is as if nothing had been."""
    batch = make_batch(make_samples(8))
    expected = learner_of(policy().bfloat16() if half else policy(), lr=1e-3)
    expected.train_step(batch, SURROGATE)
    learner = learner_of(policy().bfloat16() if half else policy(), lr=1e-3)
    before, plain = bits_of_weights(learner), torch.zeros_like
    for allowed in (0, 1, 2 * len(learner.parameters) - 1):
        left = iter(range(allowed))

        def scarce(*args: Any, left: Any = left, **options: Any) -> Tensor:
            if next(left, None) is None:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return plain(*args, **options)

        learner.forward_backward(batch, SURROGATE)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros_like", scarce)
            with pytest.raises(TrainingError) as caught:
                learner.optim_step()
        assert str(caught.value) == (
            "optimizer step 0: memory does not suffice for the optimizer's state. The weights are "
            "as they were before the step; train adapters (model.lora), or start with model.dtype: "
            "bfloat16 and learner.master_weights: stochastic_rounding, which need less"
        )
        assert same(bits_of_weights(learner), before)
        assert not learner.optimizer.state
        assert all(p.grad is None for p in learner.parameters)
    learner.train_step(batch, SURROGATE)
    assert same(bits(learner), bits(expected))


def bits_of_weights(learner: Learner) -> list[Tensor]:
    return [p.detach().clone() for p in learner.parameters]
