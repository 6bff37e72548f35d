"""Evaluates episodes from the changes that their worlds saved; only it sees the ground truth."""

from __future__ import annotations

import os
import shutil
import socket
from contextlib import suppress
from typing import Any

from appworld import evaluate_task, update_root
from appworld.apps.model_lib import CachedDBHandler
from appworld.common.path_store import path_store

from ludus.envs.appworld.appworld_side.frames import receive, send


def evaluate(root: str, task: str, experiment: str) -> dict[str, Any]:
    """Run the task's tests on the saved state, and remove that state."""
    update_root(root)
    try:
        result = evaluate_task(task, experiment, suppress_errors=True, save_report=False)
        report = result.to_dict()
    finally:
        CachedDBHandler.reset(f"-{task}")
        folder = os.path.join(path_store.experiment_outputs, experiment)
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "success": bool(report["success"]),
        "num_tests": report["num_tests"],
        "passed": [test["requirement"] for test in report["passes"]],
        "failed": [test["requirement"] for test in report["failures"]],
    }


def serve_evaluator(host: socket.socket) -> None:
    """Serve the host until it closes the socket."""
    with suppress(EOFError):
        while host.recv(1):
            request = receive(host)
            try:
                send(host, {"ok": evaluate(**request)})
            except Exception as error:
                send(host, {"error": f"{type(error).__name__}: {error}"})
