"""Scoring passes that exceed memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from learner_helpers import policy

from ludus.core.errors import TrainingError
from ludus.core.types import Group, Segment, Task, Trajectory
from ludus.train.critic import Critic
from ludus.train.forward import Forward
from ludus.train.scoring import Scorer


def groups(num: int = 8) -> list[Group]:
    """Trajectories of a prompt, an answer of 2 to 6 tokens, an observation and an answer."""
    played = []
    for n in range(num):
        answer = [(7 * n + i) % 40 for i in range(2 + n % 5)]
        segments = [
            Segment(-1, [3, 4, n]),
            Segment(0, answer, [-1.0] * len(answer)),
            Segment(1, [9, 8]),
            Segment(2, [5, n], [-2.0, -1.0]),
        ]
        played.append(Trajectory(f"t{n}", "g", "task", segments, reward=1.0))
    return [Group("g", Task(id="task"), played)]


def scored(model: Any, critic: Critic | None = None) -> list[float]:
    scorer = Scorer(Forward(model, context_length=64), 1000, 0, critic)
    [group] = scorer(groups(), "ref_logprobs")
    segments = [s for t in group.trajectories for s in t.segments if s.sampled]
    return [x for s in segments for x in [*(s.ref_logprobs or []), *(s.values or [])]]


class Scarce:
    """Passes of more than `limit` positions exceed memory."""

    def __init__(self, model: Any, limit: int, error: Exception) -> None:
        self.sizes: list[int] = []

        def look(_module: Any, args: Any, kwargs: Any) -> None:
            self.sizes.append(kwargs["input_ids"].numel())
            if self.sizes[-1] > limit:
                raise error

        model.model.register_forward_pre_hook(look, with_kwargs=True)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
@pytest.mark.parametrize("values", [False, True])
def test_a_pass_that_memory_does_not_hold_is_split(values: bool, error: Exception) -> None:
    critic = Critic(32, 1e-3, torch.device("cpu")) if values else None
    expected = scored(policy(), critic)
    model = policy()
    scorer = Scorer(Forward(model, context_length=64), 1000, 0, critic)
    scarce = Scarce(model, 40, error)
    [group] = scorer(groups(), "ref_logprobs")
    assert max(scarce.sizes) > 40
    assert sum(size <= 40 for size in scarce.sizes) > 1
    segments = [s for t in group.trajectories for s in t.segments if s.sampled]
    found = [x for s in segments for x in [*(s.ref_logprobs or []), *(s.values or [])]]
    assert found == pytest.approx(expected, abs=1e-5)


def test_memory_that_does_not_hold_a_sample() -> None:
    model = policy()
    scorer = Scorer(Forward(model, context_length=64), 1000, 0)
    Scarce(model, 4, torch.OutOfMemoryError("CUDA out of memory."))
    model.train()
    with pytest.raises(
        TrainingError, match=r"memory does not suffice to score a sample of \d+ tok"
    ):
        scorer(groups(), "ref_logprobs")
    assert model.training


def test_other_errors_are_raised() -> None:
    model = policy()
    scorer = Scorer(Forward(model, context_length=64), 1000, 0)
    Scarce(model, 4, RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="multiplied"):
        scorer(groups(), "ref_logprobs")


def test_the_learner_s_scores_come_with_entropies() -> None:
    """By hand from the model's logits; none with the reference's scores."""
    model = policy().eval()
    scorer = Scorer(Forward(model, context_length=64), 1000, 0)
    [reference] = scorer(groups(2), "ref_logprobs")
    assert not any(s.entropies for t in reference.trajectories for s in t.segments)
    [group] = scorer(groups(2), "learner_logprobs")
    for trajectory in group.trajectories:
        ids = trajectory.token_ids()
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        entropies = torch.distributions.Categorical(logits=logits).entropy().tolist()
        start = 0
        for segment in trajectory.segments:
            end = start + len(segment.token_ids)
            if segment.sampled:
                assert segment.entropies == pytest.approx(entropies[start - 1 : end - 1], abs=1e-4)
            else:
                assert segment.entropies is None
            start = end
