"""ludus against the algorithm in one file: the same trajectories, loss and gradient."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ludus.config.schema import OptimizerConfig
from ludus.core.types import Group, Segment, Task, Trajectory
from ludus.train.algorithms.advantages import group_normalised
from ludus.train.algorithms.losses import LossInputs
from ludus.train.algorithms.table import GRPO
from ludus.train.batches.packing import Batch, pack
from ludus.train.batches.samples import to_samples
from ludus.train.learner import Learner

PATH = Path(__file__).parents[2] / "examples" / "grpo_one_file.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_one_file", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["grpo_one_file"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(example: ModuleType) -> Any:
    with torch.random.fork_rng():
        return example.make_model(seed=1)


@pytest.fixture(scope="module")
def groups(example: ModuleType, model: Any) -> list[list[Any]]:
    """Four groups of six episodes, sampled; then the policy moves on, so that ratios leave 1."""
    generator = torch.Generator().manual_seed(2)
    tasks = [(4, 5), (2, 1), (3, 5), (1, 2)]
    episodes = example.play(model, [task for task in tasks for _ in range(6)], generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    return [episodes[i : i + 6] for i in range(0, 24, 6)]


def as_groups(groups: list[list[Any]]) -> list[Group]:
    """The example's episodes as ludus' trees: a segment a run of given or of sampled tokens."""
    converted = []
    for g, episodes in enumerate(groups):
        trajectories = []
        for e, episode in enumerate(episodes):
            rows = zip(episode.mask, episode.ids, episode.logprobs, strict=True)
            segments: list[Segment] = []
            for sampled, run in itertools.groupby(rows, key=lambda row: row[0]):
                _, ids, logprobs = zip(*run, strict=True)
                segments.append(
                    Segment(len(segments) - 1, [*ids], [*logprobs] if sampled else None)
                )
            trajectories.append(
                Trajectory(f"g{g}/e{e}", f"g{g}", f"{g}", segments, reward=episode.reward)
            )
        converted.append(Group(f"g{g}", Task(id=f"{g}"), trajectories))
    return converted


@pytest.fixture
def batch(groups: list[list[Any]]) -> Batch:
    samples = to_samples(GRPO.assign(as_groups(groups)))
    return pack(samples, GRPO.aggregate(samples), tokens_per_batch=128, pad_id=0)


def test_the_groups_have_signal(groups: list[list[Any]]) -> None:
    spreads = [len({episode.reward for episode in group}) for group in groups]
    assert sum(spread > 1 for spread in spreads) >= 3


def test_advantages_agree(example: ModuleType, groups: list[list[Any]]) -> None:
    for group in groups:
        rewards = [episode.reward for episode in group]
        assert group_normalised(rewards) == pytest.approx(
            example.group_advantages(rewards), abs=1e-9
        )


def test_rows_agree(groups: list[list[Any]]) -> None:
    samples = to_samples(GRPO.assign(as_groups(groups)))
    episodes = [episode for group in groups for episode in group]
    assert len(samples) == len(episodes)
    for sample, episode in zip(samples, episodes, strict=True):
        length = len(sample.token_ids)
        assert sample.token_ids == episode.ids[:length]
        assert sample.loss_mask == episode.mask[:length]
        assert sample.logprobs == episode.logprobs[:length]
        assert not any(episode.mask[length:])


def test_loss_and_gradient_agree(
    example: ModuleType, model: Any, groups: list[list[Any]], batch: Batch
) -> None:
    model.zero_grad()
    expected = example.grpo_loss(model, groups)
    expected.backward()
    expected_gradient = [parameter.grad.clone() for parameter in model.parameters()]

    model.zero_grad()
    learner = Learner(model, OptimizerConfig(), num_steps=1)
    loss, clip_fraction = torch.zeros(()), 0.0
    assert len(batch.micro_batches) > 1
    for micro in batch.micro_batches:
        logprobs_N, _ = learner.logprobs(micro)
        output = GRPO.loss(
            LossInputs(
                logprobs_N,
                micro.old_logprobs_N,
                micro.advantages_N,
                micro.trajectory_N,
            )
        )
        total = (output.loss_N * micro.weights_N).sum()
        total.backward()
        loss += total.detach()
        clip_fraction += float(output.metrics["clip_fraction"].sum())

    assert clip_fraction > 0, "the policy has to have moved for the clip to be tested"
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert max(gradient.abs().max() for gradient in expected_gradient) > 0.01
    for parameter, gradient in zip(model.parameters(), expected_gradient, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-5)


def test_a_train_step_reports_the_example_s_loss_and_gradient_norm(
    example: ModuleType, model: Any, groups: list[list[Any]], batch: Batch
) -> None:
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.zero_grad()
    expected = example.grpo_loss(model, groups)
    expected.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    metrics = Learner(model, OptimizerConfig(), num_steps=1).train_step(batch, GRPO.loss)
    model.load_state_dict(weights)
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), abs=1e-6)


def test_a_short_run_improves(example: ModuleType) -> None:
    with torch.random.fork_rng():
        _, rewards = example.train(steps=30, groups_per_step=12, seed=0, log_every=0)
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1


def test_the_program_runs(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo_one_file.py", "--steps", "2"])
    with torch.random.fork_rng():
        example.main()
    printed = capsys.readouterr().out
    assert "step   0  reward 0." in printed
    assert "of 20 goals reached" in printed


def test_it_stays_a_page_to_read() -> None:
    assert len(PATH.read_text(encoding="utf-8").splitlines()) <= 300
