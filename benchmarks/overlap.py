"""Asynchronous against synchronous rollouts: seconds per step with slow environments.

    python benchmarks/overlap.py [--threads 1] [--repeats 5] [--quick] [--tools]

A policy of 0.9 M parameters plays 8 groups of 8 episodes of three turns of 32 tokens. Each step of
the environment sleeps for a time drawn from a log-normal distribution with a median of 50 ms and a
99th percentile of 5 s (no processor time). `ahead n` is `rl.max_staleness: n`.

With `--tools`, a tool sleeps in place of the environment: each turn but the last calls it, and the
environment, which does not sleep, scores the last turn. A policy of random weights writes no call,
so the benchmark takes its turns for calls; toolbox, driver and sampler are those of a run.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from common import Spread, arguments, machine, make_model, ratios, rounds, tabulate, write
from fixed import FRAME, FixedEnv, FixedSampler, Kept, LudusSteps, Work, latency, words
from quiet import QuietLoop

from ludus.core.types import Message, Spec, StepResult, ToolCall
from ludus.models.chat.by_task import TaskRenderers
from ludus.models.chat.parsing import Parsed
from ludus.models.chat.renderer import Renderer
from ludus.models.samplers.base import Completion, Sampler, SamplingParams
from ludus.rollout.tool_use import RunTools, read_functions

WORK = Work(prompt=64, turn=32, turns=3)
PROGRAMS = {
    "sync, no latency": (False, 0),
    "ahead 4, no latency": (False, 4),
    "sync": (True, 0),
    "ahead 2": (True, 2),
    "ahead 4": (True, 4),
    "ahead 8": (True, 8),
}


TOOL_PROGRAMS = {
    "sync, no latency": ("quick", 0),
    "ahead 4": ("slow", 4),
    "ahead 4, no latency": ("quick", 4),
    "sync": ("slow", 0),
}


async def quick() -> str:
    """Answer at once."""
    return words(random.Random(), WORK.observation - FRAME - 1)


async def slow() -> str:
    """Answer late."""
    await asyncio.sleep(latency(random.Random()))
    return await quick()


class Calling(Renderer):
    """Takes a turn for a call of the tool, unless it is an episode's last."""

    def __init__(self, renderer: Renderer, tool: str) -> None:
        self.__dict__.update(renderer.__dict__)
        self.tool = tool
        self.last: set[tuple[int, ...]] = set()

    def parse(self, token_ids: Sequence[int]) -> Parsed:
        parsed = super().parse(token_ids)
        if tuple(token_ids) in self.last:
            self.last.remove(tuple(token_ids))
            return parsed
        call = ToolCall(name=self.tool)
        return Parsed(parsed.message.model_copy(update={"tool_calls": [call]}))


class Counting(FixedSampler):
    """Tells the renderer which turns are the last of their episodes."""

    def __init__(self, inner: Sampler, renderer: Calling) -> None:
        super().__init__(inner)
        self.renderer = renderer

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, *, session: str
    ) -> Completion:
        completion = await super().sample(prompt_ids, params, session=session)
        if len(prompt_ids) > WORK.length - WORK.turn - WORK.observation:
            self.renderer.last.add(tuple(completion.token_ids))
        return completion


def with_tool(ludus: LudusSteps, tool: str) -> None:
    """Give the episodes a tool of this module, which all turns but the last call."""
    spec = Spec(name=f"overlap:{tool}")
    assert ludus.collector.renderers is not None
    renderer = Calling(ludus.collector.renderers.default, tool)
    ludus.collector.renderers = TaskRenderers(renderer)
    ludus.collector.sampler = Counting(ludus.backend.sampler, renderer)
    functions = asyncio.run(read_functions([spec]))
    ludus.collector.tools = RunTools([spec], functions, deadline_s=3600.0)


class Scored(FixedEnv):
    """Scores the first turn that calls no tool."""

    def __init__(self, prompt: int = 64, turns: int = 1, observation: int = 12) -> None:
        super().__init__(prompt, 1, observation)


class Slow(FixedEnv):
    async def step(self, action: Message) -> StepResult:
        await asyncio.sleep(latency(self.random))
        return await super().step(action)


def run(late: bool | str, bound: int, num_counted: int, threads: int) -> dict[str, float]:
    """Means over the counted steps.

    Args:
        late: whether the environment sleeps, or the name of the tool.
        bound: `rl.max_staleness`.
    """
    tool = late if isinstance(late, str) else None
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
            env=f"overlap:{'Scored' if tool else 'Slow'}" if late else "fixed:FixedEnv",
            rollout={"concurrency": WORK.samples * (bound + 1), "deterministic": False},
            rl={"max_staleness": bound, "algorithm": algorithm},
            threads=threads,
        )
        if tool:
            with_tool(ludus, tool)
        if isinstance(loop, QuietLoop):
            for name in ("score", "train", "publish_weights"):  # they compute in a thread
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
    args = arguments(__doc__ or "", tools="a tool sleeps, not the environment")
    programs: Mapping[str, tuple[bool | str, int]] = TOOL_PROGRAMS if args.tools else PROGRAMS
    facts = machine(args.threads)
    num_counted = 3 if args.quick else 6 if args.tools else 12
    repeats = 1 if args.quick else args.repeats
    found: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for _, name in rounds(programs, repeats, warmup=0):
        found[name].append(run(*programs[name], num_counted, args.threads))
        shown = {key: round(value, 3) for key, value in found[name][-1].items()}
        print(f"{name}: {shown}", flush=True)
    if args.quick:
        return
    rows: list[dict[str, Any]] = [
        {"program": name, **{key: [result[key] for result in results] for key in results[0]}}
        for name, results in found.items()
    ]
    write(
        "overlap-tools" if args.tools else "overlap", page(rows), facts | {"repeats": repeats}, rows
    )


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
