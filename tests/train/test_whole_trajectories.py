"""A ratio of whole trajectories does not depend on how their rows are packed."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from learner_helpers import digest, make_samples, policy

from ludus.config.schema import OptimizerConfig
from ludus.core.errors import ConfigError
from ludus.core.types import Sample
from ludus.train.algorithms.aggregates import trajectory_mean
from ludus.train.algorithms.losses import (
    LossFn,
    LossInputs,
    LossOutput,
    Unit,
    clipped,
    depends_on,
    kl_estimate,
    trajectory_clipped,
    trajectory_means,
    unit_of,
    with_entropy_bonus,
)
from ludus.train.algorithms.table import GRPO, Algorithm
from ludus.train.batches.minibatches import to_batch
from ludus.train.batches.packing import Layout, pack
from ludus.train.critic import Critic
from ludus.train.learner import Learner


def branched() -> list[Sample]:
    """Twelve rows of four trajectories."""
    return [replace(s, trajectory_id=f"t{i % 4}") for i, s in enumerate(make_samples(12))]


def stepped(budget: int, entropy: float = 0.0) -> tuple[dict[str, float], list[torch.Tensor]]:
    model = policy()
    # A large eps, so that the step is proportional to the gradient, not to its sign.
    learner = Learner(model, OptimizerConfig(lr=0.01, eps=1.0), num_steps=1)
    samples = branched()
    loss = trajectory_clipped(0.5, 0.5)
    loss = with_entropy_bonus(loss, entropy) if entropy else loss
    weights = trajectory_mean(samples)
    layout = "tree" if budget == 400 else "packed"
    batch = pack(samples, weights, tokens_per_batch=budget, pad_id=0, layout=layout)
    assert (len(batch.micro_batches) > 1) == (budget < 400)
    metrics = learner.train_step(batch, loss)
    return metrics, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("entropy", [0.0, 0.1])
def test_packing_changes_nothing(entropy: float) -> None:
    (together, one), (apart, many) = stepped(400, entropy), stepped(32, entropy)
    for name in ("loss", "grad_norm", "clip_fraction", "ratio"):
        assert apart[name] == pytest.approx(together[name], rel=1e-4, abs=1e-6), name
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, many, strict=True))


def test_units_of_losses() -> None:
    assert unit_of(trajectory_clipped(0.1, 0.1)) == "log_ratio"
    assert unit_of(with_entropy_bonus(trajectory_clipped(0.1, 0.1), 0.1)) == "log_ratio"
    assert unit_of(with_entropy_bonus(clipped(0.1, 0.1), 0.1)) == "token"
    assert unit_of(lambda inputs: clipped(0.1, 0.1)(inputs)) == "trajectory"
    assert unit_of(with_entropy_bonus(centred, 0.1)) == "trajectory"
    with pytest.raises(ConfigError, match="depends on token, log_ratio, trajectory"):
        depends_on("sample")  # type: ignore[arg-type]


def centred(inputs: LossInputs) -> LossOutput:
    """A loss of somebody else: each trajectory's mean log-ratio, squared."""
    log_ratio_N = inputs.logprobs_N - inputs.old_logprobs_N
    means = trajectory_means(log_ratio_N, inputs.trajectory_N)
    return LossOutput(means[inputs.trajectory_N].square())


def algorithm_of(loss: LossFn) -> Algorithm:
    return replace(GRPO, loss=loss, regularised=True)


@pytest.mark.parametrize("layout", ["tree", "packed", "single"])
def test_a_loss_that_declares_nothing_sees_whole_trajectories(layout: Layout) -> None:
    """However small the micro-batches: the loss and the gradient of one micro-batch."""
    results = []
    for budget in (1000, 100):
        learner = Learner(policy(), OptimizerConfig(lr=0.01, eps=1.0), num_steps=1)
        batch = to_batch(branched(), algorithm_of(centred), budget, 0, layout)
        assert (len(batch.micro_batches) > 1) == (budget < 1000)
        assert all(m.token_ids_RT.numel() <= budget for m in batch.micro_batches)
        metrics = learner.train_step(batch, centred)
        results.append((metrics["loss"], metrics["grad_norm"]))
    assert results[1] == pytest.approx(results[0], rel=1e-4)


def test_out_of_memory_keeps_trajectories_whole() -> None:
    """The split of a micro-batch is between trajectories; a single one is not split."""
    batch = to_batch(branched(), algorithm_of(centred), 1000, 0, "packed")
    [micro_batch] = batch.micro_batches
    halves = batch.halves(micro_batch)
    ids = [set(half.trajectory_N.tolist()) for half in halves]
    assert len(halves) > 1
    assert sum(map(len, ids)) == 4
    while len(set(halves[0].trajectory_N.tolist())) > 1:
        halves = batch.halves(halves[0])
    assert batch.halves(halves[0]) == []


def test_a_trajectory_that_fits_no_micro_batch() -> None:
    with pytest.raises(ConfigError, match=r"rl\.tokens_per_batch: the loss depends on whole"):
        to_batch(branched(), algorithm_of(centred), 31, 0, "packed")
    samples = branched()
    batch = pack(samples, trajectory_mean(samples), tokens_per_batch=32, pad_id=0)
    with pytest.raises(ConfigError, match="pack it with whole=True"):
        Learner(policy(), OptimizerConfig(), num_steps=1).train_step(batch, centred)


@pytest.mark.parametrize("unit", ["token", "log_ratio"])
def test_a_wrong_declaration_is_refused(unit: Unit) -> None:
    @depends_on(unit)
    def wrong(inputs: LossInputs) -> LossOutput:
        return centred(inputs)

    model = policy()
    before = digest(model)
    learner = Learner(model, OptimizerConfig(), num_steps=1)
    batch = to_batch(branched(), algorithm_of(wrong), 64, 0, "packed")
    with pytest.raises(ConfigError, match=rf"wrong declares depends_on\('{unit}'\), but the loss"):
        learner.train_step(batch, wrong)
    assert digest(model) == before


def test_the_gradient_is_that_of_the_whole_ratio() -> None:
    """Against autograd through the geometric mean itself, GSPO's equation 5."""
    logprobs = torch.tensor([-1.0, -0.5, -2.0, -0.7], requires_grad=True)
    old = torch.tensor([-1.1, -0.4, -1.9, -0.9])
    advantages = torch.tensor([0.5, -1.0, -1.0, -1.0])
    inputs = LossInputs(logprobs, old, advantages, torch.tensor([0, 1, 1, 1]))
    weights = torch.tensor([1 / 2, 1 / 6, 1 / 6, 1 / 6])
    loss = (trajectory_clipped(0.9, 9.0)(inputs).loss_N * weights).sum()
    (found,) = torch.autograd.grad(loss, logprobs)
    gap = logprobs - old
    whole = -(gap[0].exp() * 0.5 + gap[1:].mean().exp() * -1.0) / 2
    (expected,) = torch.autograd.grad(whole, logprobs)
    assert loss.item() == pytest.approx(whole.item())
    assert torch.allclose(found, expected)


@pytest.mark.parametrize(("kind", "mean"), [("k1", True), ("k3", True), ("k2", False)])
def test_divergence_estimates_on_a_distribution(kind: str, mean: bool) -> None:
    """In expectation over the policy: k1 and k3 are the divergence, k2 has its gradient."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    probabilities = logp.detach().exp()
    exact = (logp.exp() * (logp - reference)).sum()
    (gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    estimate = (probabilities * kl_estimate(logp, reference, kind)).sum()  # type: ignore[arg-type]
    (of_estimate,) = torch.autograd.grad(estimate, logits)
    if mean:
        assert estimate.item() == pytest.approx(exact.item())
    else:
        assert torch.allclose(of_estimate, gradient)
    if kind == "k1":
        assert torch.allclose(of_estimate, torch.zeros_like(gradient), atol=1e-12)


def test_a_critics_state_is_exact_and_goes_on_as_it_would_have() -> None:
    torch.manual_seed(1)
    first = Critic(8, 0.01, torch.device("cpu"))
    hidden = torch.randn(5, 8)

    def learn(critic: Critic) -> None:
        (critic(hidden) - torch.arange(5.0)).square().sum().backward()
        critic.optimizer.step()
        critic.optimizer.zero_grad()

    for _ in range(3):
        learn(first)
    second = Critic(8, 0.01, torch.device("cpu"))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for critic in (first, second):
        learn(critic)
    assert torch.equal(first(hidden), second(hidden))
    assert first.state_dict() == second.state_dict()
    fresh = Critic(8, 0.01, torch.device("cpu"))
    assert fresh.state_dict()["moments"] == [{}, {}]
    second.load_state_dict(fresh.state_dict())
    assert torch.equal(second(hidden), torch.zeros(5))
