"""`ludus kill RUN`: the run, what it started, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from harness import BABYAI, Ludus

from ludus.core.system.processes import identify

STARTS = """
import subprocess, sys
from ludus.core.system.processes import started
from ludus.train.learner import Learner
child = None
original = Learner.train_step
def train_step(self, *args, **kwargs):
    global child
    if child is None:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print("child", child.pid, "end", file=sys.stderr, flush=True)
        HANG
    return original(self, *args, **kwargs)
Learner.train_step = train_step
"""
"""The first training step starts a process that outlives the run."""


def child_of(said: str) -> int:
    return int(said.partition("child ")[2].split()[0])


def killed_while_it_hangs(ludus: Ludus) -> int:
    """A run that is killed in its first step: the child that it leaves."""
    hangs = STARTS.replace("HANG", "import time; time.sleep(600)")
    process = ludus.start("train", BABYAI, setup=hangs)
    process.until("end\n")
    os.kill(process.pid, signal.SIGKILL)
    return child_of(process.wait().err)


def test_a_run_is_saved_and_ended_with_its_children(ludus: Ludus) -> None:
    many = ["sft.steps=100000"]
    process = ludus.start("train", BABYAI, *many, setup=STARTS.replace("HANG", "pass"))
    process.until("end\n")
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        done = ludus("kill", "tiny-1").ok()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
    child = child_of(process.wait().refused(143, "resume with").err)
    assert f"ended the run ({process.pid}): SIGTERM" in done.out
    assert f"ended sleep ({child}): SIGTERM" in done.out
    assert "resume with: ludus train --resume tiny-1" in done.out
    assert identify(child) is None
    assert ludus.status() == "interrupted"
    again = ludus("kill", "tiny-1").refused(1, "run tiny-1 is not running")
    assert again.out == ""


def test_what_a_killed_run_left_is_ended(ludus: Ludus) -> None:
    child = killed_while_it_hangs(ludus)
    assert identify(child) is not None
    record = json.loads((ludus.run() / ".processes.json").read_text())
    assert record["processes"][0]["what"] == "the run"
    done = ludus("kill", "tiny-1").ok()
    assert done.out.startswith(f"ended sleep ({child}): SIGTERM\n")
    assert identify(child) is None
    ludus("kill", "tiny-1").refused(1, "is not running")


def test_a_resumed_run_ends_what_it_left(ludus: Ludus) -> None:
    child = killed_while_it_hangs(ludus)
    done = ludus("train", "--resume", "tiny-1", "sft.steps=2", "rl=null").ok()
    assert f"ended what the run had left: sleep ({child})" in done.err
    assert identify(child) is None
    assert not (ludus.run() / ".processes.json").exists()


def test_a_run_that_ignores_sigterm_is_killed(ludus: Ludus) -> None:
    hangs = STARTS.replace(
        "HANG", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    )
    process = ludus.start("train", BABYAI, setup=hangs)
    process.until("end\n")
    time.sleep(0.2)
    done = ludus("kill", "tiny-1", "--grace", "0.5").ok()
    assert f"ended the run ({process.pid}): SIGKILL" in done.out
    process.wait()


def test_kill_refuses_unknown_runs_and_times(
    ludus: Ludus, reference: Ludus, tmp_path: Path
) -> None:
    ludus("kill", "tiny-9").refused(2, "there is no run 'tiny-9'")
    reference("kill", "tiny-2").refused(2, "did you mean tiny-1?")
    reference("kill", "tiny-1").refused(1, "run tiny-1 is not running")
    ludus("kill", "tiny-1", "--grace", "-1").refused(2, "--grace")
