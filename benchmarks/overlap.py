"""Asynchronous against synchronous rollouts: seconds per step with slow environments.

    python benchmarks/overlap.py [--threads 1] [--repeats 5] [--quick]

A policy of 0.9 M parameters plays 8 groups of 8 episodes of three turns of 32 tokens. Each step of
the environment sleeps for a time drawn from a log-normal distribution with a median of 50 ms and a
99th percentile of 5 s (no processor time). `ahead n` is `rl.max_staleness: n`.

On one thread the clock is `benchmarks/quiet.py`: processor time, plus the time in which everything
waits. On several threads it is wall time. The first step does not count. In programs that play
ahead, the steps that fill or empty the queue do not count either: they wait for all of their
episodes, like a synchronous step.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from common import Spread, arguments, machine, make_model, ratios, rounds, tabulate, write
from fixed import FixedEnv, Kept, LudusSteps, Work, latency
from quiet import QuietLoop

from ludus.core.types import Message, StepResult

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
    async def step(self, action: Message) -> StepResult:
        await asyncio.sleep(latency(self.random))
        return await super().step(action)


def run(slow: bool, bound: int, num_counted: int, threads: int) -> dict[str, float]:
    """Means over the counted steps. `bound` is `rl.max_staleness`."""
    fill, drain = (bound + 2, bound + 1) if bound else (1, 0)
    random.seed(0)
    loop = QuietLoop() if threads == 1 else asyncio.SelectorEventLoop()
    kept = Kept(loop.time if threads == 1 else time.perf_counter)
    algorithm = {"name": "grpo", "args": {"importance_cap": 2.0}}
    with tempfile.TemporaryDirectory() as folder:
        ludus = LudusSteps(
            make_model("0.9 M"),
            WORK,
            Path(folder),
            env="overlap:Slow" if slow else "fixed:FixedEnv",
            rollout={"concurrency": WORK.samples * (bound + 1), "deterministic": False},
            rl={"max_staleness": bound, "algorithm": algorithm},
            threads=threads,
        )
        if isinstance(loop, QuietLoop):
            for name in ("score", "train"):
                setattr(ludus.backend, name, loop.counted(getattr(ludus.backend, name)))
        try:
            ludus.run(ludus.stage_of(fill + num_counted + drain), kept, loop=lambda: loop)
        finally:
            ludus.backend.close()
    counted = kept.metrics[fill : fill + num_counted]
    seconds = kept.ends[fill + num_counted - 1] - kept.ends[fill - 1]
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
    facts = machine(args.threads)
    num_counted = 3 if args.quick else 12
    repeats = 1 if args.quick else args.repeats
    found: dict[str, list[dict[str, float]]] = {name: [] for name in PROGRAMS}
    for _, name in rounds(PROGRAMS, repeats, warmup=0):
        found[name].append(run(*PROGRAMS[name], num_counted, args.threads))
        shown = {key: round(value, 3) for key, value in found[name][-1].items()}
        print(f"{name}: {shown}", flush=True)
    if args.quick:
        return
    rows: list[dict[str, Any]] = [
        {"program": name, **{key: [result[key] for result in results] for key in results[0]}}
        for name, results in found.items()
    ]
    write("overlap", page(rows), facts | {"repeats": repeats}, rows)


def page(rows: list[dict[str, Any]]) -> str:
    base = rows[0]["seconds"]
    table = tabulate(
        rows,
        ("program", lambda row: row["program"]),
        ("s per step", lambda row: Spread.of(row["seconds"]).show(".2f")),
        ("ratio to no latency", lambda row: ratios(row["seconds"], base).show(".2f")),
        (
            "per trained episode",
            lambda row: ratios(row["seconds_per_64_trained"], base).show(".2f"),
        ),
        ("episodes cut", lambda row: Spread.of(row["cut"]).show(".1%")),
        ("staleness mean", lambda row: Spread.of(row["staleness_mean"]).show(".1f")),
        ("maximum", lambda row: f"{max(row['staleness_max']):.0f}"),
    )
    told = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2]
    return f"# Asynchronous rollouts\n\n{table}\n\n{told}"


if __name__ == "__main__":
    sys.modules["overlap"] = sys.modules["__main__"]
    main()
