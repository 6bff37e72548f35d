"""A run with a sampler that runs an engine's server: vLLM's or SGLang's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from engine_helpers import expected_logprobs
from engines import engine_python

from ludus.backends.local import LocalBackend
from ludus.config.schema import RunConfig
from ludus.core.types import Score, Spec, Task
from ludus.models.build import build_model
from ludus.models.chat.by_task import TaskRenderers
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.models.samplers.served import ServedSampler
from ludus.models.samplers.server_process import ServerProcess
from ludus.rollout.collect import Collector

CONTEXT = 1024
LEVERS = ("red", "green", "blue", "grey")
PROMPT = [5, 6, 7]


class World:
    """A back end whose sampler runs a server, and a collector of one-turn episodes."""

    def __init__(self, engine: str, folder: Path, tokenizer: str = "words", **args: Any) -> None:
        texts = [f"pull a lever {lever}" for lever in LEVERS]
        python = str(engine_python(engine))
        self.renderer = Renderer(train_tokenizer(Spec(name=tokenizer), texts))
        shape = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
        self.config = RunConfig.model_validate(
            {
                "model": {
                    "architecture": {"name": "qwen3", "args": shape | {"head_dim": 32}},
                    "tokenizer": tokenizer,
                    "context_length": CONTEXT,
                },
                "sampler": {"name": engine, "args": {"python": python, "threads": 1, **args}},
                "judge": "served_world:ByLever",
                "tasks": {"train": "env"},
                "rollout": {
                    "deterministic": False,
                    "max_tokens_per_turn": 4,
                    "max_retries": 1,
                },
            }
        )
        model = build_model(self.config.model, self.renderer.tokenizer, 0)
        self.backend = LocalBackend(lambda: model, self.renderer, self.config, folder)
        self.model = model
        sampler = self.backend.sampler
        assert isinstance(sampler, ServedSampler)
        self.sampler = sampler

    @property
    def server(self) -> ServerProcess:
        assert isinstance(self.sampler.server, ServerProcess)
        return self.sampler.server

    def collector(self, **settings: Any) -> Collector:
        config = self.config.rollout.model_copy(update=settings)
        return Collector(self.sampler, TaskRenderers(self.renderer), config, None, ByLever())


class ByLever:
    """Higher for earlier letters, so any two answers differ."""

    async def __call__(self, task: Task, trajectory: Any) -> Any:
        return Score(value=sum(trajectory.token_ids()) % 97 / 97)


async def sample(world: World, params: SamplingParams, name: str = "a") -> Completion:
    world.sampler.open(name)
    try:
        return await world.sampler.sample(PROMPT, params, session=name)
    finally:
        world.sampler.close(name)


def error_of(world: World, completion: Completion, params: SamplingParams) -> float:
    """Largest difference of log-probabilities from the current model's."""
    expected = expected_logprobs(world.model, PROMPT, completion, params)
    return max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True))


@torch.no_grad()
def perturb(world: World) -> None:
    torch.manual_seed(1)
    for parameter in world.model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
