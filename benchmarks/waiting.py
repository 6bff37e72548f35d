"""A step with slow environments, in each program.

The environment answers a turn after a draw of a log-normal distribution with a median of 50 ms and
a 99th percentile of 5 s. It sleeps, without processor time. The n-th step of every program has the
same draws; the program's order assigns them to episodes.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import make_model, tabulate
from fixed import FixedEnv, Kept, LudusSteps, Work, latency
from step_trl import train_trl

from ludus.core.types import Group, Message, StepResult

STALENESS = 4
FILL, DRAIN = 5, 4
"""Steps that fill the queue of what is played ahead, and that empty it. They do not count."""


class Waits:
    """The draws of a step. The first step, which does not count, waits for nothing."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, step: int) -> None:
        self.random, self.step = random.Random(step), step

    def next_step(self) -> None:
        self.begin(self.step + 1)

    async def wait(self) -> None:
        if self.step:
            await asyncio.sleep(latency(self.random))


WAITS = Waits()


class WaitingEnv(FixedEnv):
    """Waits before each reply; the last turn has none."""

    async def step(self, action: Message) -> StepResult:
        result = await super().step(action)
        if not result.terminated:
            await WAITS.wait()
        return result


class Times(Kept):
    """Ends a step's draws when the step is recorded."""

    def record(
        self, stage: str, step: int, groups: Sequence[Group], metrics: dict[str, float]
    ) -> None:
        super().record(stage, step, groups, metrics)
        WAITS.next_step()


def play_ludus(model: str, work: Work, steps: int, max_staleness: int) -> dict[str, Any]:
    fill, drain = (FILL, DRAIN) if max_staleness else (1, 0)
    settings: dict[str, Any] = {"rollout": {"deterministic": False}}
    settings["rollout"]["concurrency"] = work.samples * (max_staleness + 1)
    if max_staleness:
        algorithm = {"name": "grpo", "args": {"importance_cap": 2.0}}
        settings["rl"] = {"max_staleness": max_staleness, "algorithm": algorithm}
    WAITS.begin(1 if max_staleness else 0)
    times = Times()
    with tempfile.TemporaryDirectory() as folder:
        ludus = LudusSteps(
            make_model(model), work, Path(folder), env="waiting:WaitingEnv", **settings
        )
        ludus.run(ludus.stage_of(fill + steps + drain), times)
        ludus.backend.close()
    seconds = [b - a for a, b in pairwise(times.ends[fill - 1 : fill + steps])]
    counted = times.metrics[fill : fill + steps]
    cut = [metrics.get("rollout/cut", 0.0) / metrics["rollout/episodes"] for metrics in counted]
    return {"seconds": seconds, "cut": cut}


def play_trl(model: str, work: Work, steps: int, micro_batch: int, mode: str) -> dict[str, Any]:
    WAITS.begin(0)
    seconds, _ = train_trl(
        model,
        work,
        False,
        micro_batch,
        steps + 1,
        WAITS.next_step,
        time.perf_counter,
        mode=mode,
        wait=WAITS.wait,
    )
    return {"seconds": seconds[1:], "cut": [0.0]}


def compare_waiting(
    model: str, work: Work, micro_batch: int, steps: int, trl_steps: int
) -> list[dict[str, Any]]:
    """Wall seconds a step of each program, one program after the other."""
    ahead = f"ludus, `rl.max_staleness: {STALENESS}`"
    programs = {
        "ludus": lambda: play_ludus(model, work, steps, 0),
        ahead: lambda: play_ludus(model, work, steps, STALENESS),
        "TRL, `rollout_func`": lambda: play_trl(model, work, trl_steps, micro_batch, "rollout"),
        "TRL, `environment_factory`, async tool": lambda: play_trl(
            model, work, trl_steps, micro_batch, "environment"
        ),
    }
    rows = []
    for name, play in programs.items():
        found = play()
        mean = sum(found["seconds"]) / len(found["seconds"])
        rows.append({"program": name, "model": model, "work": work.show(), "mean": mean, **found})
        print(f"waiting: {name}: {mean:.2f} s a step", flush=True)
    return rows


def waiting_table(rows: list[dict[str, Any]]) -> str:
    """The page's table. Seconds are compared with those of the first program."""
    base = rows[0]["seconds"]

    def against(seconds: list[float]) -> float:
        """By the same steps of the first program: they had the same draws."""
        return sum(seconds) / sum(base[: len(seconds)])

    return tabulate(
        rows,
        ("program", lambda row: row["program"]),
        ("steps", lambda row: str(len(row["seconds"]))),
        (
            "s per step: mean (range)",
            lambda row: (
                f"{row['mean']:.2f} ({min(row['seconds']):.2f} to {max(row['seconds']):.2f})"
            ),
        ),
        ("ratio to ludus", lambda row: f"{against(row['seconds']):.2f}"),
        ("episodes cut", lambda row: f"{sum(row['cut']) / len(row['cut']):.1%}"),
    )
