"""Episodes whose turns, prompts and observations have fixed numbers of tokens, and GRPO on them.

Every program does the same work, so seconds are comparable: no turn ends early, for any weights.
Rewards are random, so every group trains.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ludus.backends.local import LocalBackend
from ludus.config.schema import OptimizerConfig, RunConfig
from ludus.core.types import Group, Message, Observation, Spec, StepResult, Task
from ludus.envs.base import Env
from ludus.loop.loop import Recorder, Stage, run_stage
from ludus.models.chat.by_task import TaskRenderers
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.models.samplers.base import Completion, Sampler, SamplingParams
from ludus.rollout.collect import Collector
from ludus.rollout.prefetch import PrefetchSource
from ludus.rollout.source import SyncSource
from ludus.tasks.curriculum import TaskSampler
from ludus.train import ALGORITHMS
from ludus.train.batches.minibatches import TrainSettings

NUM_WORDS = 500  # those that prompts and observations are made of
FRAME = 2
"""Tokens around a message: its role, and the assistant's."""
MEDIAN_S, P99_S = 0.05, 5.0  # of a slow environment's answers
SIGMA = math.log(P99_S / MEDIAN_S) / statistics.NormalDist().inv_cdf(0.99)


def latency(rng: random.Random) -> float:
    """Seconds until a slow environment answers: a log-normal draw."""
    return rng.lognormvariate(math.log(MEDIAN_S), SIGMA)


@dataclass(frozen=True)
class Work:
    """The work of a step.

    Args:
        prompt: tokens before the first turn, roles included.
        turn: tokens that are sampled in a turn.
        observation: tokens between two turns, the end of the turn and the roles included.
    """

    prompt: int = 64
    turn: int = 64
    turns: int = 1
    observation: int = 12
    groups: int = 8
    group_size: int = 8

    @property
    def samples(self) -> int:
        return self.groups * self.group_size

    @property
    def sampled_tokens(self) -> int:
        """Of a step."""
        return self.samples * self.turn * self.turns

    @property
    def length(self) -> int:
        """Tokens of an episode."""
        return self.prompt + self.turn * self.turns + self.observation * (self.turns - 1)

    def show(self) -> str:
        if self.turns == 1:
            return f"{self.prompt} + {self.turn}"
        return f"{self.prompt} + {self.turns} turns of {self.turn}, {self.observation} between"


def make_tokenizer(vocab_size: int) -> Any:
    """One token a word; as many tokens as the model has."""
    text = " ".join(map(word, range(vocab_size)))
    tokenizer = train_tokenizer(Spec(name="words", args={"vocab_size": vocab_size}), [text])
    if len(tokenizer) != vocab_size:
        raise SystemExit(f"the tokenizer has {len(tokenizer)} tokens, the model {vocab_size}")
    return tokenizer


def word(number: int) -> str:
    """Four letters that are a number."""
    return "".join(chr(ord("a") + number // 26**place % 26) for place in range(4))


def words(rng: random.Random, count: int) -> str:
    return " ".join(word(rng.randrange(1, NUM_WORDS)) for _ in range(count))


class FixedEnv(Env):
    """Says random words, then gives a random reward."""

    blocking = False

    def __init__(self, prompt: int = 64, turns: int = 1, observation: int = 12) -> None:
        self.prompt, self.observation = prompt, observation
        self.turns = self.max_turns = turns
        self.random = random.Random()

    async def reset(self, task: Task) -> Observation:
        self.num_steps = 0
        text = self.say(random.Random(task.id), self.prompt - FRAME)
        return Observation(messages=[Message(role="user", content=text)])

    async def step(self, action: Message) -> StepResult:
        self.num_steps += 1
        if self.num_steps == self.turns:
            return StepResult(reward=self.reward(), terminated=True)
        seen = self.say(self.random, self.observation - FRAME - 1)
        return StepResult(messages=[Message(role="user", content=seen)])

    def say(self, rng: random.Random, count: int) -> str:
        return words(rng, count)

    def reward(self) -> float:
        return self.random.random()


class FixedSampler:
    """A sampler whose turns end when they have their tokens, and not before."""

    def __init__(self, inner: Sampler) -> None:
        self.inner = inner
        self.context_length = inner.context_length
        self.open, self.close = inner.open, inner.close

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, *, session: str
    ) -> Completion:
        unstoppable = replace(params, stop_token_ids=(), stop=())
        completion = await self.inner.sample(prompt_ids, unstoppable, session=session)
        completion.finish_reason = "stop"
        return completion


@dataclass
class Kept:
    """A recorder in memory: metrics of each step, and the time at which it ended."""

    clock: Callable[[], float] = time.perf_counter
    metrics: list[dict[str, float]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def record(
        self, stage: str, step: int, groups: Sequence[Group], metrics: dict[str, float]
    ) -> None:
        self.metrics.append(metrics)
        self.ends.append(self.clock())


class LudusSteps:
    """Steps of ludus on a model, through its loop: rollouts, packing, optimizer step, publishing.

    Args:
        tokens_per_batch: at most, in a forward pass.
        clock: tells `rollout_s`, the last step's share.
        env: takes `FixedEnv`'s arguments.
        rollout: further settings of that section.
        settings: further sections of the configuration: `sampler`, `learner`, `rl`.
    """

    def __init__(
        self,
        model: Any,
        work: Work,
        folder: Path,
        *,
        tokens_per_batch: int = 8192,
        clock: Callable[[], float] = time.perf_counter,
        env: str = "fixed:FixedEnv",
        rollout: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        tokenizer = make_tokenizer(model.config.vocab_size)
        renderer = Renderer(tokenizer)
        args = {"prompt": work.prompt, "turns": work.turns, "observation": work.observation}
        spec = {"name": env, "args": args}
        weight = next(model.parameters())
        self.config = config = RunConfig.model_validate(
            {
                "model": {
                    "architecture": "qwen3",
                    "tokenizer": "words",
                    "context_length": work.length + 1,
                    "device": weight.device.type,
                    "dtype": str(weight.dtype).removeprefix("torch."),
                },
                "env": spec,
                "tasks": {"train": "env"},
                "rollout": {
                    "max_tokens_per_turn": work.turn,
                    "concurrency": work.samples,
                    "episode_deadline_s": 3600,
                    "step_deadline_s": 3600,
                    **(rollout or {}),
                },
                **settings,
            }
        )
        self.work, self.kept, self.number = work, Kept(), 0
        self.clock, self.rollout_s = clock, 0.0
        self.backend = LocalBackend(lambda: model, renderer, config, folder)
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(False)  # the peer need not pay for it
        self.collector = Collector(
            FixedSampler(self.backend.sampler),
            TaskRenderers(renderer),
            config.rollout,
            Spec(**spec),
        )

        async def play(tasks: Sequence[Task], step: int, *, first_group: int) -> list[Group]:
            start = self.clock()
            groups = await self.collector.collect(tasks, step, work.group_size, first_group)
            self.rollout_s = self.clock() - start
            return groups

        self.tasks = TaskSampler([Task(id=f"task {number}") for number in range(1024)])
        self.stage = Stage(
            TrainSettings("rl", 10_000, OptimizerConfig(lr=1e-6), tokens_per_batch),
            groups_per_step=work.groups,
            source=SyncSource(self.tasks, play),
            algorithm=ALGORITHMS.build(config.rl.algorithm if config.rl else Spec(name="grpo")),
        )
        self.backend.begin_stage(self.stage.settings, self.stage.algorithm)

    def stage_of(self, steps: int) -> Stage:
        """The stage with another number of steps. With `rl.max_staleness`, it plays ahead."""
        settings = replace(self.stage.settings, steps=steps)
        stage, rl = replace(self.stage, settings=settings), self.config.rl
        if rl and rl.max_staleness:
            stage.source = PrefetchSource(
                lambda _: self.collector,
                self.tasks,
                steps=steps,
                groups_per_step=self.work.groups,
                group_size=self.work.group_size,
                max_staleness=rl.max_staleness,
            )
        return stage

    def run(self, stage: Stage, recorder: Recorder, start: int = 0, loop: Any = None) -> None:
        """Run the stage's steps from `start` on, in an event loop that `loop` makes."""
        torch.use_deterministic_algorithms(self.deterministic)
        try:
            with asyncio.Runner(loop_factory=loop) as runner:
                runner.run(run_stage(stage, self.backend, recorder, start))
        finally:
            torch.use_deterministic_algorithms(False)

    def step(self) -> dict[str, float]:
        """The metrics of one more step. Errors: SystemExit where it did not do the work."""
        self.run(self.stage_of(self.number + 1), self.kept, self.number)
        self.number += 1
        metrics = self.kept.metrics[-1]
        found = metrics["rollout/sampled_tokens"], metrics["rollout/tokens"]
        expected = self.work.sampled_tokens, self.work.samples * self.work.length
        # A turn whose last token happens to be the one that ends turns is followed by one less.
        off = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
        if off > 0.005 or metrics["rollout/excluded"]:
            raise SystemExit(f"sampled tokens and all tokens are {found}, not {expected}")
        return metrics
