"""Seconds of a GRPO step by number of groups, group size, turns, prompt length and concurrency.

One setting grows at a time; the others stay fixed. The policy (0.9 M parameters, from scratch) has
learned to answer every observation with seven words, so every episode has the configured number of
turns. The environment answers at once, or after a log-normal delay with a median of 50 ms and 1 %
above 5 s. The fitted exponent is the slope of log seconds over log size: 1 is linear.
"""

from __future__ import annotations

import common  # isort: skip  (sets the environment before torch loads)

import asyncio
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fixed import FRAME, FixedEnv, Kept, latency

from ludus.backends.local import LocalBackend
from ludus.config.schema import OptimizerConfig, RunConfig
from ludus.core.types import Group, Message, Spec, StepResult, Task, Trajectory
from ludus.loop.loop import Stage, run_stage
from ludus.models.build import build_model
from ludus.models.chat.by_task import TaskRenderers
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.rollout.collect import Collector
from ludus.rollout.replay import ReplaySource, replay
from ludus.rollout.source import GroupSource, SyncSource
from ludus.tasks.curriculum import TaskSampler
from ludus.telemetry.occupancy import PARTS
from ludus.train import ALGORITHMS
from ludus.train.batches.minibatches import TrainSettings

WORDS = ("red", "green", "blue", "key", "door", "box", "ball", "left", "right", "open")
ANSWER = "go to the red door and open"
CONTEXT = 1024
BASE = {"groups": 8, "group_size": 8, "turns": 4, "prompt": 64, "concurrency": 64}
SIZES = {
    "groups": (2, 4, 8, 16),
    "group_size": (2, 4, 8, 16),
    "turns": (1, 2, 4, 8),
    "prompt": (32, 64, 128, 256),
    "concurrency": (8, 16, 32, 64),
}


class Talker(FixedEnv):
    """Says random words of WORDS; the reward is a coin's."""

    def __init__(self, turns: int = 4, prompt: int = 64, latency: bool = False) -> None:
        super().__init__(prompt + FRAME, turns, observation=8 + FRAME + 1)
        self.latency = latency

    async def step(self, action: Message) -> StepResult:
        if self.latency:
            await asyncio.sleep(latency(self.random))
        return await super().step(action)

    def say(self, rng: random.Random, count: int) -> str:
        return " ".join(rng.choices(WORDS, k=count))

    def reward(self) -> float:
        return float(self.random.random() < 0.5)


class Bench:
    """A policy that answers with seven words, and steps of GRPO on it."""

    def __init__(self, folder: Path) -> None:
        tokenizer = train_tokenizer(Spec(name="words"), [*WORDS, ANSWER])
        self.renderer = Renderer(tokenizer)
        self.config = RunConfig.model_validate(
            {
                "model": {"architecture": "qwen3", "tokenizer": "words", "context_length": CONTEXT},
                "env": "growth:Talker",
                "tasks": {"train": "env"},
                "rollout": {"max_tokens_per_turn": 24, "episode_deadline_s": 3600,
                            "step_deadline_s": 3600},
            }
        )  # fmt: skip
        model = build_model(self.config.model, tokenizer, 0)
        self.backend = LocalBackend(lambda: model, self.renderer, self.config, folder)
        asyncio.run(self._teach())

    async def _teach(self) -> None:
        played, tasks = [], []
        for number in range(64):
            words = random.Random(number)
            messages = []
            for size in (words.choice((32, 64, 128)), *[8] * 7):
                seen = " ".join(words.choices(WORDS, k=size))
                messages += [Message(role="user", content=seen)]
                messages += [Message(role="assistant", content=ANSWER)]
            played.append(replay(messages, self.renderer, Trajectory("", "", str(number))))
            tasks.append(Task(id=str(number)))
        source = ReplaySource(TaskSampler(tasks), played)
        await run_stage(self._stage("sft", source, 40, 0.003, 8), self.backend, Kept())

    def _stage(self, name: str, source: GroupSource, steps: int, lr: float, groups: int) -> Stage:
        stage = Stage(
            TrainSettings(name, steps, OptimizerConfig(lr=lr), tokens_per_batch=8192),
            groups_per_step=groups,
            source=source,
            algorithm=ALGORITHMS.build("sft" if name == "sft" else "grpo"),
        )
        self.backend.begin_stage(stage.settings, stage.algorithm)
        return stage

    def steps(
        self, count: int, *, latency: bool = False, deterministic: bool = True, **sizes: int
    ) -> list[dict[str, float]]:
        """The metrics of so many steps, after one that is not counted. The policy stays: its
        learning rate is tiny."""
        at = BASE | sizes
        args = {"turns": at["turns"], "prompt": at["prompt"], "latency": latency}
        self.backend.sampler.deterministic = deterministic  # type: ignore[attr-defined]
        settings = {"concurrency": at["concurrency"], "deterministic": deterministic}
        collector = Collector(
            self.backend.sampler,
            TaskRenderers(self.renderer),
            self.config.rollout.model_copy(update=settings),
            Spec(name="growth:Talker", args=args),
        )

        async def play(tasks: Sequence[Task], step: int, *, first_group: int) -> list[Group]:
            return await collector.collect(tasks, step, at["group_size"], first_group)

        tasks = [Task(id=f"task {i}") for i in range(1024)]
        source = SyncSource(TaskSampler(tasks), play)
        stage = self._stage("rl", source, count + 1, 1e-9, at["groups"])
        stage.settings = replace(stage.settings, seed=sum(at.values()))
        kept = Kept()
        asyncio.run(run_stage(stage, self.backend, kept))
        return kept.metrics[1:]


def exponent(grown: Sequence[dict[str, Any]]) -> float:
    """Slope of log seconds over log size, by least squares."""
    return statistics.linear_regression(
        [math.log(row["size"]) for row in grown], [math.log(row["seconds"].median) for row in grown]
    ).slope


def share(metrics: Sequence[dict[str, float]], part: str) -> float:
    return sum(m[f"time/{part}_s"] for m in metrics) / sum(m["time/wall_s"] for m in metrics)


def plot(rows: list[dict[str, Any]]) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "growth"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name, sizes in SIZES.items():
        found = [row for row in rows if row["grows"] == name]
        if found:
            relative = [size / sizes[0] for size in sizes]
            medians = [row["seconds"].median / found[0]["seconds"].median for row in found]
            axes.plot(
                relative, medians, marker="o", label=f"{name}: exponent {exponent(found):.2f}"
            )
    axes.plot([1, 8], [1, 8], color="grey", linestyle=":", label="linear")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="times the smallest size", ylabel="times its seconds a step")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(common.RESULTS / "growth.svg", metadata={"Date": None})


def main() -> None:
    args = common.arguments(__doc__ or "")
    facts = common.machine(args.threads)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        sizes = {"turns": (1, 2)} if args.quick else SIZES
        for name, values in sizes.items():
            for value in values:
                metrics = bench.steps(args.repeats, **{name: value})
                seconds = common.Spread.of([m["time/wall_s"] for m in metrics])
                turns = statistics.mean(m["rollout/turns"] for m in metrics)
                parts = {part: share(metrics, part) for part in PARTS}
                tokens = statistics.mean(m.get("train/unique_tokens", 0.0) for m in metrics)
                rows.append({"grows": name, "size": value, "seconds": seconds, "turns": turns,
                             "tokens": tokens, **parts})  # fmt: skip
                print(name, value, seconds.show(".3f"), f"{parts['env_wait']:.1%}", flush=True)
        waits = {}
        for latency in () if args.quick else (False, True):
            metrics = bench.steps(2 if latency else args.repeats, latency=latency,
                                  deterministic=False)  # fmt: skip
            waits[latency] = common.Spread.of([m["time/wall_s"] for m in metrics] * 2)
            rows.append({"grows": "latency", "size": int(latency), "seconds": waits[latency],
                         **{part: share(metrics, part) for part in PARTS}})  # fmt: skip
            print("latency", latency, waits[latency].show(".2f"), flush=True)
    if not args.quick:
        publish(rows, waits, facts)


def publish(rows: list[dict[str, Any]], waits: dict[bool, common.Spread], facts: Any) -> None:
    def each(cell: Callable[[dict[str, Any]], str]) -> Callable[[list[dict[str, Any]]], str]:
        return lambda grown: ", ".join(map(cell, grown))

    def share_of(part: str) -> Callable[[list[dict[str, Any]]], str]:
        return each(lambda row: f"{row[part]:.1%}")

    table = common.tabulate(
        [[row for row in rows if row["grows"] == name] for name in SIZES],
        ("grows", lambda grown: grown[0]["grows"]),
        ("sizes", each(lambda row: str(row["size"]))),
        ("seconds per step", each(lambda row: f"{row['seconds'].median:.2f}")),
        ("exponent", lambda grown: f"{exponent(grown):.2f}"),
        ("computed tokens", each(lambda row: f"{row['tokens']:.0f}")),
        ("µs per token", each(lambda row: f"{1e6 * row['seconds'].median / row['tokens']:.0f}")),
        ("environment", share_of("env_wait")),
        ("sampling", share_of("sample")),
        ("training", share_of("train")),
        ("idle", share_of("idle")),
    )
    ratio = waits[True].median / waits[False].median
    text = f"""
# Growth

{(__doc__ or "").strip()}

    python benchmarks/growth.py

![growth](growth.svg)

{table}

The fixed values are {", ".join(f"{name} {size}" for name, size in BASE.items())}. All figures are
medians; the shares are of a step's wall time (see [profiling](../profiling.md)). Tokens are those
that training computes, with shared prefixes counted once. They grow faster than turns, because an
episode of one turn has no reply from the environment, and the prompt is shared.

With latency and `rollout.deterministic: false`, a step of {BASE["groups"] * BASE["group_size"]}
episodes of {BASE["turns"]} turns takes {waits[True].median:.2f} s. Without latency it takes
{waits[False].median:.2f} s. The ratio is {ratio:.1f}.
A synchronous step waits for its slowest episode.
"""
    # The parts of a step are of the wall's time.
    common.write("growth", text, facts | {"clock": "wall"}, rows)
    plot(rows)


if __name__ == "__main__":
    sys.modules["growth"] = sys.modules["__main__"]
    main()
