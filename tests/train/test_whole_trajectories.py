"""A ratio of whole trajectories does not depend on how their rows are packed."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from learner_helpers import make_samples, policy

from ludus.config.schema import OptimizerConfig
from ludus.core.types import Sample
from ludus.train.algorithms.aggregates import trajectory_mean
from ludus.train.algorithms.losses import (
    LossInputs,
    clipped,
    kl_estimate,
    needs_whole_trajectories,
    trajectory_clipped,
    with_entropy_bonus,
)
from ludus.train.critic import Critic
from ludus.train.learner import Learner
from ludus.train.packing import pack


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


def test_which_losses_need_them() -> None:
    assert needs_whole_trajectories(trajectory_clipped(0.1, 0.1))
    assert needs_whole_trajectories(with_entropy_bonus(trajectory_clipped(0.1, 0.1), 0.1))
    assert not needs_whole_trajectories(with_entropy_bonus(clipped(0.1, 0.1), 0.1))
    assert not needs_whole_trajectories(lambda inputs: clipped(0.1, 0.1)(inputs))


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
