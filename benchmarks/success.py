"""Seconds of training until 80 % success on BabyAI: ludus against TRL's `GRPOTrainer`.

    python benchmarks/success.py [--seeds 0 1 2] [--programs ludus ...] [--folder DIR] [--quick]

A policy of 0.8 M parameters is trained by SFT once per seed, on three levels of BabyAI. From
these weights, each program trains with GRPO on the same tasks in the same order, with 16 groups of
8 episodes per step. It stops when the policy solves 80 % of 256 held-out tasks; ludus plays these
tasks greedily every five steps. Seconds are processor time of training, on one thread.

Finished runs are kept in DIR and not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from common import machine

import torch  # isort: skip - after common, which sets the threads' policy
from fixed import Kept

from ludus.config.load import load_config
from ludus.config.schema import EvaluateConfig, RunConfig
from ludus.core.types import Group, Task
from ludus.data.splits import read_splits
from ludus.loop.loop import Stage, run_stage
from ludus.pipeline.build import Run, build
from ludus.pipeline.evaluation.evaluate import evaluate
from ludus.pipeline.launch import train
from ludus.pipeline.monitoring.progress import Display
from ludus.rollout.source import SyncSource
from ludus.store.folders import RunFolder
from ludus.tasks.curriculum import TaskSampler
from ludus.train import ALGORITHMS
from ludus.train.batches.minibatches import TrainSettings
from ludus.train.checkpoint.policy import find_checkpoint, run_tokenizer

RECIPE = Path(__file__).parents[1] / "recipes" / "babyai-tiny.yaml"
PROGRAMS = ("ludus", "rollout", "environment")
"""The last two are TRL with a `rollout_func`, and with its `environment_factory`."""
TARGET, BOUND_S = 0.8, 480.0
"""Held-out success that ends a run, and seconds of training after which it is given up."""
MICRO_BATCHES = (128, 64, 32, 16)
"""Samples of one forward pass that TRL is tried with."""
LEVELS = ["GoToObjS6", "GoToObj", "GoToRedBallNoDists"]
"""Of the measured runs, as the settings of tasks, demonstrations and SFT below: those of the recipe
before it had rooms with two objects."""
FULL = {
    "tasks.train.args.tiers": LEVELS,
    "tasks.train.args.num_tasks": 4000,
    "tasks.heldout.args.tiers": LEVELS,
    "demonstrations.num_episodes": 20,
    "sft.steps": 40,
    "rl.algorithm": "grpo",
    "rl.steps": 150,
    "rl.groups_per_step": 16,
    "rl.optimizer.lr": 3e-4,
    "rl.optimizer.warmup_steps": 10,
    "rl.optimizer.schedule": "constant",
    "rollout.concurrency": 128,
    "evaluate.every": 5,
    "evaluate.num_tasks": 256,
    "threads": 1,
}
QUICK = FULL | {
    "rl.steps": 2,
    "rl.groups_per_step": 2,
    "rl.group_size": 2,
    "evaluate.every": 1,
    "evaluate.num_tasks": 4,
    "demonstrations.num_episodes": 4,
    "sft.steps": 2,
}


class Course:
    """A program's curve: what it had won, and when.

    Args:
        run: plays the held-out tasks, with its own model.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.points: list[dict[str, float]] = []
        self.steps: list[dict[str, float]] = []

    async def evaluate(self) -> float:
        """Add a point: held-out success after the steps so far."""
        settings = EvaluateConfig(num_tasks=self.run.config.evaluate.num_tasks)
        step = len(self.steps)
        _, result = await evaluate(self.run, settings, "course", step)
        success, seconds = result.success.value, self.steps[-1]["seconds"] if step else 0.0
        self.points.append({"step": step, "seconds": seconds, "success": success})
        # TRL's own lines are kept from the terminal; this one is not.
        print(f"  step {step}, {seconds:.1f} s: {success:.1%}", file=sys.__stdout__, flush=True)
        return success

    def add(self, seconds: float, figures: dict[str, float]) -> bool:
        """Note a step, done `seconds` after the beginning; whether to evaluate now."""
        self.steps.append({"seconds": seconds, **figures})
        return self.over() or len(self.steps) % self.run.config.evaluate.every == 0

    def over(self) -> bool:
        """True if the steps or the seconds are used up, or the target was reached."""
        assert self.run.config.rl is not None
        last = self.steps[-1]["seconds"]
        reached = self.points[-1]["success"] >= TARGET and self.points[-1]["seconds"] == last
        return reached or last >= BOUND_S or len(self.steps) == self.run.config.rl.steps


def config_of(seed: int, quick: bool, **more: Any) -> RunConfig:
    settings = {**(QUICK if quick else FULL), "seed": seed, **more}
    return load_config(RECIPE, [f"{key}={json.dumps(value)}" for key, value in settings.items()])


def start_of(seed: int, folder: Path, quick: bool) -> RunFolder:
    """The run that ends with the weights which all programs of a seed begin with."""
    run = RunFolder(folder / f"start-{seed}-1")
    if not run.report.exists():
        config = config_of(seed, quick, name=f"start-{seed}", runs_dir=str(folder))
        run = train(config.model_copy(update={"rl": None}), Display())
    return run


def opened(seed: int, folder: Path, quick: bool) -> tuple[Run, Sequence[Task]]:
    """The start, loaded, and the tasks that are trained on."""
    start, config = start_of(seed, folder, quick), config_of(seed, quick)
    splits = read_splits(config)
    run = build(config, start, splits, run_tokenizer(start))
    run.backend.load_weights(find_checkpoint(start).path)
    return run, splits.train


async def train_ludus(run: Run, tasks: Sequence[Task], course: Course) -> None:
    config, kept = run.config, Kept()
    rl = config.rl
    assert rl is not None
    rollout_s = evaluated_s = 0.0

    async def play(tasks: Sequence[Task], step: int, *, first_group: int) -> list[Group]:
        nonlocal rollout_s
        start = time.process_time()
        groups = await run.collector.collect(tasks, step, rl.group_size, first_group)
        rollout_s += time.process_time() - start
        return groups

    async def after_step(step: int) -> bool:
        nonlocal evaluated_s
        stopped = time.process_time()
        names = ("sampled_tokens", "tokens", "reward")
        figures = {name: kept.metrics[-1][f"rollout/{name}"] for name in names}
        figures["rollout_s"] = rollout_s
        if course.add(stopped - began - evaluated_s, figures):
            await course.evaluate()
        evaluated_s += time.process_time() - stopped
        return not course.over()

    stage = Stage(
        TrainSettings(
            "rl",
            rl.steps,
            rl.optimizer,
            rl.tokens_per_batch,
            temperature=config.rollout.temperature,
            seed=config.seed,
        ),
        groups_per_step=rl.groups_per_step,
        source=SyncSource(TaskSampler(tasks, shuffle=False), play),
        algorithm=ALGORITHMS.build(rl.algorithm),
        after_step=after_step,
    )
    await course.evaluate()
    began = time.process_time()
    run.backend.begin_stage(stage.settings, stage.algorithm)
    await run_stage(stage, run.backend, kept)


def train_trl(mode: str, run: Run, tasks: Sequence[Task], course: Course, folder: Path) -> int:
    """Returns the micro-batch that was used."""
    import success_trl

    torch.use_deterministic_algorithms(False)  # it need not pay for what ludus's back end asks
    asyncio.run(course.evaluate())
    with tempfile.TemporaryDirectory() as weights:
        run.backend.model.save_pretrained(weights)
        go = partial(success_trl.train, mode, run.config, run.tokenizer, weights, tasks)
        micro_batch = _tuned(go, folder / f"tuned-{mode}.json", run.config)

        def after_step(model: Any, seconds: float, figures: dict[str, float]) -> bool:
            if course.add(seconds, figures):
                run.backend.model.load_state_dict(model.state_dict())
                run.backend.sampler.publish(len(course.steps))
                asyncio.run(course.evaluate())
            return not course.over()

        assert run.config.rl is not None
        go(micro_batch, run.config.rl.steps, after_step)
    return micro_batch


def _tuned(go: Any, path: Path, config: RunConfig) -> int:
    """The micro-batch with which the second of two steps is fastest; tried once for all seeds."""
    if not path.exists():
        assert config.rl is not None
        samples = config.rl.groups_per_step * config.rl.group_size
        tried: dict[int, float] = {}
        for size in (size for size in MICRO_BATCHES if samples % size == 0):
            seconds: list[float] = []

            def after_step(_: Any, now: float, __: Any, seconds: list[float] = seconds) -> bool:
                seconds.append(now)
                return True

            go(size, 2, after_step)
            tried[size] = seconds[1] - seconds[0]
        path.write_text(json.dumps(tried or {samples: 0.0}))
    tried = {int(size): s for size, s in json.loads(path.read_text()).items()}
    return min(tried, key=lambda size: tried[size])


def measure(program: str, seed: int, folder: Path, quick: bool) -> None:
    """Run a program, and write what it did."""
    torch.set_num_threads(1)
    run, tasks = opened(seed, folder, quick)
    course, micro_batch = Course(run), None
    if program == "ludus":
        asyncio.run(train_ludus(run, tasks, course))
    else:
        micro_batch = train_trl(program, run, tasks, course, folder)
    run.backend.close()
    told = {"program": program, "seed": seed, "micro_batch": micro_batch}
    told |= {"points": course.points, "steps": course.steps}
    (folder / f"{program}-{seed}.json").write_text(json.dumps(told))


def run_all(seeds: Sequence[int], programs: Sequence[str], folder: Path, quick: bool) -> None:
    """Run the programs without results yet, each in its own process."""
    for seed in seeds:
        for program in programs:
            if (folder / f"{program}-{seed}.json").exists():
                continue
            print(f"{program}, seed {seed}", flush=True)
            work = (program, seed, folder, quick)
            child = multiprocessing.get_context("spawn").Process(target=measure, args=work)
            child.start()
            child.join()
            if child.exitcode:
                raise SystemExit(f"{program}, seed {seed}: ended with {child.exitcode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=["ludus", "rollout"])
    parser.add_argument("--folder", type=Path, help="a new one where there is none")
    parser.add_argument("--note", default="", help="remarks on these runs, for the page")
    parser.add_argument("--quick", action="store_true", help="toy size, nothing published")
    args = parser.parse_args()
    facts = machine(1)
    with tempfile.TemporaryDirectory() as new:
        folder = (args.folder or Path(new)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        run_all(args.seeds, args.programs, folder, args.quick)
        results = [
            json.loads((folder / f"{program}-{seed}.json").read_text())
            for seed in args.seeds
            for program in args.programs
        ]
    if not args.quick:
        from success_page import publish

        about = (__doc__ or "").split("\n\n")[2]
        publish(results, facts, about, TARGET, BOUND_S, args.note)


if __name__ == "__main__":
    main()
