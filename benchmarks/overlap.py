"""Playing ahead against taking turns: seconds a step, with environments that take their time.

    python benchmarks/overlap.py [--threads 1] [--repeats 5] [--quick]

A policy of 0.9 M parameters plays 8 groups of 8 episodes of three turns of 32 tokens; each step of
the environment waits as long as a draw of a log-normal distribution with a median of 50 ms and a
99th percentile of 5 s (it sleeps, and takes no processor). `ahead n` is `rl.max_staleness: n`.

On one thread the clock is that of `quiet`: the processor's time, and the time in which there is
nothing to do but wait. On several it is the wall's. The first step is not counted; nor, in programs
that play ahead, those that fill the queue, and those that empty it: they wait for all of their
episodes, as a step does that plays its own.
"""

from __future__ import annotations

import common  # isort: skip  (sets the environment before torch loads)

import asyncio
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from common import Spread, arguments, machine, make_model, ratios, write
from fixed import FixedEnv, FixedSampler, Work, make_tokenizer
from quiet import QuietLoop

from ludus.backends.local import LocalBackend
from ludus.config.schema import OptimizerConfig, RunConfig
from ludus.core.types import Group, Message, StepResult, Task
from ludus.loop.loop import Stage, run_stage
from ludus.models.chat.renderer import Renderer
from ludus.rollout.collect import Collector
from ludus.rollout.prefetch import PrefetchSource
from ludus.rollout.source import GroupSource, SyncSource
from ludus.tasks.curriculum import TaskSampler
from ludus.train import ALGORITHMS
from ludus.train.minibatches import TrainSettings

MEDIAN_S, P99_S = 0.05, 5.0
SIGMA = math.log(P99_S / MEDIAN_S) / 2.3263  # the standard normal's 99th percentile
WORK = Work(prompt=64, turn=32, turns=3)
PROGRAMS = {
    "sync, no latency": (False, 0),
    "ahead 4, no latency": (False, 4),
    "sync": (True, 0),
    "ahead 2": (True, 2),
    "ahead 4": (True, 4),
    "ahead 8": (True, 8),
}


class Slow(FixedEnv):
    """Each step waits."""

    def __init__(self, latency: bool, **args: Any) -> None:
        super().__init__(**args)
        self.latency = latency

    async def step(self, action: Message) -> StepResult:
        if self.latency:
            await asyncio.sleep(self.random.lognormvariate(math.log(MEDIAN_S), SIGMA))
        return await super().step(action)


@dataclass
class Kept:
    """The metrics of each step, and when it was recorded."""

    clock: Callable[[], float]
    steps: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    def record(
        self, stage: str, step: int, groups: Sequence[Group], metrics: dict[str, float]
    ) -> None:
        self.steps.append((self.clock(), metrics))


def config_of(latency: bool, bound: int, threads: int) -> RunConfig:
    args = {"prompt": WORK.prompt, "turns": WORK.turns, "observation": WORK.observation}
    return RunConfig.model_validate(
        {
            "model": {
                "architecture": "qwen3",
                "tokenizer": "words",
                "context_length": WORK.length + 1,
            },
            "env": {"name": "overlap:Slow", "args": {"latency": latency, **args}},
            "tasks": {"train": "env"},
            "rollout": {
                "max_tokens_per_turn": WORK.turn,
                "concurrency": WORK.samples * (bound + 1),
                "deterministic": False,
                "step_deadline_s": 3600,
                "episode_deadline_s": 3600,
            },
            "rl": {
                "max_staleness": bound,
                "groups_per_step": WORK.groups,
                "group_size": WORK.group_size,
                "algorithm": {"name": "grpo", "args": {"importance_cap": 2.0}},
            },
            "threads": threads,
        }
    )


async def train(config: RunConfig, folder: Path, steps: int, clock: Callable[[], float]) -> Kept:
    """A stage of so many steps."""
    loop, rl = asyncio.get_running_loop(), config.rl
    assert rl is not None
    model = make_model("0.9 M")
    tokenizer = make_tokenizer(model.config.vocab_size)
    renderer = Renderer(tokenizer)
    backend = LocalBackend(model, renderer, config, folder)
    if isinstance(loop, QuietLoop):
        for name in ("score", "train"):
            setattr(backend, name, loop.counted(getattr(backend, name)))
    collector = Collector(FixedSampler(backend.sampler), renderer, config.rollout, config.env)
    tasks = TaskSampler([Task(id=f"task {number}") for number in range(1024)])

    async def play(tasks: Sequence[Task], step: int, first: int) -> list[Group]:
        return await collector.collect(tasks, step, rl.group_size, first)

    source: GroupSource = SyncSource(tasks, play)
    if rl.max_staleness:
        source = PrefetchSource(
            lambda step: collector,
            tasks,
            steps=steps,
            groups_per_step=rl.groups_per_step,
            group_size=rl.group_size,
            max_staleness=rl.max_staleness,
        )
    settings = TrainSettings("rl", steps, OptimizerConfig(lr=1e-6), tokens_per_batch=8192)
    stage = Stage(settings, rl.groups_per_step, source, ALGORITHMS.build(rl.algorithm))
    backend.begin_stage(stage.settings, stage.algorithm)
    kept = Kept(clock)
    try:
        await run_stage(stage, backend, kept)
    finally:
        backend.close()
    return kept


def run(latency: bool, bound: int, num_counted: int, threads: int) -> dict[str, float]:
    """Means over the steps that are counted."""
    fill, drain = (bound + 2, bound + 1) if bound else (1, 0)
    steps = fill + num_counted + drain
    random.seed(0)
    loop = QuietLoop() if threads == 1 else asyncio.SelectorEventLoop()
    clock = loop.time if threads == 1 else time.perf_counter
    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner(loop_factory=lambda: loop) as runner,
    ):
        kept = runner.run(train(config_of(latency, bound, threads), Path(folder), steps, clock))
    counted = [metrics for _, metrics in kept.steps[fill : fill + num_counted]]
    seconds = kept.steps[fill + num_counted - 1][0] - kept.steps[fill - 1][0]
    episodes = sum(m["rollout/episodes"] for m in counted)
    trained = episodes - sum(m["rollout/excluded"] for m in counted)
    return {
        "seconds": seconds / num_counted,
        "seconds_per_64_trained": seconds * WORK.samples / trained,
        "cut": sum(m.get("rollout/cut", 0.0) for m in counted) / episodes,
        "staleness_mean": mean(m.get("rollout/staleness_mean", 0.0) for m in counted),
        "staleness_max": max(m.get("rollout/staleness_max", 0.0) for m in counted),
        "tokens": mean(m["train/tokens"] for m in counted),
    }


def main() -> None:
    args = arguments(__doc__ or "")
    facts: dict[str, Any] = machine(args.threads)
    if args.threads > 1:
        facts["clock"] = "wall"
    num_counted = 3 if args.quick else 12
    repeats = 1 if args.quick else args.repeats
    found: dict[str, list[dict[str, float]]] = {name: [] for name in PROGRAMS}
    for number in range(repeats):
        for name in list(PROGRAMS)[:: -1 if number % 2 else 1]:
            latency, bound = PROGRAMS[name]
            found[name].append(run(latency, bound, num_counted, args.threads))
            shown = {key: round(value, 3) for key, value in found[name][-1].items()}
            print(f"{name}: {shown}", flush=True)
    if args.quick:
        return
    rows: list[dict[str, Any]] = [
        {"program": name, **{key: [result[key] for result in results] for key in results[0]}}
        for name, results in found.items()
    ]
    facts |= {"repeats": repeats, "load_after": machine(args.threads)["load"]}
    write("overlap", page(rows), facts, rows)


def page(rows: list[dict[str, Any]]) -> str:
    base = rows[0]["seconds"]
    lines = []
    for row in rows:
        against = ratios(row["seconds"], base)
        trained = ratios(row["seconds_per_64_trained"], base)
        lines.append(
            [
                row["program"],
                Spread.of(row["seconds"]).show(".2f"),
                against.show(".2f"),
                trained.show(".2f"),
                Spread.of(row["cut"]).show(".1%"),
                Spread.of(row["staleness_mean"]).show(".1f"),
                f"{max(row['staleness_max']):.0f}",
            ]
        )
    head = ["program", "s a step", "against no latency", "an episode trained", "episodes cut"]
    told = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2]
    table = common.table([*head, "staleness mean", "most"], lines)
    return f"# Playing ahead\n\n{table}\n\n{told}"


if __name__ == "__main__":
    sys.modules["overlap"] = sys.modules["__main__"]
    main()
