"""The program of a job, on the head: `python -m ludus.cluster.entry RECIPE [KEY=VALUE]...`.

Checks what only the cluster knows (versions, the folder of the runs, packages of the plug-ins, the
nodes), then runs `ludus train`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from runpy import run_module
from typing import Any

from ludus import __version__
from ludus.backends.ray.cluster import NAMESPACE_VARIABLE
from ludus.core.errors import ConfigError, LudusError, printable

STARTS = "ludus job: "
"""Begins the line that is printed when all checks have passed."""

SUBMITTED_WITH = "LUDUS_SUBMITTED_WITH"
"""Environment variable with the version of ludus that submitted a job."""

WITH_WORKERS = ("ray",)
"""Back ends that use all nodes of the cluster."""

NODES_S = 60
"""Seconds for all nodes to answer."""


def main(arguments: Sequence[str]) -> None:
    """Check, and train. Exit code 2 for what the user can correct."""
    try:
        command = command_of(arguments)
    except LudusError as error:
        print(f"ludus: {printable(str(error))}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None
    print(f"{STARTS}ludus {' '.join(command)}", flush=True)
    sys.argv = ["ludus", *command]
    run_module("ludus", run_name="__main__")  # in this process, which has loaded the plug-ins


def command_of(arguments: Sequence[str]) -> list[str]:
    """Returns the command of the run. Errors: ConfigError."""
    wanted = os.environ.get(SUBMITTED_WITH)
    if wanted is not None and wanted != __version__:
        raise ConfigError(
            f"the cluster has ludus {__version__}, and the job comes from ludus {wanted}: install "
            "the same on both"
        )
    if arguments[0] == "--resume":
        folder, run = os.path.split(arguments[1].rstrip("/"))
        if os.path.isabs(folder):  # the job that began it had an absolute `runs_dir`
            return ["train", "--resume", run, *arguments[2:], "--runs-dir", folder]
        return ["train", *arguments, "--runs-dir", _runs_dir("runs", None)]
    from ludus.config.load import load_config
    from ludus.pipeline.parts.checks import check

    config = load_config(arguments[0], arguments[1:])
    runs_dir = _runs_dir(config.runs_dir, config.mirror)
    check(config)
    if config.backend.name in WITH_WORKERS:
        check_nodes()
    return ["train", *arguments, f"runs_dir={runs_dir}"]


def _runs_dir(given: str, mirror: str | None) -> str:
    """The folder of the runs: a job's own folder is removed after it."""
    if os.path.isabs(given):
        return given
    if folder := os.environ.get("LUDUS_RUNS_DIR"):
        return folder if given == "runs" else os.path.join(folder, given)
    if mirror is not None:
        return given
    raise ConfigError(
        f"runs_dir: {given!r} would be removed with the job's folder: give an absolute path on "
        "storage of the cluster, or a `mirror`, or set `runs` in HOSTS.yaml"
    )


def check_nodes() -> None:
    """Check that all nodes of the cluster have this version of ludus.

    Errors: ConfigError, with the node that lacks it or has another.
    """
    ray: Any = import_module("ray")  # whose functions have no types
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address="auto", namespace=os.environ.get(NAMESPACE_VARIABLE), log_to_driver=False)
    try:
        probe = ray.remote(num_cpus=0, max_retries=0)(_version)
        asked = {}
        for node, address in _alive(ray).items():
            place = NodeAffinitySchedulingStrategy(node, soft=False)
            asked[probe.options(scheduling_strategy=place).remote()] = node, address
        _, waiting = ray.wait(list(asked), num_returns=len(asked), timeout=NODES_S)
        # Ray lists a dead node as alive for some seconds: a node that was restarted is there twice.
        alive = _alive(ray)
        faults = []
        for answer, (node, address) in asked.items():
            if node not in alive:
                continue
            late = f"no answer within {NODES_S} s" if answer in waiting else ""
            if fault := late or _node_fault(ray, answer):
                faults.append(f"{address}: {fault}")
    finally:
        ray.shutdown()
    if faults:
        raise ConfigError("\n".join(sorted(faults)))


def _alive(ray: Any) -> dict[str, str]:
    """Address of each node of the cluster that is alive, by its id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def _version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ludus-rl")
    except PackageNotFoundError:
        return None


_version.__module__ = "__main__"  # cloudpickle sends it by value: a node may lack ludus


def _node_fault(ray: Any, answer: Any) -> str:
    try:
        found = ray.get(answer)
    except ray.exceptions.RayError as error:
        return printable(str(error).strip().splitlines()[-1])
    if found is None:
        return "has no package ludus: pip install 'ludus-rl[ray]' there"
    if found != __version__:
        return f"has ludus {found}, the head {__version__}: install the same"
    return ""


if __name__ == "__main__":
    main(sys.argv[1:])
