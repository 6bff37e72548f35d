"""A one-turn environment, and a local back end with a small policy to play it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ludus.backends.local import LocalBackend
from ludus.config.schema import RunConfig
from ludus.config.training import RLOptimizerConfig
from ludus.core.types import Group, Message, Observation, Spec, StepResult, Task, Trajectory
from ludus.envs.base import Env
from ludus.loop.loop import Stage
from ludus.models.build import build_model
from ludus.models.chat.by_task import TaskRenderers
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.pipeline.stages import sample_until_signal
from ludus.rollout.collect import Collector
from ludus.rollout.replay import ReplaySource, replay
from ludus.rollout.source import Collect, GroupSource, SyncSource
from ludus.tasks.curriculum import TaskSampler
from ludus.train import ALGORITHMS
from ludus.train.batches.minibatches import TrainSettings

LEVERS = ("red", "green", "blue", "grey")
PLACES = ("hall", "cellar", "attic", "garden", "roof", "yard")


class Bandit(Env):
    """Pull a lever. `pays` names the one that earns 1; "all" pay in some task, in others "none"."""

    max_turns = 1

    async def reset(self, task: Task) -> Observation:
        self.pays = task.data.get("pays", "green")
        if self.pays == "broken":
            raise RuntimeError("the machine is out of order")
        text = f"pull a lever in the {task.data['place']}"
        return Observation(messages=[Message(role="user", content=text)])

    async def step(self, action: Message) -> StepResult:
        won = self.pays == "all" or action.content == self.pays
        return StepResult(reward=float(won), terminated=True)


class SleepyBandit(Bandit):
    """A lever that takes its time, in a thread of its own."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def step(self, action: Message) -> StepResult:
        time.sleep(self.seconds)
        return await super().step(action)


@dataclass
class Recording:
    """An in-memory recorder."""

    steps: list[tuple[str, int, list[Group], dict[str, float]]] = field(default_factory=list)

    def record(
        self, stage: str, step: int, groups: Sequence[Group], metrics: dict[str, float]
    ) -> None:
        self.steps.append((stage, step, list(groups), dict(metrics)))

    def metric(self, name: str) -> list[float]:
        return [metrics[name] for _, _, _, metrics in self.steps]


def task(place: str, **data: Any) -> Task:
    return Task(id=f"{place}/{data.get('pays', 'green')}", data={"place": place, **data})


def shown(place: str, lever: str) -> list[Message]:
    """A demonstration."""
    return [
        Message(role="user", content=f"pull a lever in the {place}"),
        Message(role="assistant", content=lever),
    ]


class World:
    """A fresh policy of 25,000 parameters, its back end, and stages to run on it."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        texts = [m.content for place in PLACES for lever in LEVERS for m in shown(place, lever)]
        tokenizer = train_tokenizer(Spec(name="words"), texts)
        self.renderer = Renderer(tokenizer)
        shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
        shape |= {"head_dim": 16, "intermediate_size": 64}
        self.config = RunConfig.model_validate(
            {
                "model": {
                    "architecture": {"name": "qwen3", "args": shape},
                    "tokenizer": "words",
                    "context_length": 48,
                },
                "env": "loop_helpers:Bandit",
                "tasks": {"train": "env"},
                "rollout": {"max_tokens_per_turn": 4, "concurrency": 12, "max_retries": 0},
            }
        )
        model = build_model(self.config.model, tokenizer, seed)
        self.backend = LocalBackend(lambda: model, self.renderer, self.config, folder)

    def collector(self, **settings: Any) -> Collector:
        return Collector(
            self.backend.sampler,
            TaskRenderers(self.renderer),
            self.config.rollout.model_copy(update=settings),
            self.config.env,
        )

    def sft(self, demonstrations: Sequence[tuple[str, str]], steps: int, **options: Any) -> Stage:
        """Cross-entropy on (place, lever) pairs."""
        played, tasks = [], []
        for number, (place, lever) in enumerate(demonstrations):
            trajectory = Trajectory("", "", f"{number}")
            played.append(replay(shown(place, lever), self.renderer, trajectory))
            tasks.append(Task(id=f"{number}"))
        source = ReplaySource(TaskSampler(tasks), played)
        return self._stage("sft", source, steps, 0.01, groups_per_step=8, **options)

    def rl(
        self, tasks: Sequence[Task], steps: int, algorithm: str | Spec = "grpo", **options: Any
    ) -> Stage:
        """Groups of eight."""
        source = SyncSource(TaskSampler(tasks), self.play())
        options = {"groups_per_step": 3, "algorithm": algorithm, **options}
        return self._stage("rl", source, steps, 0.003, **options)

    def play(self, group_size: int = 8, **changes: Any) -> Collect:
        """Play groups of a fixed size, with some fields of the collector replaced."""
        collector = replace(self.collector(), **changes)
        return partial(collector.collect, group_size=group_size)

    def _stage(
        self,
        name: str,
        source: GroupSource,
        steps: int,
        lr: float,
        algorithm: str | Spec = "sft",
        *,
        groups_per_step: int,
        after_step: Callable[[int], Awaitable[bool]] | None = None,
        target_kl: float | None = None,
        **options: Any,
    ) -> Stage:
        row = ALGORITHMS.build(algorithm)
        settings = TrainSettings(
            name, steps, RLOptimizerConfig(lr=lr, target_kl=target_kl), 128, **options
        )
        stage = Stage(settings, groups_per_step, sample_until_signal(source, row), row, after_step)
        self.backend.begin_stage(stage.settings, stage.algorithm)
        return stage
