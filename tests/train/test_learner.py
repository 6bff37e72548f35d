"""One optimizer step: its gradient, its schedule, what it refuses, and that it repeats itself."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_helpers import (
    VOCAB,
    digest,
    make_batch,
    make_samples,
    policy,
    starts,
    three_steps,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
)

from ludus.config.schema import LearnerConfig, LoraConfig, OptimizerConfig
from ludus.core.errors import TrainingError
from ludus.core.types import Sample
from ludus.models.build import _with_lora
from ludus.models.samplers.base import SamplingParams
from ludus.models.samplers.engine import InProcessSampler
from ludus.train import forward
from ludus.train.algorithms.aggregates import trajectory_mean
from ludus.train.algorithms.losses import LossFn, LossInputs, LossOutput, clipped, cross_entropy
from ludus.train.batches.packing import Batch, MicroBatch, pack, rounded
from ludus.train.forward import SHAPES, Forward
from ludus.train.kernels import compiled, fused, tiles
from ludus.train.kernels.compiled import has_compiler
from ludus.train.learner import Learner, learning_rate

COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON |= {"intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.2}
FAMILIES = {
    "llama": LlamaConfig(**COMMON, num_key_value_heads=2),
    "gemma": GemmaConfig(**COMMON, num_key_value_heads=1, head_dim=8),
    "gpt_neox": GPTNeoXConfig(**COMMON),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4),
}
SURROGATE = clipped(0.2, 0.28)


def make_learner(
    model: Any,
    temperature: float = 1.0,
    context_length: int | None = None,
    settings: LearnerConfig | None = None,
    dump_dir: Path | None = None,
    **options: Any,
) -> Learner:
    return Learner(
        model,
        OptimizerConfig(**{"lr": 1e-2, "max_grad_norm": 1e9, **options}),
        num_steps=10,
        temperature=temperature,
        context_length=context_length,
        settings=settings,
        dump_dir=dump_dir,
    )


def step_gradients(
    learner: Learner, batch: Batch, loss: LossFn
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradients that the optimizer sees, and the step's metrics."""
    seen: dict[str, Tensor] = {}

    def look(*_: Any) -> None:
        for name, parameter in learner.model.named_parameters():
            if parameter.grad is not None:
                seen[name] = parameter.grad.clone()

    handle = learner.optimizer.register_step_pre_hook(look)
    metrics = learner.train_step(batch, loss)
    handle.remove()
    return seen, metrics


def plain_loop(
    model: Any, samples: list[Sample], weights: list[list[float]], temperature: float
) -> tuple[dict[str, Tensor], float]:
    """DAPO's surrogate, one sample at a time: no packing, no mask, no library of losses."""
    model.zero_grad()
    total = 0.0
    for sample, weight in zip(samples, weights, strict=True):
        logits = model(torch.tensor([sample.token_ids]), use_cache=False).logits[0]
        logprobs = (logits / temperature).log_softmax(-1)
        loss = torch.zeros(())
        for i in range(1, len(sample.token_ids)):
            if sample.loss_mask[i]:
                ratio = (logprobs[i - 1, sample.token_ids[i]] - sample.logprobs[i]).exp()
                gain = torch.minimum(
                    ratio * sample.advantages[i],
                    ratio.clamp(0.8, 1.28) * sample.advantages[i],
                )
                loss = loss - weight[i] * gain
        loss.backward()
        total += float(loss.detach())
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, total


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_is_that_of_a_plain_loop(temperature: float) -> None:
    samples = make_samples(14)
    weights = trajectory_mean(samples)
    model = policy()
    expected, loss = plain_loop(copy.deepcopy(model), samples, weights, temperature)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in expected.values()))
    counts: list[int] = []
    packed = False
    for tokens_per_batch in (30, 64, 10_000):
        batch = pack(samples, weights, tokens_per_batch=tokens_per_batch, pad_id=0)
        counts.append(len(batch.micro_batches))
        packed = packed or any(starts(m) > len(m.token_ids_RT) for m in batch.micro_batches)
        learner = make_learner(copy.deepcopy(model), temperature)
        gradients, metrics = step_gradients(learner, batch, SURROGATE)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-5)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert packed
    assert counts[0] > counts[1] > counts[2]


def test_accumulated_batches_are_one_step() -> None:
    """A forward_backward for each micro-batch, then one optim_step: the bits of one train_step."""
    batch = make_batch(make_samples())
    assert len(batch.micro_batches) > 2
    whole, parts = policy(), policy()
    expected = make_learner(whole).train_step(batch, SURROGATE)
    learner = make_learner(parts)
    losses = [
        learner.forward_backward(replace(batch, micro_batches=[micro_batch]), SURROGATE)["loss"]
        for micro_batch in batch.micro_batches
    ]
    assert learner.optim_step() == {name: expected[name] for name in ("grad_norm", "lr")}
    assert sum(losses) == pytest.approx(expected["loss"])
    assert digest(parts) == digest(whole)
    assert learner.step == 1


def test_memory_that_runs_out_keeps_the_gradients_of_earlier_batches() -> None:
    """The second batch fails once: both are computed again, to the same gradient."""
    batches = [make_batch(make_samples(12, seed), 256) for seed in (1, 2)]
    norms = []
    for failures in (0, 1):
        learner = make_learner(policy())
        learner.forward_backward(batches[0], SURROGATE)
        plain, left = learner._backward, [failures]

        def backward(*args: Any, plain: Any = plain, left: Any = left) -> Any:
            if left[0]:
                left[0] -= 1
                raise torch.OutOfMemoryError("out of memory")
            return plain(*args)

        learner._backward = backward  # type: ignore[method-assign]
        learner.forward_backward(batches[1], SURROGATE)
        norms.append(learner.optim_step()["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_metrics_do_not_depend_on_the_cut() -> None:
    """Means over all loss tokens, entropy by hand."""
    samples = make_samples(9)
    model = policy()
    entropies = []
    for sample in samples:
        logprobs = model(torch.tensor([sample.token_ids])).logits[0].detach().log_softmax(-1)
        at = [i - 1 for i, trains in enumerate(sample.loss_mask) if trains]
        entropies += (-(logprobs.exp() * logprobs).sum(-1))[at].tolist()
    results = []
    for tokens_per_batch in (30, 10_000):
        learner = make_learner(copy.deepcopy(model))
        results.append(learner.train_step(make_batch(samples, tokens_per_batch), SURROGATE))
    assert results[0] == pytest.approx(results[1], rel=1e-4)
    names = {"loss", "entropy", "ratio", "kl", "clip_fraction", "grad_norm", "lr"}
    assert results[0].keys() == names
    assert results[0]["entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_log_probabilities_are_the_samplers(temperature: float) -> None:
    """The learner computes the sampler's log-probabilities over several turns in packed rows."""
    model = policy()
    engine = InProcessSampler(model, context_length=64)
    samples = []
    for number in range(12):
        engine.open(f"{number}")
        row = Sample([], [], [], [], f"{number}")

        def add(ids: list[int], logprobs: list[float] | None, row: Sample = row) -> None:
            row.token_ids += ids
            row.loss_mask += [logprobs is not None] * len(ids)
            row.logprobs += logprobs or [0.0] * len(ids)
            row.advantages += [1.0] * len(ids)

        add(list(range(1, 3 + 6 * (number % 4))), None)
        for turn in range(1 + number % 3):
            params = SamplingParams(
                max_tokens=3 + (number + turn) % 4, temperature=temperature, seed=9 * number + turn
            )
            completion = await engine.sample(row.token_ids, params, session=f"{number}")
            add(completion.token_ids, completion.logprobs)
            add([20 + number] * (1 + 2 * turn), None)
        engine.close(f"{number}")
        samples.append(row)
    batch = make_batch(samples, 150)
    assert len(batch.micro_batches) > 1
    assert any(starts(m) > len(m.token_ids_RT) for m in batch.micro_batches), "nothing was packed"
    learner = make_learner(model, temperature)
    for micro_batch in batch.micro_batches:
        with torch.no_grad():
            logprobs_N, _ = learner.logprobs(micro_batch)
        recorded_N = micro_batch.old_logprobs_N
        torch.testing.assert_close(logprobs_N, recorded_N, atol=1e-4, rtol=0)
    metrics = learner.train_step(batch, SURROGATE)
    assert metrics["ratio"] == pytest.approx(1, abs=1e-4)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_are_plain_ones_in_other_families(family: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(FAMILIES[family], attn_implementation="sdpa")
    model.eval()
    samples = make_samples(14)
    expected = {}
    for sample in samples:
        logprobs = model(torch.tensor([sample.token_ids])).logits[0].detach().log_softmax(-1)
        for i, trains in enumerate(sample.loss_mask):
            if trains:
                expected[sample.trajectory_id, i] = float(logprobs[i - 1, sample.token_ids[i]])
    learner = make_learner(model)
    num_packed = 0
    for tokens_per_batch in (30, 100):  # one sample a row without a mask; several with one
        got = {}
        for m in make_batch(samples, tokens_per_batch).micro_batches:
            num_packed += int(starts(m) > len(m.token_ids_RT))
            with torch.no_grad():
                logprobs_N, _ = learner.logprobs(m)
            places = zip(m.trajectory_N, m.index_N, strict=True)
            for (trajectory, position), logprob in zip(places, logprobs_N, strict=True):
                got[f"t{int(trajectory)}", int(position)] = float(logprob)
        assert got.keys() == expected.keys()
        assert got == pytest.approx(expected, abs=1e-4)
    assert num_packed


# The optimizer


def test_the_rate_of_each_step() -> None:
    def rates(schedule: str, num_steps: int = 6) -> list[float]:
        config = OptimizerConfig.model_validate(
            {"lr": 0.8, "warmup_steps": 2, "schedule": schedule}
        )
        return [learning_rate(config, step, num_steps) for step in range(num_steps + 2)]

    assert rates("constant") == pytest.approx([0.4, *[0.8] * 7])
    assert rates("linear") == pytest.approx([0.4, 0.8, 0.8, 0.6, 0.4, 0.2, 0, 0])
    half = 0.4 * math.cos(math.pi / 4)
    assert rates("cosine") == pytest.approx([0.4, 0.8, 0.8, 0.4 + half, 0.4, 0.4 - half, 0, 0])
    assert rates("wsd", 10) == pytest.approx([0.4, *[0.8] * 6, 0.6, 0.4, 0.2, 0, 0])
    assert rates("linear", 2) == pytest.approx([0.4, 0.8, 0.8, 0])  # warm-up is all there is


def test_a_step_uses_its_rate() -> None:
    learner = make_learner(policy(), warmup_steps=4, schedule="linear")
    batch = make_batch(make_samples(3))
    used = [learner.train_step(batch, SURROGATE)["lr"] for _ in range(6)]
    assert used == [learning_rate(learner.config, step, 10) for step in range(6)]
    assert learner.step == 6
    assert {group["lr"] for group in learner.optimizer.param_groups} == {used[-1]}


def test_matrices_decay_and_vectors_do_not() -> None:
    """With gradients of zero, decay is all that moves a weight."""
    model = policy()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learner = make_learner(model, lr=0.1, weight_decay=0.5)
    samples = make_samples(3)
    still = pack(
        samples, [[0.0] * len(s.token_ids) for s in samples], tokens_per_batch=64, pad_id=0
    )
    learner.train_step(still, SURROGATE)
    kinds = {p.ndim for p in model.parameters()}
    assert kinds == {1, 2}
    for name, parameter in model.named_parameters():
        scale = 0.95 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * scale)


def test_a_step_is_adamws() -> None:
    """First step: lr * g / (|g| + eps), and the gradient is cut to its greatest norm first."""
    model = policy()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = OptimizerConfig(lr=1e-2, eps=1e-3, max_grad_norm=0.05)
    learner = Learner(model, config, num_steps=1)
    gradients, metrics = step_gradients(learner, make_batch(make_samples(6)), SURROGATE)
    assert metrics["grad_norm"] > 0.05
    total = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    assert total == pytest.approx(0.05, rel=1e-4)
    for name, parameter in model.named_parameters():
        expected = before[name] - 1e-2 * gradients[name] / (gradients[name].abs() + 1e-3)
        torch.testing.assert_close(parameter.detach(), expected, atol=1e-6, rtol=1e-5)


def test_supervised_learning_learns() -> None:
    learner = make_learner(policy(), max_grad_norm=1.0)
    batch = make_batch(make_samples(4))
    losses = [learner.train_step(batch, cross_entropy)["loss"] for _ in range(40)]
    assert losses[-1] < 0.1 < 3 < losses[0]


def test_adapters_alone_are_trained() -> None:
    model = _with_lora(policy(), LoraConfig(rank=2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learner = make_learner(model)
    held = sum(p.numel() for group in learner.optimizer.param_groups for p in group["params"])
    assert held == model.get_nb_trainable_parameters()[0]
    for _ in range(2):  # the first step moves B alone, for A's gradient passes through B = 0
        learner.train_step(make_batch(make_samples(4)), SURROGATE)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p.detach(), before[n])}
    assert moved == {name for name in before if "lora_" in name}
    assert all(p.grad is None for p in model.parameters())


# Faults


def spoiled(samples: list[Sample], value: float) -> list[Sample]:
    """The last, shortest sample gets an advantage that breaks the loss of the last micro-batch."""
    shortest = min(samples, key=lambda sample: len(sample.token_ids))
    shortest.advantages = [value] * len(shortest.token_ids)
    return samples


@pytest.mark.parametrize(
    ("value", "reason"),
    [(float("nan"), "the loss is nan"), (1e30, "the gradient's norm is inf")],
)
def test_a_loss_that_is_not_finite(tmp_path: Path, value: float, reason: str) -> None:
    model = policy()
    learner = Learner(model, OptimizerConfig(), num_steps=3, dump_dir=tmp_path)
    learner.train_step(make_batch(make_samples(5)), SURROGATE)
    before, moments = digest(model), copy.deepcopy(learner.optimizer.state_dict())
    batch = make_batch(spoiled(make_samples(12), value), 40)
    assert len(batch.micro_batches) > 2
    with pytest.raises(TrainingError) as caught:
        learner.train_step(batch, SURROGATE)
    folder = tmp_path / "failed-batch-000001"
    assert str(caught.value) == (
        f"optimizer step 1: {reason}; its batch is saved in {folder}. The weights are as they "
        "were before the step; lower optimizer.lr and resume"
    )
    assert digest(model) == before
    after = learner.optimizer.state_dict()
    for index, state in moments["state"].items():
        assert all(torch.equal(state[key], after["state"][index][key]) for key in state)
    assert all(p.grad is None for p in model.parameters())

    counts = json.loads((folder / "counts.json").read_text())
    assert counts["num_loss_tokens"] == batch.num_loss_tokens
    assert counts["num_micro_batches"] == len(batch.micro_batches)
    for number, micro_batch in enumerate(batch.micro_batches):
        read = MicroBatch(**load_file(folder / f"micro-batch-{number:03d}.safetensors"))
        for name in MicroBatch.__slots__:
            expected = getattr(micro_batch, name)
            if expected is None:
                assert getattr(read, name) is None
            else:
                torch.testing.assert_close(
                    getattr(read, name), expected, atol=0, rtol=0, equal_nan=True
                )
    assert math.isfinite(learner.train_step(make_batch(make_samples(5)), SURROGATE)["loss"])


def test_a_batch_that_cannot_be_saved(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    learner = Learner(policy(), OptimizerConfig(), num_steps=1, dump_dir=tmp_path / "file")
    batch = make_batch(spoiled(make_samples(3), float("nan")))
    with pytest.raises(TrainingError, match=r"the loss is nan; its batch could not be saved in"):
        learner.train_step(batch, SURROGATE)


def test_no_loss_beyond_the_sampled_tokens() -> None:
    """The loss function sees the loss tokens in the order of their rows, and nothing else."""
    samples = make_samples(6)
    seen: list[LossInputs] = []

    def looking(inputs: LossInputs) -> LossOutput:
        seen.append(inputs)
        return LossOutput(inputs.logprobs_N)

    make_learner(policy()).train_step(make_batch(samples, 10_000), looking)
    [inputs] = seen
    expected = sorted(
        (logprob, advantage)
        for s in samples
        for logprob, advantage, trains in zip(s.logprobs, s.advantages, s.loss_mask, strict=True)
        if trains
    )
    got = sorted(zip(inputs.old_logprobs_N.tolist(), inputs.advantages_N.tolist(), strict=True))
    assert got == [pytest.approx(pair) for pair in expected]
    assert inputs.ref_logprobs_N is None


# Repetition


@pytest.mark.slow
def test_a_fresh_process_repeats_every_bit() -> None:
    script = Path(__file__).parents[1] / "support" / "learner_helpers.py"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    there = subprocess.run(
        [sys.executable, str(script), "1"], env=env, capture_output=True, text=True, check=True
    )
    assert there.stdout.split() == [three_steps(1)]


def test_a_small_pass_takes_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch by batch, so the bits do not depend on what was trained before."""
    learner = make_learner(policy())
    few, many = make_batch(make_samples(2), 4096), make_batch(make_samples(40), 4096)
    limit = 2.0 * few.micro_batches[0].token_ids_RT.numel()
    weights = sum(p.numel() for p in learner.parameters)
    monkeypatch.setattr(forward, "SMALL_PASS", limit * weights)
    seen: set[tuple[bool, int]] = set()

    def look(_module: Any, _args: Any, kwargs: Any) -> None:
        seen.add((kwargs["input_ids"].numel() < limit, torch.get_num_threads()))

    learner.model.model.register_forward_pre_hook(look, with_kwargs=True)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for batch in (few, many, few):
            learner.train_step(batch, SURROGATE)
            assert torch.get_num_threads() == 3
        with pytest.raises(TrainingError, match="the loss is nan"):
            learner.train_step(make_batch(spoiled(make_samples(2), float("nan"))), SURROGATE)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == {(True, 1), (False, 3)}


# Precision, recomputation, compilation


def test_bfloat16_is_near() -> None:
    samples = make_samples(14)
    batch = pack(samples, trajectory_mean(samples), tokens_per_batch=64, pad_id=0, layout="tree")
    model = policy()
    exact, metrics = step_gradients(make_learner(copy.deepcopy(model)), batch, SURROGATE)
    learner = make_learner(
        copy.deepcopy(model), context_length=64, settings=LearnerConfig(dtype="bfloat16")
    )
    assert learner.forward.attention == "tiles"
    half, half_metrics = step_gradients(learner, batch, SURROGATE)
    assert half_metrics["entropy"] != metrics["entropy"]
    assert half_metrics["entropy"] == pytest.approx(metrics["entropy"], rel=0.02)
    for name, gradient in exact.items():
        assert half[name].dtype == torch.float32
        assert torch.cosine_similarity(half[name].flatten(), gradient.flatten(), dim=0) > 0.99


@pytest.mark.parametrize("layout", ["tree", "packed", "single"])
def test_padded_passes_change_no_gradient(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = make_samples(14)
    batch = pack(samples, trajectory_mean(samples), tokens_per_batch=64, pad_id=0, layout=layout)
    model = policy()
    exact, metrics = step_gradients(make_learner(copy.deepcopy(model)), batch, SURROGATE)
    monkeypatch.setattr(Forward, "_shaped", lambda _, micro: rounded(micro, SHAPES))
    padded, padded_metrics = step_gradients(make_learner(copy.deepcopy(model)), batch, SURROGATE)
    assert padded_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)
    for name, gradient in exact.items():
        torch.testing.assert_close(padded[name], gradient, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "padded"), [("bfloat16", True), ("float32", False)])
def test_passes_in_bfloat16_have_shapes_that_recur(dtype: Any, padded: bool) -> None:
    """oneDNN prepares each new shape of a product in bfloat16 for longer than it computes it."""
    samples = make_samples(14)
    batch = pack(samples, trajectory_mean(samples), tokens_per_batch=64, pad_id=0)
    forward = make_learner(policy(), settings=LearnerConfig(dtype=dtype)).forward
    for micro in batch.micro_batches:
        with forward.passes(micro):
            hidden_PE, _ = forward.hidden_states(micro)
        assert (len(hidden_PE) % SHAPES == 0) is padded
        assert padded or len(hidden_PE) == len(micro.places_P)


@pytest.mark.parametrize("attention", ["tiles", "none"])
def test_padding_takes_no_position_beyond_the_last(
    attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 learns a vector for each position; the longest sample here has the last."""
    monkeypatch.setattr(Forward, "_find_attention", lambda _: attention)
    samples = make_samples(14)
    longest = max(len(sample.token_ids) for sample in samples)
    shape = GPT2Config(vocab_size=VOCAB, n_positions=longest, n_embd=32, n_layer=2, n_head=4)
    shape.resid_pdrop = shape.embd_pdrop = shape.attn_pdrop = 0.0
    learner = make_learner(
        AutoModelForCausalLM.from_config(shape), settings=LearnerConfig(dtype="bfloat16")
    )
    layout, weights = learner.forward.layout, trajectory_mean(samples)
    batch = pack(samples, weights, tokens_per_batch=64, pad_id=0, layout=layout)
    assert learner.train_step(batch, SURROGATE)["grad_norm"] > 0


def test_gradient_checkpointing_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "KEEP", 64 * 64 * 4)  # room for one layer of the two
    samples = make_samples(14)
    batch = pack(samples, trajectory_mean(samples), tokens_per_batch=64, pad_id=0, layout="tree")
    model = policy()
    exact, _ = step_gradients(make_learner(copy.deepcopy(model)), batch, SURROGATE)
    forwards: list[int] = []
    learner = make_learner(
        copy.deepcopy(model), settings=LearnerConfig(gradient_checkpointing=True)
    )
    if learner.forward._layers is None:  # no kernels here: the modules themselves are called
        learner.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: forwards.append(1))
    else:
        layer, first = fused._layer, learner.model.model.layers[0].mlp.gate_proj.weight

        def counted(hidden: torch.Tensor, **options: Any) -> torch.Tensor:
            forwards.extend([1] * (options["parts"][1][1] is first))
            return layer(hidden, **options)

        monkeypatch.setattr(fused, "_layer", counted)
    again, _ = step_gradients(learner, batch, SURROGATE)
    assert len(forwards) == 2 * len(batch.micro_batches)
    for name, gradient in exact.items():
        torch.testing.assert_close(again[name], gradient, atol=0, rtol=0)


def test_no_compiler_is_told_and_survived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    learner = make_learner(policy(), settings=LearnerConfig(compile=True))
    learner.train_step(make_batch(make_samples(4)), SURROGATE)
    assert "learner.compile is off: no C++ compiler found (CXX, g++ or clang++)" in caplog.text


@pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("default")  # torch's own, while it compiles
@pytest.mark.slow
def test_compiled_layers_are_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the step, for batches of several sizes; and nowhere else. Traced as for inductor, whose
    C++ would take a minute to build."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    model = policy()
    plain, twin = make_learner(model), copy.deepcopy(model)
    learner = make_learner(twin, settings=LearnerConfig(compile=True))
    for seed in range(2):
        samples = make_samples(6 + seed, seed)
        batch = pack(
            samples, trajectory_mean(samples), tokens_per_batch=999, pad_id=0, layout="tree"
        )
        expected, _ = step_gradients(plain, batch, SURROGATE)
        found, _ = step_gradients(learner, batch, SURROGATE)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)
        twin.load_state_dict(model.state_dict())  # AdamW makes much of little
    assert all(layer._compiled_call_impl is None for layer in twin.model.layers)


# Memory


class Scarce:
    """Forward passes of more than `limit` positions end as torch's allocator ends them."""

    def __init__(self, model: Any, limit: int, error: Exception) -> None:
        self.passes: list[int] = []

        def look(_module: Any, args: Any, kwargs: Any) -> None:
            size = kwargs["input_ids"].numel()
            self.passes.append(size)
            if size > limit:
                raise error

        model.model.register_forward_pre_hook(look, with_kwargs=True)


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:128] . DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 9 bytes. Error code 12 (Cannot allocate memory)"
    ),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("layout", ["tree", "packed"])
def test_a_pass_that_memory_does_not_hold_is_split(layout: Any, error: Exception) -> None:
    samples = make_samples(14)
    weights = trajectory_mean(samples)
    batch = pack(samples, weights, tokens_per_batch=130, pad_id=0, layout=layout)
    model = policy()
    expected, wanted = step_gradients(make_learner(copy.deepcopy(model)), batch, SURROGATE)
    sizes = [m.token_ids_RT.numel() for m in batch.micro_batches]
    learner = make_learner(copy.deepcopy(model))
    scarce = Scarce(learner.model, max(sizes) - 1, error)
    if sizes.count(max(sizes)) > 1:
        pytest.fail("the test needs one largest pass")
    gradients, metrics = step_gradients(learner, batch, SURROGATE)
    assert len(scarce.passes) > len(sizes) + 1
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-5)
    assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_memory_that_does_not_suffice(tmp_path: Path) -> None:
    model = policy()
    before = digest(model)
    learner = make_learner(model, dump_dir=tmp_path)
    Scarce(model, 8, OUT_OF_MEMORY[0])
    with pytest.raises(TrainingError) as caught:
        learner.train_step(make_batch(make_samples(14)), SURROGATE)
    assert str(caught.value) == (
        "optimizer step 0: memory does not suffice, also with half a forward pass; its batch is "
        f"saved in {tmp_path / 'failed-batch-000000'}. The weights are as they were before the "
        "step; lower rl.tokens_per_batch (in SFT, sft.tokens_per_batch) or model.context_length, "
        "or set learner.gradient_checkpointing to true, and resume"
    )
    assert digest(model) == before
    assert all(p.grad is None for p in model.parameters())


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    learner = make_learner(policy())
    Scarce(learner.model, 8, RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="multiplied"):
        learner.train_step(make_batch(make_samples(14)), SURROGATE)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space, as Linux does")
@pytest.mark.slow
def test_a_real_limit_of_memory() -> None:
    """A child process whose address space holds half the pass, not the whole."""
    script = Path(__file__).parents[1] / "support" / "learner_helpers.py"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    there = subprocess.run(
        [sys.executable, str(script), "limited"], env=env, capture_output=True, text=True
    )
    assert there.returncode == 0, there.stderr
    passes, loss = there.stdout.split()
    assert int(passes) > 1
    assert math.isfinite(float(loss))
