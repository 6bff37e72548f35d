"""Losses against numbers worked out by hand. Shape suffix: N, loss tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ludus.train.algorithms.losses import (
    LossFn,
    LossInputs,
    LossOutput,
    clipped,
    cross_entropy,
    reinforce,
    with_entropy_bonus,
)


def run(
    loss: LossFn, ratios: list[float], advantages: list[float], old: float = -1.0
) -> tuple[LossOutput, Tensor]:
    """The loss of tokens with these ratios, and the gradient of its sum in their logprobs."""
    logprobs_N = torch.tensor([old + math.log(r) for r in ratios], dtype=torch.float64)
    logprobs_N.requires_grad_()
    output = loss(
        LossInputs(
            logprobs_N=logprobs_N,
            old_logprobs_N=torch.full_like(logprobs_N, old).detach(),
            advantages_N=torch.tensor(advantages, dtype=torch.float64),
            trajectory_N=torch.zeros(len(ratios), dtype=torch.int64),
        )
    )
    output.loss_N.sum().backward()
    assert logprobs_N.grad is not None
    return output, logprobs_N.grad


def test_clipped_by_hand() -> None:
    # r, A -> min(r A, clip(r, 0.8, 1.2) A); the gradient is -r A where the first is taken, else 0
    #   1.0,  2:  2    and  2    ->  2                 gradient -2
    #   1.5,  2:  3    and  2.4  ->  2.4 (clipped)     gradient  0
    #   0.5,  2:  1    and  1.6  ->  1                 gradient -1
    #   1.5, -2: -3    and -2.4  -> -3                 gradient  3
    #   0.5, -2: -1    and -1.6  -> -1.6 (clipped)     gradient  0
    output, gradient_N = run(clipped(0.2, 0.2), [1, 1.5, 0.5, 1.5, 0.5], [2, 2, 2, -2, -2])
    assert output.loss_N.tolist() == pytest.approx([-2, -2.4, -1, 3, 1.6])
    assert gradient_N.tolist() == pytest.approx([-2, 0, -1, 3, 0])
    assert output.metrics["clip_fraction"].tolist() == [0, 1, 0, 0, 1]
    assert output.metrics["ratio"].tolist() == pytest.approx([1, 1.5, 0.5, 1.5, 0.5])


def test_clip_higher_lets_rare_tokens_grow() -> None:
    # 1.25 lies above 1.2 and below 1.28
    held, gradient_N = run(clipped(0.2, 0.2), [1.25], [1])
    assert held.loss_N.item() == pytest.approx(-1.2)
    assert gradient_N.item() == 0
    free, gradient_N = run(clipped(0.2, 0.28), [1.25], [1])
    assert free.loss_N.item() == pytest.approx(-1.25)
    assert gradient_N.item() == pytest.approx(-1.25)


def test_kl_by_hand() -> None:
    # k3 = r - 1 - log r: 0 at 1; 2 - 1 - 0.6931472; 0.5 - 1 + 0.6931472
    output, _ = run(clipped(0.2, 0.2), [1, 2, 0.5], [1, 1, 1])
    assert output.metrics["kl"].tolist() == pytest.approx([0, 0.3068528, 0.1931472], abs=1e-7)


def test_kl_estimates_the_divergence_from_the_sampling_policy() -> None:
    old_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    new_V = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    ones_V = torch.ones(3, dtype=torch.float64)
    inputs = LossInputs(new_V.log(), old_V.log(), ones_V, torch.zeros(3, dtype=torch.int64))
    expected = (old_V * clipped(0.2, 0.2)(inputs).metrics["kl"]).sum()
    exact = (old_V * (old_V.log() - new_V.log())).sum()
    assert expected.item() == pytest.approx(exact.item())


@pytest.mark.parametrize("log_ratio", [500.0, -500.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_that_would_overflow_stays_finite(log_ratio: float, advantage: float) -> None:
    logprobs_N = torch.tensor([log_ratio - 1.0], requires_grad=True)
    inputs = LossInputs(
        logprobs_N,
        torch.tensor([-1.0]),
        torch.tensor([advantage]),
        torch.zeros(1, dtype=torch.int64),
    )
    output = clipped(0.2, 0.2)(inputs)
    output.loss_N.sum().backward()
    assert logprobs_N.grad is not None
    for value in (output.loss_N, logprobs_N.grad, *output.metrics.values()):
        assert torch.isfinite(value).all()


def test_reinforce_by_hand() -> None:
    # -A log pi with log pi = -1 + log r: A = 2, r = 1: 2; A = -1, r = 2: -0.3068528
    output, gradient_N = run(reinforce, [1, 2], [2, -1])
    assert output.loss_N.tolist() == pytest.approx([2, -0.3068528], abs=1e-7)
    assert gradient_N.tolist() == [-2, 1]


def test_on_its_own_samples_the_clipped_gradient_is_reinforce() -> None:
    _, first_N = run(clipped(0.2, 0.2), [1, 1, 1], [2, -1, 0.5])
    _, second_N = run(reinforce, [1, 1, 1], [2, -1, 0.5])
    torch.testing.assert_close(first_N, second_N)


def test_cross_entropy_by_hand() -> None:
    output, gradient_N = run(cross_entropy, [1, 1], [7, -7], old=-3.0)
    assert output.loss_N.tolist() == [3, 3]
    assert gradient_N.tolist() == [-1, -1]


def test_metrics_carry_no_gradient() -> None:
    for loss in (clipped(0.2, 0.2), reinforce, cross_entropy):
        output, _ = run(loss, [1.1], [1])
        assert not any(value.requires_grad for value in output.metrics.values())
        assert all(value.shape == (1,) for value in output.metrics.values())


def test_the_entropy_bonus_by_hand() -> None:
    # Distribution (1/2, 1/4, 1/4): entropy 1.5 ln 2 = 1.0397208 nats. Its gradient in the logits is
    # -p (log p + H): -1/2 (-0.6931472 + 1.0397208) = -0.1732868; 2 x -1/4 (-1.3862944 + 1.0397208)
    # = 0.0866434. The loss takes 0.1 of it off: the gradient's sign turns, and the likeliest falls.
    logits_V = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log().requires_grad_()
    logprobs_V = logits_V.log_softmax(-1)
    entropy_N = -(logprobs_V.exp() * logprobs_V).sum()[None]
    inputs = LossInputs(
        logprobs_N=logprobs_V[:1].detach(),
        old_logprobs_N=logprobs_V[:1].detach(),
        advantages_N=torch.tensor([2.0]),
        trajectory_N=torch.zeros(1, dtype=torch.int64),
        entropy_N=entropy_N,
    )
    output = with_entropy_bonus(clipped(0.2, 0.2), 0.1)(inputs)
    output.loss_N.sum().backward()
    assert output.loss_N.item() == pytest.approx(-2 - 0.1 * 1.0397208, abs=1e-7)
    assert logits_V.grad is not None
    assert logits_V.grad.tolist() == pytest.approx([0.01732868, -0.00866434, -0.00866434], abs=1e-8)
