"""A run whose RL is in a host's hands: recorded, resumed and ended as any other."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import scripted_host
from harness import BABYAI, Ludus

HOST = f"{scripted_host.__file__}:ScriptedHost"
SHORT = [
    "sft.steps=2", "demonstrations.num_episodes=16", "rl.steps=4", "checkpoint.every=2",
    "evaluate.every=2", "report=false", "tasks.train.args.num_tasks=24",
]  # fmt: skip


def backend(**args: object) -> str:
    inner = ", ".join(f"{key}: {str(value).lower()}" for key, value in args.items())
    return f"backend={{name: '{HOST}', args: {{{inner}}}}}"


def test_a_failed_host_is_explained_and_the_run_goes_on(ludus: Ludus) -> None:
    failed = ludus("train", BABYAI, backend(fail_after=3), *SHORT)
    failed.refused(
        1, "rl: ", "ended with exit code 1 after step 3 of 4", "MemoryError: out of memory"
    )
    assert ludus.status() == "failed"
    done = ludus("train", "--resume", "tiny-1", backend()).ok()
    assert "resuming after step 2 of rl" in done.err
    assert "rollout.concurrency: one at a time" in done.err
    with ludus.store() as store:
        steps = {(row.stage, row.step): row for row in store.steps("tiny-1")}
        groups = store.groups("tiny-1", "rl", 3)
    rl = [step for stage, step in steps if stage == "rl"]
    assert rl == [0, 1, 2, 3]
    assert {("sft", 1), ("evaluate/before", 0), ("evaluate/rl", 2), ("evaluate/after", 0)} <= set(
        steps
    )
    last = steps["rl", 3].metrics
    assert last["rollout/reward"] == 0.5
    assert last["train/loss"] == 0.4
    assert last["train/policy_version"] == 4
    assert last["rollout/episodes_total"] == 2 * 8 + 4 * 16
    assert [group.id for group in groups] == [f"rl-000003/g{n:04d}" for n in range(4)]
    assert groups[0].trajectories[1].segments[1].advantages
    names = sorted(path.name for path in (ludus.run() / "checkpoints").glob("[!.]*"))
    assert names == ["rl-000004", "sft-000002"]
    ludus("evaluate", "tiny-1", "--num-tasks", "2").ok()


def test_ctrl_c_ends_the_host_and_what_it_started(ludus: Ludus) -> None:
    running = ludus.start("train", BABYAI, backend(hang_after=2), *SHORT, "sft=null",
                          "demonstrations=null")  # fmt: skip
    folder = next(iter(_until(lambda: list(ludus.run().glob("*/hangs")))))
    host = int((folder.parent / "pid").read_text())
    running.signal(signal.SIGINT)
    assert running.wait().code == 130
    assert not Path(f"/proc/{host}").exists()
    assert not _sleepers(ludus.cwd)
    assert ludus.status() == "interrupted"


def test_a_step_that_was_saved_but_not_recorded_is_recorded_on_resume(ludus: Ludus) -> None:
    short = [*SHORT, "sft=null", "demonstrations=null", "tasks.heldout=null"]
    failed = ludus("train", BABYAI, backend(die_unrecorded=2), *short)
    failed.refused(1, "ended with exit code 1 after step 1 of 4")
    ludus("train", "--resume", "tiny-1", backend()).ok()
    with ludus.store() as store:
        steps = [row for row in store.steps("tiny-1") if row.stage == "rl"]
    assert [row.step for row in steps] == [0, 1, 2, 3]
    assert [row.metrics["rollout/episodes_total"] for row in steps] == [16, 32, 48, 64]
    assert ["train/loss" in row.metrics for row in steps] == [True, False, True, True]


def test_an_evaluation_that_a_failure_left_out_is_made_on_resume(ludus: Ludus) -> None:
    short = [*SHORT, "sft=null", "demonstrations=null"]
    ludus("train", BABYAI, backend(die_unevaluated=2), *short).refused(1, "after step 2 of 4")
    ludus("train", "--resume", "tiny-1", backend()).ok()
    with ludus.store() as store:
        steps = [(row.stage, row.step) for row in store.steps("tiny-1")]
    assert [step for stage, step in steps if stage == "evaluate/rl"] == [2, 4]
    assert [step for stage, step in steps if stage == "rl"] == [0, 1, 2, 3]


def test_stale_episodes_stop_the_run(ludus: Ludus) -> None:
    short = [*SHORT, "sft=null", "demonstrations=null"]
    ludus("train", BABYAI, backend(stale=True), *short).refused(1, "was sampled by version -1")


def _sleepers(folder: Path) -> list[int]:
    """Processes that the host left, which work in the run's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (
                os.readlink(entry / "cwd") == str(folder)
                and b"sleep" in (entry / "cmdline").read_bytes()
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _until(found, seconds: float = 60.0):  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value
