"""The local back end: one set of weights, versions, and a resume that is no break."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from variants import variants

from ludus.backends import BACKENDS
from ludus.backends.conformance import CHECKS, Check
from ludus.backends.local import LocalBackend
from ludus.config.schema import LoraConfig, OptimizerConfig, RunConfig
from ludus.core.errors import CheckpointError, ConfigError
from ludus.core.types import Sample, Spec
from ludus.models.build import build_model
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.train import ALGORITHMS
from ludus.train.batches.minibatches import TrainSettings

SHAPE = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "head_dim": 16, "init_range": 0.2}
OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=2, schedule="cosine", weight_decay=0.1)
SETTINGS = TrainSettings("rl", 12, OPTIMIZER, tokens_per_batch=48)
ALGORITHM = ALGORITHMS.build(Spec(name="dapo", args={"clip_high": 0.2}))


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(train_tokenizer(Spec(name="words"), ["go left", "go right", "stop here now"]))


def make_backend(
    renderer: Renderer, folder: Path, seed: int, lora: bool = False, **changes: Any
) -> LocalBackend:
    adapters = LoraConfig(rank=2, dropout=0.2) if lora else None
    config = RunConfig.model_validate(
        {
            "model": {
                "architecture": {"name": "qwen3", "args": {**SHAPE, "intermediate_size": 48}},
                "tokenizer": "words",
                "context_length": 48,
                "lora": adapters,
            },
            "tasks": {"train": "env"},
            "rollout": {"max_tokens_per_turn": 8},
            **changes,
        }
    )
    model = build_model(config.model, renderer.tokenizer, seed)
    backend = LocalBackend(lambda: model, renderer, config, folder)
    backend.begin_stage(SETTINGS, ALGORITHM)
    return backend


async def rollouts(backend: LocalBackend, step: int) -> list[Completion]:
    """Four episodes of two turns."""
    sampler = backend.sampler
    played = []
    for number in range(4):
        sampler.open(f"{step}/{number}")
        ids = [3 + number, 4, 5]
        for turn in range(2):
            params = SamplingParams(max_tokens=8, seed=100 * step + 10 * number + turn)
            played.append(await sampler.sample(ids, params, session=f"{step}/{number}"))
            ids = [*ids, *played[-1].token_ids, 6]
        sampler.close(f"{step}/{number}")
    return played


async def iteration(backend: LocalBackend, step: int) -> tuple[list[Completion], dict[str, float]]:
    """Sample, learn from what was sampled, publish."""
    played = await rollouts(backend, step)
    samples = [
        Sample(
            [2, *completion.token_ids],
            [False, *[True] * len(completion.token_ids)],
            [0.0, *completion.logprobs],
            [0.0, *[(-1.0) ** i] * len(completion.token_ids)],
            f"{i}",
        )
        for i, completion in enumerate(played)
    ]
    metrics = await backend.train(samples, ALGORITHM)
    await backend.publish_weights()
    return played, metrics


def weights(backend: LocalBackend) -> dict[str, Any]:
    return {name: p.detach().clone() for name, p in backend.model.named_parameters()}


def moments(backend: LocalBackend) -> list[Any]:
    state = backend.learner.optimizer.state_dict()["state"]
    return [state[i][key] for i in sorted(state) for key in sorted(state[i])]


HALF: dict[str, Any] = {
    "sampler": {"name": "in_process", "args": {"dtype": "bfloat16", "path": "static"}}
}


@pytest.mark.parametrize(
    ("lora", "changes"),
    variants([(False, {}), (True, {}), (False, HALF), (True, HALF)], [(False, {}), (True, HALF)]),
    ids=["full", "lora with dropout", "bfloat16 copy", "bfloat16 copy of lora"],
)
async def test_a_resumed_run_is_the_uninterrupted_one(
    tmp_path: Path, renderer: Renderer, lora: bool, changes: dict[str, Any]
) -> None:
    torch.manual_seed(5)
    straight = make_backend(renderer, tmp_path / "a", seed=1, lora=lora, **changes)
    for step in range(3):
        await iteration(straight, step)
    saved = weights(straight)
    path = straight.save("rl", 3, {"cursor": [1, 2], "name": "x"}, 0.5, pin=False)
    for file in path.rglob("*.safetensors"):  # the sampler's copy is not in it
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float32}
    expected = [await iteration(straight, step) for step in range(3, 8)]

    torch.manual_seed(77)
    resumed = make_backend(renderer, tmp_path / "b", seed=1 if lora else 2, lora=lora, **changes)
    if not lora:
        assert not all(torch.equal(saved[n], w) for n, w in weights(resumed).items())
    await iteration(resumed, 0)  # what it did before it loads does not matter
    assert resumed.load(path) == {"cursor": [1, 2], "name": "x"}
    assert all(torch.equal(saved[n], w) for n, w in weights(resumed).items())
    assert resumed.sampler.policy_version == 3
    assert resumed.learner.step == 3
    assert [await iteration(resumed, step) for step in range(3, 8)] == expected
    final = weights(straight)
    assert all(torch.equal(final[n], w) for n, w in weights(resumed).items())
    assert not all(torch.equal(saved[n], w) for n, w in final.items())
    pairs = zip(moments(straight), moments(resumed), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_other_minibatches_go_on_at_the_same_point_of_the_schedule(
    tmp_path: Path, renderer: Renderer
) -> None:
    before, after = (replace(SETTINGS, minibatches=count) for count in (1, 4))
    backend = make_backend(renderer, tmp_path, seed=0)
    backend.begin_stage(before, ALGORITHM)
    backend.learner.step = 6  # of 12
    path = backend.save("rl", 6, {}, None, pin=False)
    backend.begin_stage(after, ALGORITHM)
    backend.load(path)
    assert (backend.learner.step, backend.learner.num_steps) == (24, 48)
    assert before.restored({"optimizer_step": 6}) == 6  # of a version that did not save it


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check: Check, tmp_path: Path, renderer: Renderer) -> None:
    await check(lambda folder: make_backend(renderer, folder, seed=3), tmp_path)


def test_back_ends_are_plugins(tmp_path: Path) -> None:
    assert {"local", "debug"} <= set(BACKENDS)
    with pytest.raises(ConfigError, match=r"backend.name: 'lcoal' is not a known .*mean local"):
        BACKENDS.check(Spec(name="lcoal"), "backend")
    with pytest.raises(ConfigError, match=r"backend.args.device"):
        BACKENDS.check(Spec(name="local", args={"device": "cpu"}), "backend")


async def test_the_sampler_sees_what_the_learner_trains(tmp_path: Path, renderer: Renderer) -> None:
    backend = make_backend(renderer, tmp_path, seed=0)
    first = await rollouts(backend, 0)
    assert {completion.policy_version for completion in first} == {0}
    open_during_training = "episode"
    backend.sampler.open(open_during_training)
    params = SamplingParams(max_tokens=5, seed=4)
    old = await backend.sampler.sample([3, 4, 5], params, session=open_during_training)
    backend.sampler.close(open_during_training)
    await iteration(backend, 1)
    assert backend.sampler.policy_version == 1
    backend.sampler.open(open_during_training)
    new = await backend.sampler.sample([3, 4, 5], params, session=open_during_training)
    assert new.policy_version == 1
    assert new.logprobs != old.logprobs


async def test_a_kept_session_forgets_at_publication(tmp_path: Path, renderer: Renderer) -> None:
    """Keys and values of old weights are never mixed with new ones."""
    backend = make_backend(renderer, tmp_path, seed=0)
    sampler = backend.sampler
    sampler.open("kept")
    params = SamplingParams(max_tokens=6, seed=4)
    first = await sampler.sample([3, 4, 5], params, session="kept")
    with torch.no_grad():
        for parameter in backend.model.parameters():
            parameter.mul_(1.2)
    assert await backend.publish_weights() == 1
    prompt = [3, 4, 5, *first.token_ids, 6]
    kept = await sampler.sample(prompt, params, session="kept")
    sampler.close("kept")
    sampler.open("fresh")
    assert await sampler.sample(prompt, params, session="fresh") == kept


async def test_a_stage_starts_with_a_fresh_optimizer(tmp_path: Path, renderer: Renderer) -> None:
    backend = make_backend(renderer, tmp_path, seed=0)
    await iteration(backend, 0)
    before = backend.learner
    backend.begin_stage(TrainSettings("rl", 5, OPTIMIZER, 48, temperature=0.5), ALGORITHM)
    assert backend.learner is not before
    assert (backend.learner.step, backend.learner.temperature) == (0, 0.5)
    assert not backend.learner.optimizer.state
    assert backend.sampler.policy_version == 1  # versions go on


def test_training_needs_a_stage(tmp_path: Path, renderer: Renderer) -> None:
    backend = make_backend(renderer, tmp_path, seed=0)
    backend.trainer._learner = None
    with pytest.raises(RuntimeError, match="begin_stage has not been called"):
        _ = backend.learner
    backend.begin_stage(SETTINGS, ALGORITHM)
    with pytest.raises(CheckpointError):
        backend.load(tmp_path / "nothing")
