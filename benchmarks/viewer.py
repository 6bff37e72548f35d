"""Viewer: time to answer over a store of a million trajectories.

    python benchmarks/viewer.py                     # makes the store first, about 3 GB
    python benchmarks/viewer.py --quick             # 20,000 trajectories, nothing written

Requests go over HTTP to `ludus view` in a process of its own, one at a time; each kind has other
arguments every time, so no answer is that of the request before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import Connection

from ludus import __version__
from ludus.core.types import Group, Message, Segment, Status, Task, ToolCall, Trajectory
from ludus.pipeline.parts.versions import processor
from ludus.store import RunStore
from ludus.store.recording import StepWriter

RESULTS = Path(__file__).parents[1] / "docs" / "benchmarks"
GROUP_SIZE, GROUPS = 16, 64
TOOLS = ("python", "search", "browse", "calculator")
REASONS = ("no signal: all rewards of the group are 0.0", "error_env: the environment failed")


def trajectory(rng: random.Random, group: str, member: int, task: str) -> Trajectory:
    """Six turns with tools; 3 % fail, 1 in 10,000 calls a rare tool."""
    segments = [
        Segment(-1, rng.choices(range(1000), k=60), None, Message(role="user", content=task))
    ]
    for turn in range(rng.randint(1, 6)):
        num = rng.randint(8, 40)
        tool = "rare" if rng.random() < 1e-4 else rng.choice(TOOLS)
        call = ToolCall(name=tool, arguments={"code": "print(1)"}, id=f"c{turn}")
        said = Message(role="assistant", content="I try this.", tool_calls=[call])
        logprobs = [-rng.random() for _ in range(num)]
        turn_ids = rng.choices(range(1000), k=num)
        segments.append(
            Segment(len(segments) - 1, turn_ids, logprobs, said, 3, advantages=[0.5] * num)
        )
        result = Message(role="tool", content="1", name=tool, tool_call_id=f"c{turn}")
        segments.append(Segment(len(segments) - 1, rng.choices(range(1000), k=12), None, result))
    status, luck = Status.COMPLETED, rng.random()
    if luck < 0.03:
        status = Status.ERROR_ENV
    elif luck < 0.0301:
        status = Status.ERROR_SAMPLER
    failed = not status.trainable
    return Trajectory(
        f"{group}/e{member:03d}",
        group,
        task,
        segments,
        status=status,
        reward=None if failed else rng.choice((0.0, 0.25, 0.5, 1.0)),
        scores={"success": 1.0},
        error="the environment raised ValueError" if failed else None,
        dropped=REASONS[failed] if failed or luck > 0.8 else None,
        metrics={"seconds": rng.random()},
    )


def make_store(folder: Path, num_trajectories: int, num_packed: int = 8) -> None:
    """Record steps of 64 groups of 16. The steps are packed once and then changed: other ids, tasks
    and rewards, the same tokens."""
    rng = random.Random(0)
    store = RunStore.open(None, folder)
    store.create_run("big-1", "big", {"seed": 0}, {"ludus": "0"})
    packed = [pack(rng) for _ in range(num_packed)]
    steps = num_trajectories // (GROUP_SIZE * GROUPS)
    started = time.perf_counter()

    def record(connection: Connection, step: int) -> None:
        metrics = {f"rollout/metric_{n}": rng.random() for n in range(60)}
        metrics |= {"rollout/reward": step / steps, "train/loss": rng.random(), "time/step_s": 1.0}
        metrics |= {"train/optimizer_steps": 1.0, "rollout/episodes": float(GROUPS * GROUP_SIZE)}
        step_of(packed[step % num_packed], step, metrics, rng).write(connection, 1)

    for first in range(0, steps, 20):  # fewer transactions

        def work(connection: Connection, first: int = first) -> None:
            for step in range(first, min(first + 20, steps)):
                record(connection, step)

        store._write(work)
        print(f"{first}/{steps} steps, {time.perf_counter() - started:.0f} s", flush=True)
    store.close()


def pack(rng: random.Random) -> StepWriter:
    """A step of random trajectories, as rows."""
    groups = []
    for g in range(GROUPS):
        task = Task(id="task", prompt=[Message(role="user", content="?")])
        members = [trajectory(rng, f"g{g}", e, "task") for e in range(GROUP_SIZE)]
        groups.append(Group(f"g{g}", task, members))
    return StepWriter.prepare("benchmark", {"stage": "rl"}, groups, ())


def step_of(
    packed: StepWriter, step: int, metrics: dict[str, float], rng: random.Random
) -> StepWriter:
    """The packed step under another number."""
    started = datetime.fromtimestamp(1.8e9 + step, UTC)
    head = {"stage": "rl", "step": step, "started": started, "seconds": 1.0, "metrics": metrics}
    ids = [f"rl-{step:06d}/g{g:04d}" for g in range(GROUPS)]
    tasks = [f"task-{rng.randrange(20_000)}" for _ in ids]
    groups = [
        {**row, "id": id_, "task": {**row["task"], "id": task}}
        for row, id_, task in zip(packed.groups, ids, tasks, strict=True)
    ]
    trajectories = []
    for number, (row, g) in enumerate(zip(packed.trajectories, packed.group_of, strict=True)):
        reward = None if row["reward"] is None else row["reward"] + rng.random() * 1e-3
        id_ = f"{ids[g]}/e{number % GROUP_SIZE:03d}"
        new = {"id": id_, "group_id": ids[g], "task_id": tasks[g], "reward": reward}
        trajectories.append({**row, **new})
    names = [row["id"] for row in trajectories]
    told = [(names[n], row["dropped"]) for n, row in enumerate(trajectories) if row["dropped"]]
    changed = {"head": {**head, "policy_version": step}, "groups": groups, "dropped": told}
    return replace(packed, **changed, trajectories=trajectories)


@contextmanager
def viewer(folder: Path) -> Iterator[tuple[str, int]]:
    """The address of `ludus view` over the store, and its pid."""
    command = [sys.executable, "-m", "ludus", "view", "--runs-dir", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://[\d.]+:\d+", process.stdout.readline())
            assert found is not None
            yield found[0], process.pid
        finally:
            process.terminate()


def cases(rng: random.Random, steps: int) -> dict[str, Callable[[], tuple[str, dict[str, Any]]]]:
    """Requests by kind, with random arguments."""

    def one() -> str:
        return (
            f"rl-{rng.randrange(steps):06d}/g{rng.randrange(GROUPS):04d}/e{rng.randrange(16):03d}"
        )

    def rollouts(**ask: Any) -> Callable[[], tuple[str, dict[str, Any]]]:
        return lambda: (
            "/api/rollouts",
            {"run": "big-1"} | {k: v() if callable(v) else v for k, v in ask.items()},
        )

    def tool() -> str:
        return rng.choice(TOOLS)

    return {
        "one rollout, with its tokens": lambda: ("/api/rollout", {"run": "big-1", "id": one()}),
        "newest": rollouts(),
        "by reward": rollouts(sort="reward"),
        "by length": rollouts(sort="tokens"),
        "by turns, least first": rollouts(sort="turns", order="asc"),
        "one status of many, by reward": rollouts(sort="reward", status="completed"),
        "one status of few, by length": rollouts(sort="tokens", status="error_sampler"),
        "one tool of many, by reward": rollouts(sort="reward", tool=tool),
        "one tool of few": rollouts(tool="rare"),
        "one step, by reward": rollouts(
            sort="reward", stage="rl", step=lambda: rng.randrange(steps)
        ),
        "dropped, by length": rollouts(sort="tokens", dropped="true"),
        "a range of rewards": rollouts(
            sort="reward", min_reward=lambda: 0.25, max_reward=lambda: 0.2503 + rng.random() / 1e4
        ),
        "one id": rollouts(text=one),
        "part of an error": rollouts(text="ValueError"),
        "text that is nowhere": rollouts(text=lambda: f"nothing {rng.random()}"),
        "runs": lambda: ("/api/runs", {}),
        "one run": lambda: ("/api/run", {"run": "big-1"}),
        "curves": lambda: ("/api/curves", {"run": "big-1", "stage": "rl"}),
        "one step, why": lambda: (
            "/api/step",
            {"run": "big-1", "stage": "rl", "step": rng.randrange(steps)},
        ),
        "first page": lambda: ("/", {}),
    }


def measure(folder: Path, repeats: int, pages: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each kind: first request, median, slowest of the rest, and the server's
    processor time for one; lists are paged."""
    rng = random.Random(1)
    with RunStore.open(None, folder, read_only=True) as store:
        steps = store.run("big-1").stages["rl"] + 1
    measured: dict[str, dict[str, float]] = {}
    with (
        viewer(folder) as (url, pid),
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        for name, make in cases(rng, steps).items():
            spent: list[float] = []
            before = processor_ms(pid)
            for _ in range(repeats):
                path, query = make()
                for _ in range(pages):
                    started = time.perf_counter()
                    answer = client.get(path, params=query)
                    spent.append(1000 * (time.perf_counter() - started))
                    answer.raise_for_status()
                    after = answer.json().get("next") if path == "/api/rollouts" else None
                    if after is None:
                        break
                    query = {**query, "after": after}
            rest = spent[1:] or spent
            measured[name] = {
                "first": spent[0],
                "median": statistics.median(rest),
                "slowest": max(rest),
                "processor": (processor_ms(pid) - before) / len(spent),
            }
            print(f"{name:34}", "  ".join(f"{k} {v:7.1f}" for k, v in measured[name].items()))
    return measured


def processor_ms(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def paint(folder: Path, repeats: int = 5) -> dict[str, dict[str, float]]:
    """Milliseconds to the first paint in Chromium, with a fresh profile each time; empty without
    Chromium or Playwright."""
    names = ("chromium", "google-chrome", "chromium-browser")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None or find_spec("playwright") is None:
        return {}
    from playwright.sync_api import sync_playwright

    measured: dict[str, dict[str, float]] = {}
    views = {"runs": "", "a run": "#/run?run=big-1", "rollouts": "#/rollouts?run=big-1"}
    ask = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    with viewer(folder) as (url, _), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, view in views.items():
            spent = []
            for _ in range(repeats):
                page = browser.new_page()
                page.goto(f"{url}/{view}")
                page.wait_for_selector("main[data-ready]")
                while (painted := page.evaluate(ask)) is None:
                    time.sleep(0.05)
                spent.append(float(painted))
                page.close()
            rest = spent[1:] or spent
            measured[f"first paint: {name}"] = {
                "first": spent[0],
                "median": statistics.median(rest),
                "slowest": max(rest),
            }
        browser.close()
    for name, found in measured.items():
        print(f"{name:34}", "  ".join(f"{k} {v:7.1f}" for k, v in found.items()))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--store", type=Path, help="folder of the store; kept, and used again")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--pages", type=int, default=4, help="pages of a list in each repeat")
    parser.add_argument("--quick", action="store_true", help="a small store, nothing written")
    args = parser.parse_args()
    num = 20_480 if args.quick else args.trajectories
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.store or Path(temporary)
        if not (folder / "ludus.db").exists():
            make_store(folder, num)
        size = (folder / "ludus.db").stat().st_size
        measured = measure(folder, args.repeats, args.pages) | paint(folder)
    if not args.quick:
        write(measured, num, size)


def write(measured: dict[str, dict[str, float]], num: int, size: int) -> None:
    """Write the results and their page."""
    facts = {
        "trajectories": num // (GROUP_SIZE * GROUPS) * GROUP_SIZE * GROUPS,
        "gigabytes": round(size / 1e9, 2),
        "cores": os.cpu_count(),
        "processor": processor(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "ludus": __version__,
        "milliseconds": measured,
    }
    (RESULTS / "viewer.json").write_text(json.dumps(facts, indent=1) + "\n")
    rows = [
        f"| {name} | {t['first']:.0f} | {t['median']:.0f} | {t['slowest']:.0f} | "
        + (f"{t['processor']:.0f} |" if "processor" in t else "|")
        for name, t in measured.items()
    ]
    text = f"""# The viewer on a large store

`ludus view` over a run of {facts["trajectories"]:,} trajectories (SQLite, {facts["gigabytes"]} GB),
{facts["cores"]} cores ({facts["processor"]}), {load(facts["load"])}; ludus {facts["ludus"]},
Python {facts["python"]}, SQLite {facts["sqlite"]}. Milliseconds of an answer over HTTP. `first` is
the first request of its kind to a `ludus view` that has just started; `processor` is the server's
processor time for a request, which other work on the machine changes little. Lists have 50 rows,
and four pages of each are read. The first paint is Chromium's first contentful paint in a new
context. Written by `benchmarks/viewer.py`.

| request | first | median | slowest of the rest | processor |
|---|---:|---:|---:|---:|
{chr(10).join(rows)}

A search reads at most 8,000 trajectories for a page, and fewer where they take over 0.06 s. So a
page of a rare combination may be empty, and the page in the browser asks for the next one until it
has rows, or you stop it.
"""
    (RESULTS / "viewer.md").write_text(text)


def load(average: float) -> str:
    """The load of the machine in words."""
    return f"a load average of {average:g}" + (" (other work)" if average > 2 else "")


if __name__ == "__main__":
    main()
