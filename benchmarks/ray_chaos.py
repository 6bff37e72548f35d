"""A run on Ray whose actors are killed one after the other, beside the same run undisturbed.

    python benchmarks/ray_chaos.py [--steps 60] [--every 25]

`recipes/babyai-tiny.yaml` with 2 learner ranks, 2 samplers and 2 environment workers. From the
first step of RL, an actor gets SIGKILL each `--every` seconds: ranks, samplers and workers in turn,
which one of them is drawn with a seed. Prints the seconds a death costs, the effective time at
other rates of deaths that follows from it, and whether rewards and losses equal those of the
undisturbed run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ray_backend import RECIPE, SHORT, TWO

KINDS = ("LearnerActor", "SamplerActor", "EnvActor")
NOT_EQUAL = (
    "time", "memory/", "budget/", "rollout/retries", "rollout/unique_tokens", "rollout/evicted",
)  # fmt: skip
"""Beginnings of metrics that measure the run; those of the tokens that a retry samples anew."""
RATE = 0.1
"""Deaths an hour of each actor, for which the effective time is published."""


def actors(root: int, kind: str) -> list[int]:
    """Process ids of a run's live actors of a kind."""
    import psutil

    found = []
    for child in psutil.Process(root).children(recursive=True):
        try:
            if "".join(child.cmdline()).startswith(f"ray::{kind}"):
                found.append(child.pid)
        except psutil.Error:
            continue
    return sorted(found)


def steps_of(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [line for line in lines if line["stage"] == "rl"]


def run(folder: Path, name: str, steps: int, every_s: float) -> dict[str, Any]:
    """Train; kill an actor each `every_s` seconds (0: never). Seconds from RL's first step on."""
    command = [sys.executable, "-m", "ludus", "train", str(RECIPE), f"runs_dir={folder}"]
    changes = [*SHORT, *TWO, "threads=1", "backend.args.max_deaths=1000", "checkpoint.every=5"]
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [*command, f"name={name}", *changes, f"rl.steps={steps}"], stdout=log, stderr=log
        )
    metrics = folder / f"{name}-1" / "metrics.jsonl"
    while not steps_of(metrics):
        if process.poll() is not None:
            raise SystemExit((folder / f"{name}.log").read_text()[-3000:])
        time.sleep(0.1)
    began = time.perf_counter()
    deaths: list[str] = []
    kinds, draw = itertools.cycle(KINDS), random.Random(0)
    while process.poll() is None:
        due = every_s * (len(deaths) + 1)
        if every_s and time.perf_counter() - began > due and len(steps_of(metrics)) < steps - 1:
            kind = next(kinds)
            if alive := actors(process.pid, kind):
                os.kill(draw.choice(alive), signal.SIGKILL)
                deaths.append(kind)
        time.sleep(0.1)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit((folder / f"{name}.log").read_text()[-3000:])
    return {"seconds": seconds, "deaths": deaths, "steps": steps_of(metrics)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=float, default=25.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ludus-chaos-") as name:
        calm = run(Path(name), "calm", arguments.steps, 0.0)
        struck = run(Path(name), "struck", arguments.steps, arguments.every)

    def kept(line: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in line.items() if not k.startswith(NOT_EQUAL)}

    equal = [kept(a) == kept(b) for a, b in zip(calm["steps"], struck["steps"], strict=True)]
    deaths = len(struck["deaths"])
    cost = (struck["seconds"] - calm["seconds"]) / max(deaths, 1)
    lost = RATE * sum(int(part.split("=")[1]) for part in TWO if part[-1] == "2") * cost / 3600
    print(f"undisturbed {calm['seconds']:.1f} s, with {deaths} deaths {struck['seconds']:.1f} s")
    print(f"deaths: { {kind: struck['deaths'].count(kind) for kind in KINDS} }")
    print(f"a death costs {cost:.2f} s; effective time {calm['seconds'] / struck['seconds']:.1%}")
    print(f"at {RATE} deaths an hour of each of the 6 actors: {1 / (1 + lost):.3%}")
    print(f"steps with equal metrics: {sum(equal)} of {len(equal)}")
    pairs = zip(calm["steps"], struck["steps"], strict=True)
    other = {k for a, b in pairs for k, v in kept(a).items() if kept(b).get(k) != v}
    print(f"metrics that differ: {', '.join(sorted(other)) or 'none'}")


if __name__ == "__main__":
    main()
