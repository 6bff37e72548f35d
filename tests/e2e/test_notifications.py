"""Notifications of real runs: complete, failed, killed; URLs that fail; secrets."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from harness import BABYAI, Ludus
from message_receiver import inbox
from variants import variants

BRIEF = ["sft.steps=2", "rl=null"]


def assert_no_secret(ludus: Ludus, printed: str) -> None:
    assert "hunter2" not in printed
    for path in (ludus.cwd / "runs").rglob("*"):
        if path.is_file():
            assert b"hunter2" not in path.read_bytes(), path


def test_a_complete_run_is_told_and_its_url_is_stored_nowhere(ludus: Ludus) -> None:
    with inbox() as box:
        process = ludus.start("train", BABYAI, *BRIEF, f"notify=['{box.url}']")
        done = process.wait().ok()
        [told] = box.messages
    assert told["title"] == "ludus: run tiny-1 is complete"
    assert told["type"] == "success"
    assert "evaluate/after: evaluate/success" in told["message"]
    assert_no_secret(ludus, done.all + process.stderr.read_text())
    assert "- json://***" in (ludus.run() / "config.yaml").read_text()


def test_a_failed_and_an_interrupted_run_are_told(ludus: Ludus) -> None:
    with inbox() as box:
        notify = f"notify=['{box.url}']"
        fails = "strike('ludus.train.learner:Learner.train_step', 1, 'full')"
        ludus("train", BABYAI, *BRIEF, notify, setup=fails)
        stops = "strike('ludus.train.learner:Learner.train_step', 1, 'terminate')"
        done = ludus("train", "--resume", "tiny-1", notify, setup=stops)
        failed, interrupted = box.messages
    assert failed["title"] == "ludus: run tiny-1 failed"
    assert failed["type"] == "failure"
    assert "resume with: ludus train --resume tiny-1" in failed["message"]
    assert interrupted["title"] == "ludus: run tiny-1 interrupted"
    assert done.code == 143


@pytest.mark.parametrize("how", variants(["SIGKILL", "ludus kill"], ["SIGKILL"]))
def test_a_killed_run_is_told(ludus: Ludus, how: str) -> None:
    hangs = "import signal, time\nfrom ludus.train.learner import Learner\n"
    hangs += "def step(*_, **__):\n    signal.signal(15, signal.SIG_IGN)\n"
    hangs += "    import sys; print('hangs', file=sys.stderr, flush=True); time.sleep(600)\n"
    hangs += "Learner.train_step = step\n"
    with inbox() as box:
        process = ludus.start("train", BABYAI, "notify=[$TOLD]", setup=hangs, env={"TOLD": box.url})
        process.until("hangs")
        if how == "SIGKILL":
            os.kill(process.pid, signal.SIGKILL)
        else:
            ludus("kill", "tiny-1", "--grace", "0.2").ok()
        told = box.wait()
        process.wait()
    assert told["title"] == "ludus: run tiny-1 died"
    assert told["type"] == "failure"
    assert "killed, or out of memory" in told["message"]
    assert "- $TOLD" in (ludus.run() / "config.yaml").read_text()
    assert_no_secret(ludus, process.stderr.read_text())


def test_a_url_that_fails_leaves_the_end_of_the_run_as_it_is(ludus: Ludus) -> None:
    urls = "notify=['json://hunter2:x@127.0.0.1:9']"
    done = ludus("train", BABYAI, *BRIEF, urls).ok()
    assert "notify: not sent: json://***: the message was not accepted" in done.err
    assert "run tiny-1 is complete" in done.out
    assert "a notification was not sent" in (ludus.run() / "log.jsonl").read_text()
    assert_no_secret(ludus, done.all)
    again = ludus("train", "--resume", "tiny-1", "sft.steps=3").ok()
    assert "notify.0: json://*** is masked" in again.err


def test_wrong_urls_are_refused_before_a_run_starts(ludus: Ludus, tmp_path: Path) -> None:
    for value, said in (
        ("[slak://hunter2]", "override notify=***: notify.0: apprise knows no scheme 'slak'"),
        ("[slack://hunter2]", "apprise cannot read this URL of slack"),
        ("slack://hunter2", "notify must be a list (of text)"),
        ("[$UNSET_NAME]", "notify.0: the environment variable UNSET_NAME is not set"),
    ):
        done = ludus("train", BABYAI, f"notify={value}").refused(2, said)
        assert "hunter2" not in done.all
    assert not (ludus.cwd / "runs").exists()
