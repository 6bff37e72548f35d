"""Playing ahead against taking turns: seconds a step, with environments that take their time.

    python benchmarks/overlap.py [--threads 2] [--repeats 5] [--quick]

A policy of 0.9 M parameters plays episodes of three turns; each step of the environment waits as
long as a draw of a log-normal distribution with a median of 50 ms and a 99th percentile of 5 s (it
sleeps, and takes no processor). Programs run in turn:

    sync, no latency        `rl.max_staleness: 0`, the environment answers at once
    ahead 4, no latency     `rl.max_staleness: 4`
    sync                    with latency, as are the rest
    ahead 2, ahead 4

A program's figure is the wall time of a step. The first is not counted; nor, in those that play
ahead, the first five, which fill the queue, and the last four, which empty it: they wait for all of
their episodes, as a step does that plays its own.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import asyncio
import math
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Spread, arguments, machine, ratios, write

from ludus.backends.local import LocalBackend
from ludus.core.schema import OptimizerConfig, RunConfig
from ludus.core.types import Group, Message, Observation, Spec, StepResult, Task
from ludus.envs.base import Env
from ludus.loop import Stage, run_stage
from ludus.models.build import build_model
from ludus.models.renderer import Renderer
from ludus.models.tokenizers import train_tokenizer
from ludus.rollout.collect import Collector
from ludus.rollout.prefetch import Prefetch
from ludus.tasks.sampler import TaskSampler
from ludus.train import ALGORITHMS

MEDIAN_S, P99_S = 0.05, 5.0
SIGMA = math.log(P99_S / MEDIAN_S) / 2.3263  # the standard normal's 99th percentile
WORDS = [f"word{i}" for i in range(400)]
GROUP_SIZE, GROUPS, TURNS, TURN_TOKENS = 8, 8, 3, 32


class Slow(Env):
    """Rewards at random. Each step waits."""

    max_turns = TURNS
    blocking = False

    def __init__(self, latency: bool) -> None:
        self.latency = latency

    async def reset(self, task: Task) -> Observation:
        return Observation(messages=[Message(role="user", content=" ".join(WORDS[:64]))])

    async def step(self, action: Message) -> StepResult:
        if self.latency:
            await asyncio.sleep(random.lognormvariate(math.log(MEDIAN_S), SIGMA))
        reply = [Message(role="user", content=" ".join(WORDS[64:80]))]
        return StepResult(messages=reply, reward=random.random())


class Kept:
    """The metrics of each step, and when it was recorded."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, dict[str, float]]] = []

    def record(
        self, stage: str, step: int, groups: Sequence[Group], metrics: dict[str, float]
    ) -> None:
        self.steps.append((time.perf_counter(), metrics))


TOLD = """\
Each step of the environment waits as long as a draw of a log-normal distribution with a median of
50 ms and a 99th percentile of 5 s. A policy of 0.9 M parameters, 8 groups of 8 episodes of 3 turns
a step. `ahead n` is `rl.max_staleness: n`.
"""


def config_of(latency: bool, bound: int, threads: int) -> RunConfig:
    shape = {"hidden_size": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
    shape |= {"head_dim": 32, "intermediate_size": 384}
    return RunConfig.model_validate(
        {
            "model": {
                "architecture": {"name": "qwen3", "args": shape},
                "tokenizer": "words",
                "context_length": 256,
            },
            "env": {"name": "overlap:Slow", "args": {"latency": latency}},
            "tasks": {"train": "env"},
            "rollout": {
                "max_tokens_per_turn": TURN_TOKENS,
                "concurrency": GROUPS * GROUP_SIZE * (bound + 1),
                "deterministic": False,
                "step_deadline_s": 300,
            },
            "rl": {
                "max_staleness": bound,
                "groups_per_step": GROUPS,
                "group_size": GROUP_SIZE,
                "algorithm": {"name": "grpo", "args": {"importance_cap": 2.0}},
            },
            "threads": threads,
        }
    )


def run(latency: bool, bound: int, counted_steps: int, threads: int) -> dict[str, float]:
    """Means over the steps that are counted."""
    fill, drain = (FILL, DRAIN) if bound else (1, 0)
    steps = fill + counted_steps + drain
    config = config_of(latency, bound, threads)
    tokenizer = train_tokenizer(Spec(name="words"), WORDS)
    renderer = Renderer(tokenizer)
    model = build_model(config.model, tokenizer, 0)
    kept = Kept()
    with tempfile.TemporaryDirectory() as folder:
        backend = LocalBackend(model, renderer, config, Path(folder))
        collector = Collector(backend.sampler, renderer, config.rollout, config.env)
        tasks = TaskSampler([Task(id=f"{i}") for i in range(64)])
        assert config.rl is not None

        async def collect(tasks: Sequence[Task], step: int, first: int) -> list[Group]:
            return await collector.collect(tasks, step, GROUP_SIZE, first)

        ahead = None
        if bound:
            ahead = Prefetch(
                lambda step: collector,
                tasks,
                steps=steps,
                groups_per_step=GROUPS,
                group_size=GROUP_SIZE,
                max_staleness=bound,
            )
        stage = Stage(
            name="rl",
            steps=steps,
            tasks=tasks,
            groups_per_step=GROUPS,
            collect=collect,
            algorithm=ALGORITHMS.build(config.rl.algorithm),
            optimizer=OptimizerConfig(lr=1e-5),
            tokens_per_batch=8192,
            pad_id=tokenizer.pad_token_id,
            ahead=ahead,
        )
        backend.begin_stage(stage.optimizer, stage.optimizer_steps, 1.0, stage.algorithm)
        asyncio.run(run_stage(stage, backend, kept))
        backend.close()
    counted = [metrics for _, metrics in kept.steps[fill : fill + counted_steps]]
    ended, began = kept.steps[fill + counted_steps - 1][0], kept.steps[fill - 1][0]
    seconds = (ended - began) / counted_steps
    episodes = sum(m["rollout/episodes"] for m in counted)

    def mean(name: str) -> float:
        return sum(m.get(name, 0.0) for m in counted) / len(counted)

    return {
        "seconds": seconds,
        "seconds_per_64_episodes": seconds * len(counted) * 64 / episodes,
        "cut": sum(m.get("rollout/cut", 0.0) for m in counted) / episodes,
        "staleness_mean": mean("rollout/staleness_mean"),
        "staleness_max": max(m.get("rollout/staleness_max", 0.0) for m in counted),
        "rollout_s": mean("time/rollout_s"),
        "train_s": mean("time/train_s"),
    }


FILL, DRAIN = 5, 4
"""Steps that fill the queue, and that empty it."""


def main() -> None:
    args = arguments(__doc__ or "")
    facts: dict[str, Any] = machine(args.threads) | {"clock": "wall"}
    counted_steps = 3 if args.quick else 5
    repeats = 1 if args.quick else args.repeats
    programs = {
        "sync, no latency": (False, 0),
        "ahead 4, no latency": (False, 4),
        "sync": (True, 0),
        "ahead 2": (True, 2),
        "ahead 4": (True, 4),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for number in range(repeats):
        for name in list(programs) if number % 2 else list(programs)[::-1]:
            latency, bound = programs[name]
            found[name].append(run(latency, bound, counted_steps, args.threads))
            shown = {key: round(value, 3) for key, value in found[name][-1].items()}
            print(f"{name}: {shown}", flush=True)
    if args.quick:
        return
    base = [result["seconds"] for result in found["sync, no latency"]]
    rows: list[dict[str, Any]] = [
        {"program": name, **{key: [result[key] for result in results] for key in results[0]}}
        for name, results in found.items()
    ]
    lines = [
        "| program | s a step | against no latency | episodes cut | staleness mean | most |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        against = ratios(row["seconds"], base)
        lines.append(
            f"| {row['program']} | {Spread.of(row['seconds']).show('.2f')} | "
            f"{against.show('.2f')} | {Spread.of(row['cut']).show('.1%')} | "
            f"{Spread.of(row['staleness_mean']).show('.1f')} | {max(row['staleness_max']):.0f} |"
        )
    facts |= {"repeats": repeats}
    facts["load_after"] = machine(args.threads)["load"]
    write("overlap", "\n".join(["# Playing ahead", "", *lines, "", TOLD]), facts, rows)


if __name__ == "__main__":
    main()
