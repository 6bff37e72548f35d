"""Runs on Ray: the same run as on this process alone, also where actors die."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from harness import BABYAI, Ludus

pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT_S = 600  # a guard against a hang
RL = '"stage": "rl"'
RAY = ["backend.name=ray", "backend.args.cpus=0.5", "backend.args.env_workers=2"]


def actors(root: int) -> dict[str, list[int]]:
    """Processes of the actors of a command, by class."""
    import psutil

    found: dict[str, list[int]] = {}
    for child in psutil.Process(root).children(recursive=True):
        try:
            title = "".join(child.cmdline())
        except psutil.Error:
            continue
        for kind in ("LearnerActor", "SamplerActor", "EnvActor"):
            if title.startswith(f"ray::{kind}"):
                found.setdefault(kind, []).append(child.pid)
    return found


def without(state: dict[str, Any], *names: str) -> dict[str, Any]:
    """A run's state without its checkpoints, whose files differ, and some metrics."""

    def timeless(metrics: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in metrics.items() if not k.startswith(names)}

    steps = []
    for step in state["steps"]:
        for trajectory in (t for group in step["groups"] for t in group.trajectories):
            trajectory.metrics = timeless(trajectory.metrics)
        steps.append({**step, "metrics": timeless(step["metrics"])})
    return {
        "metrics": [timeless(line) for line in state["metrics"]],
        "steps": steps,
        "evaluations": state["evaluations"],
        "demonstrations": state["demonstrations"],
    }


def assert_same(ludus: Ludus, reference: Ludus, *names: str) -> None:
    mine, other = without(ludus.state(), *names), without(reference.state(), *names)
    for part in other:
        assert mine[part] == other[part], f"{part} differ"


def test_a_run_on_ray_is_the_local_run(ludus: Ludus, reference: Ludus) -> None:
    ludus.start("train", BABYAI, *RAY).wait(LIMIT_S).ok()
    assert_same(ludus, reference)


@pytest.mark.long
def test_actors_die_and_the_run_is_the_same(ludus: Ludus, reference: Ludus) -> None:
    """One actor of each kind is killed in RL; a retry counts, and the tokens that it computed."""
    process = ludus.start("train", BABYAI, *RAY)
    metrics = ludus.run() / "metrics.jsonl"
    for number, kind in enumerate(("EnvActor", "SamplerActor", "LearnerActor")):
        process.until_lines(metrics, RL, number + 1, LIMIT_S)
        os.kill(actors(process.pid)[kind][0], signal.SIGKILL)
    process.wait(LIMIT_S).ok()
    assert_same(ludus, reference, "retries", "rollout/retries", "rollout/unique_tokens")


@pytest.mark.parametrize(
    "stop", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)]
)
def test_stopped_it_leaves_no_process_and_goes_on_without_ray(
    ludus: Ludus, reference: Ludus, stop: signal.Signals
) -> None:
    import psutil

    process = ludus.start("train", BABYAI, *RAY)
    process.until_lines(ludus.run() / "metrics.jsonl", RL, 1, LIMIT_S)
    children = psutil.Process(process.pid).children(recursive=True)
    if stop is signal.SIGINT:
        process.signal(stop)  # as a terminal: to all processes of its group
    else:
        os.kill(process.pid, stop)
    assert process.wait(LIMIT_S).code == (130 if stop is signal.SIGINT else -stop)
    deadline = time.monotonic() + 120  # two of Ray's agents look after a minute
    while (left := [c for c in children if c.is_running()]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left
    ludus("train", "--resume", "tiny-1", "backend=local").ok()
    assert_same(ludus, reference)


def test_keys_that_it_does_not_honour_leave_no_run(ludus: Ludus) -> None:
    done = ludus("train", BABYAI, *RAY, "verify=true")
    done.refused(2, "verify: true compares bits of one process", "use backend: local")
    done = ludus("train", BABYAI, *RAY, "backend.args.tensor_parallel=2")
    done.refused(2, "tensor_parallel")
    assert not (ludus.cwd / "runs").exists()


def test_no_cluster_at_the_address(ludus: Ludus) -> None:
    done = ludus("train", BABYAI, "backend.name=ray", "backend.args.address=127.0.0.1:9")
    done.refused(2, "backend.args.address: no Ray cluster answers at 127.0.0.1:9")
    assert not Path(ludus.cwd / "runs" / "tiny-1" / "checkpoints").exists()
