"""Weights carry a version, turns the version that sampled them, and a step moves the right way."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ludus.backends.local import LocalBackend
from ludus.config.schema import ModelConfig, OptimizerConfig, RunConfig, TasksConfig
from ludus.core.errors import TrainingError
from ludus.core.types import Group, Message, Spec, Task, Trajectory
from ludus.loop.loop import Stage, run_stage
from ludus.models.build import build_model
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.rollout.sessions.session import TreeBuilder
from ludus.rollout.source import SyncSource
from ludus.tasks.curriculum import TaskSampler
from ludus.train import ALGORITHMS
from ludus.train.batches.minibatches import TrainSettings
from ludus.train.batches.samples import to_samples

SHAPE = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
SETTINGS = TrainSettings("rl", 10, OptimizerConfig(lr=1e-2), tokens_per_batch=64)


@pytest.fixture
def backend(tmp_path: Path, request: pytest.FixtureRequest) -> LocalBackend:
    """Indirect parameter: the sampler's path."""
    config = RunConfig(
        model=ModelConfig(
            architecture=Spec(name="qwen3", args=SHAPE),
            tokenizer=Spec(name="words"),
            chat_template="plain",
            context_length=32,
        ),
        tasks=TasksConfig(train=Spec(name="env", args={"num_tasks": 1})),
        env=Spec(name="textcraft"),
        rollout={"max_tokens_per_turn": 4},
        sampler=Spec(name="in_process", args={"path": getattr(request, "param", "auto")}),
    )
    tokenizer = train_tokenizer(Spec(name="words"), ["turn left", "go forward"])
    renderer = Renderer(tokenizer)
    model = build_model(config.model, tokenizer, seed=0)
    made = LocalBackend(lambda: model, renderer, config, tmp_path)
    made.begin_stage(SETTINGS, ALGORITHMS.build("grpo"))
    return made


async def sample(backend: LocalBackend, seed: int = 0) -> Completion:
    backend.sampler.open("s")
    try:
        params = SamplingParams(max_tokens=4, seed=seed)
        return await backend.sampler.sample([5, 6, 7], params, session="s")
    finally:
        backend.sampler.close("s")


async def train(backend: LocalBackend, completions: list[Completion] | None = None) -> None:
    """One step on two of the policy's turns, of which the second has the higher reward."""
    completions = completions or [await sample(backend, seed) for seed in (1, 2)]
    members = []
    for number, completion in enumerate(completions):
        trajectory = Trajectory(f"t{number}", "g", "task", reward=float(number))
        builder = TreeBuilder(trajectory)
        builder.add_messages([Message(role="user", content="go")], [5, 6, 7])
        builder.add_turn(
            Message(role="assistant"), completion.token_ids, completion.logprobs,
            completion.policy_version,
        )  # fmt: skip
        members.append(trajectory)
    algorithm = ALGORITHMS.build("grpo")
    samples = to_samples(algorithm.assign([Group("g", Task(id="task"), members)]))
    assert {s.policy_version for s in samples} == {completions[0].policy_version}
    await backend.train(samples, algorithm)


async def test_each_publication_counts_up_and_is_what_turns_carry(backend: LocalBackend):
    assert (await sample(backend)).policy_version == 0
    for version in (1, 2, 3):
        await train(backend)
        assert await backend.publish_weights() == version
        assert (await sample(backend)).policy_version == version


async def test_published_weights_are_those_that_sample(backend: LocalBackend):
    before = await sample(backend)
    await train(backend)
    await backend.publish_weights()
    after = await sample(backend)
    ids = torch.tensor([[5, 6, 7, *after.token_ids]])
    with torch.no_grad():
        logits = backend.model(input_ids=ids).logits[0, 2:-1].float()
    expected = logits.log_softmax(-1).gather(-1, ids[0, 3:, None])[:, 0]
    assert after.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    assert after.logprobs != pytest.approx(before.logprobs, abs=1e-4)


@pytest.mark.parametrize("backend", ["auto", "static"], indirect=True)
async def test_weights_that_change_during_a_turn_sample_only_once_published(
    backend: LocalBackend,
):
    """Between the change and the publication no token is sampled by weights without a version: the
    sampler rests where it shares the learner's weights, and goes on with its own."""
    shares = backend.sampler.shares_weights
    completions = [await sample(backend, seed) for seed in (1, 2)]
    backend.sampler.open("long")
    params = SamplingParams(max_tokens=24, seed=3)
    turn = asyncio.create_task(backend.sampler.sample([5, 6, 7], params, session="long"))
    counts, models = [], []
    for version in (1, 2):
        for _ in range(3):
            await asyncio.sleep(0)
        models.append(copy.deepcopy(backend.model))
        before = backend.sampler.num_decode_tokens
        await train(backend, completions)
        for _ in range(3):
            await asyncio.sleep(0)
        counts.append(backend.sampler.num_decode_tokens)
        assert (counts[-1] == before) == shares
        assert await backend.publish_weights() == version
    done = await turn
    backend.sampler.close("long")
    first, second = counts[0] - 8, counts[1] - counts[0]
    assert done.version_runs == [(0, first), (1, second), (2, 24 - first - second)]
    by = [logprobs(model, done.token_ids) for model in (*models, backend.model)]
    expected = by[0][:first] + by[1][first : first + second] + by[2][first + second :]
    assert done.logprobs == pytest.approx(expected, abs=1e-4)
    assert by[0][first] != pytest.approx(by[1][first], abs=1e-4)
    assert by[1][first + second] != pytest.approx(by[2][first + second], abs=1e-4)


async def test_a_checkpoint_keeps_the_version(backend: LocalBackend):
    await train(backend)
    await backend.publish_weights()
    path = backend.save("rl", 1, {}, None, pin=False)
    await backend.publish_weights()
    backend.load(path)
    assert (await sample(backend)).policy_version == 1


async def test_a_step_makes_the_better_turn_likelier_than_the_worse(backend: LocalBackend):
    def gap(completions: list[Completion]) -> float:
        worse, better = (logprob(backend, completion.token_ids) for completion in completions)
        return better - worse

    completions = [await sample(backend, seed) for seed in (1, 2)]
    assert completions[0].token_ids != completions[1].token_ids
    gaps = [gap(completions)]
    for _ in range(3):
        await train(backend, completions)
        gaps.append(gap(completions))
    assert gaps == sorted(gaps)
    assert gaps[-1] > gaps[0] + 0.1


def logprob(backend: LocalBackend, token_ids: list[int]) -> float:
    return sum(logprobs(backend.model, token_ids))


def logprobs(model: Any, token_ids: list[int]) -> list[float]:
    ids = torch.tensor([[5, 6, 7, *token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, 2:-1].float()
    values: list[float] = logits.log_softmax(-1).gather(-1, ids[0, 3:, None])[:, 0].tolist()
    return values


async def test_turns_of_other_weights_than_the_published_ones_are_refused(backend: LocalBackend):
    async def play(tasks: Sequence[Task], step: int, *, first_group: int) -> list[Group]:
        trajectory = Trajectory("stale", "g", "task", reward=1.0)
        builder = TreeBuilder(trajectory)
        builder.add_messages([Message(role="user", content="go")], [5, 6, 7])
        builder.add_turn(Message(role="assistant"), [8], [-0.1], 0)
        return [Group("g", Task(id="task"), [trajectory])]

    source = SyncSource(TaskSampler([Task(id="task")]), play)
    stage = Stage(SETTINGS, groups_per_step=1, source=source, algorithm=ALGORITHMS.build("grpo"))
    await backend.publish_weights()
    with pytest.raises(TrainingError, match=r"stale was sampled by version 0 .* version 1 was"):
        await run_stage(stage, backend, recorder=None)  # type: ignore[arg-type]
