"""`--break TAG` under `ludus debug`, in the threads and in the worker processes of a run."""

from __future__ import annotations

import re
import signal
import socket
import time

import pytest
from harness import BABYAI, Ludus, Process

ENV = """
import os
from ludus import breakpoint_at
from ludus.envs.babyai.env import BabyAI

calls = {"reset": 0, "step": 0}

class Stopping(BabyAI):
    async def reset(self, task):
        calls["reset"] += 1
        if calls["reset"] == 1:
            breakpoint_at("reset")
        return await super().reset(task)

    async def step(self, action):
        calls["step"] += 1
        if calls["step"] == 1:
            breakpoint_at("step")
        if os.path.exists("now"):
            breakpoint_at("later")
        return await super().step(action)
"""
"""An environment that stops in each process once."""

SHORT = (
    "env.name=stopping.py:Stopping", "sft.steps=1", "rl.steps=2", "demonstrations.num_episodes=3",
    "evaluate.num_tasks=2", "rollout.max_retries=0", "rollout.concurrency=1",
)  # fmt: skip


@pytest.fixture
def recipe(ludus: Ludus) -> tuple[str, ...]:
    (ludus.cwd / "stopping.py").write_text(ENV)
    return (BABYAI, *SHORT)


def sockets(process: Process, count: int) -> list[str]:
    """Wait until so many breakpoints wait."""
    paths: list[str] = []
    while len(paths) < count:
        process.until("ludus.core.debugging.debugger")
        paths = re.findall(r"ludus\.core\.debugging\.debugger (\S+)\n", process.stderr.read_text())
        time.sleep(0.01)
    return paths


def answer(path: str, commands: bytes) -> str:
    """Connect to a pdb that waits; returns what it said."""
    said = b""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(path)
        connection.sendall(commands)
        while piece := connection.recv(65536):
            said += piece
    return said.decode()


def test_a_worker_process_and_a_thread_wait(ludus: Ludus, recipe: tuple[str, ...]) -> None:
    options = ["--break", "step", "--break", "stp", "rollout.step_deadline_s=1"]
    process = ludus.start("train", *recipe, *options)
    said = answer(sockets(process, 1)[0], b"import threading as t\np t.current_thread().name\nc\n")
    assert "MainThread" in said, "a worker process plays demonstrations"
    commands = b"import threading as t, time\np t.current_thread().name\ntime.sleep(1.5)\nc\n"
    said = answer(sockets(process, 2)[1], commands)
    assert "ludus-env" in said
    done = process.wait().ok()
    assert "breakpoint step (stopping.py, line " in done.err
    assert "--break stp: never reached (did you mean step?)" in done.err
    assert "--break step: never" not in done.err
    assert "step_deadline_s: 1.0" in (ludus.run() / "config.yaml").read_text()
    with ludus.store() as store:
        statuses = {t.status.value for row in store.steps("tiny-1")
                    for group in store.groups("tiny-1", row.stage, row.step)
                    for t in group.trajectories}  # fmt: skip
    assert not {status for status in statuses if status.startswith("error")}, statuses


@pytest.mark.parametrize("tag", ["reset", "later"])
def test_ctrl_c_ends_a_run_that_waits(ludus: Ludus, recipe: tuple[str, ...], tag: str) -> None:
    """In the worker that plays demonstrations; in a step, which is finished and saved."""
    process = ludus.start("train", *recipe, "rl.steps=500", "--break", tag)
    if tag == "later":
        process.until("rl: 500 steps")
        (ludus.cwd / "now").touch()
    sockets(process, 1)
    process.signal(signal.SIGINT)
    done = process.wait().refused(130, "resume with: ludus train --resume tiny-1")
    assert ("finishing this step" in done.err) == (tag == "later"), done.err
    assert ludus.status() == "interrupted"


def test_debug_opens_pdb_in_the_terminal(ludus: Ludus, recipe: tuple[str, ...]) -> None:
    done = ludus("debug", *recipe, "--break", "reset")
    assert "-> return await super().reset(task)" in done.out
    assert done.code == 130, "its input is empty, so pdb quits"


def test_wrong_tags_are_refused(ludus: Ludus) -> None:
    for argv, said in (
        (["train", BABYAI, "--break", "a b"], "--break 'a b': a tag is of letters"),
        (["debug", BABYAI, "--break", "a,b"], "--break 'a,b': a tag is of letters"),
        (["train", BABYAI, "--debugger", "pdb"], "without --break TAG"),
        (["train", BABYAI, "--break", "a", "--debugger", "gdb"], "'gdb' is none"),
    ):
        ludus(*argv).refused(2, said)
    assert not (ludus.cwd / "runs").exists()


def test_a_tag_that_no_code_has_is_reported(ludus: Ludus) -> None:
    done = ludus("debug", BABYAI, "--break", "nowhere").ok()
    assert "--break nowhere: never reached" in done.err


@pytest.mark.slow
def test_a_debugger_of_an_editor_attaches(ludus: Ludus, recipe: tuple[str, ...]) -> None:
    pytest.importorskip("debugpy")
    from debug_client import DebugClient

    options = ["rl=null", "--break", "step", "--debugger", "debugpy"]
    process = ludus.start("train", *recipe, *options)
    for number in range(2):  # the worker process, then the run's own
        ports: list[str] = []
        while len(ports) <= number:
            process.until("attach a debugger (debugpy) to 127.0.0.1:")
            ports = re.findall(r"to 127\.0\.0\.1:(\d+)\n", process.stderr.read_text())
            time.sleep(0.01)
        client = DebugClient(int(ports[number]))
        assert client.wait()[0][0] == "step"
        assert client.value("calls['step']") == "1"
        client.go_on()
        client.leave()
    process.wait().ok()
