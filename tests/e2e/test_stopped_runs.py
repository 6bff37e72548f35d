"""SIGINT and SIGTERM: saved, resumable, one sentence, the exit code of the signal."""

from __future__ import annotations

import os
import signal
import time
from itertools import product
from pathlib import Path

import pytest
from harness import BABYAI, Done, Ludus
from variants import variants

AGAIN = "ludus train --resume tiny-1"
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
TRAIN_STEP = "ludus.train.learner:Learner.train_step"
AHEAD = [
    "rl.max_staleness=1",
    "rollout.deterministic=false",
    "rl.algorithm={name: grpo, args: {importance_cap: 2.0}}",
]
EPISODE = "ludus.rollout.collect:run_episode"


def one_sentence(done: Done, number: int) -> str:
    """The command ended by the signal, with one line about it and no traceback."""
    done.refused(128 + number)
    [line] = [line for line in done.err.splitlines() if "stopped" in line]
    assert done.err.rstrip().endswith(line), done.err
    assert len(done.err.splitlines()) < 25, done.err
    return line


@pytest.mark.slow
def test_sigterm_saves_and_the_run_goes_on_to_the_same_bits(ludus: Ludus, reference: Ludus) -> None:
    """In demonstrations, SFT, an evaluation, a rollout, twice in a step, in the last evaluation."""
    for place, nth, how, said in (
        ("ludus.pipeline.monitoring.progress:Display.tick", 5, "terminate", ""),
        ("ludus.pipeline.build:make_tokenizer", 1, "terminate", ""),
        (TRAIN_STEP, 3, "terminate", "finishing this step"),
        (TRAIN_STEP, 3, "terminate twice", "finishing this step"),
        (EPISODE, 3, "terminate", ""),
        (EPISODE, 20, "terminate", "finishing this step"),
        ("ludus.pipeline.launch:report", 1, "terminate", ""),
    ):
        argv = ["train", "--resume", "tiny-1"] if ludus.run().exists() else ["train", BABYAI]
        done = ludus(*argv, setup=f"strike({place!r}, {nth}, {how!r})")
        assert f"stopped; resume with: {AGAIN}" in one_sentence(done, signal.SIGTERM), place
        assert said in done.err, place
        assert ludus.status() == "interrupted", place
    ludus("train", "--resume", "tiny-1").ok()
    mine, other = ludus.state(), reference.state()
    for part in other:
        assert mine[part] == other[part], f"{part} differ"


@pytest.mark.parametrize(
    ("number", "twice"),
    variants(product(CODES, ["", " twice"]), [(signal.SIGINT, ""), (signal.SIGTERM, " twice")]),
)
def test_a_signal_in_an_evaluation_is_one_sentence(ludus: Ludus, number: int, twice: str) -> None:
    """The evaluation before RL has many episodes at work, each in a task of its own."""
    many = ["rollout.concurrency=64", "tasks.heldout.args.num_tasks=64", "sft.steps=1"]
    how = ("interrupt" if number == signal.SIGINT else "terminate") + twice
    done = ludus("train", BABYAI, *many, setup=f"strike({EPISODE!r}, 40, {how!r})")
    assert f"stopped; resume with: {AGAIN}" in one_sentence(done, number)
    assert ludus.status() == "interrupted"


@pytest.mark.parametrize("number", CODES)
@pytest.mark.slow
def test_one_signal_in_the_demonstrations_is_one_sentence(ludus: Ludus, number: int) -> None:
    """The terminal sends Ctrl-C to the expert's worker processes too: also while they start."""
    many = [
        "demonstrations.num_episodes=50000",
        "tasks.train.args.num_tasks=50000",
        "tasks.heldout.args.first_seed=90000",
    ]
    for argv, wait_s in ((["train", BABYAI, *many], 0.3), (["train", "--resume", "tiny-1"], 4)):
        process = ludus.start(*argv, "demonstrations.num_workers=3")
        process.until("demonstrations: 50000")
        time.sleep(wait_s)
        process.signal(number)
        assert f"stopped; resume with: {AGAIN}" in one_sentence(process.wait(), number)
        assert not (ludus.run() / "demonstrations.jsonl").exists()


@pytest.mark.parametrize("number", CODES)
def test_evaluate_stops(reference: Ludus, number: int) -> None:
    how = "interrupt" if number == signal.SIGINT else "terminate"
    done = reference("evaluate", "tiny-1", setup=f"strike({EPISODE!r}, 3, {how!r})")
    assert one_sentence(done, number) == "ludus: stopped"
    assert reference.status() == "completed"


@pytest.mark.parametrize("number", variants(CODES, [signal.SIGTERM]))
def test_a_brief_run_leaves_nothing(ludus: Ludus, number: int) -> None:
    how = "interrupt" if number == signal.SIGINT else "terminate"
    done = ludus("verify", BABYAI, setup=f"strike({TRAIN_STEP!r}, 1, {how!r})")
    assert one_sentence(done, number) == "ludus: stopped"
    assert not (ludus.cwd / "runs").exists()


def test_playing_ahead_ends_by_sigterm(ludus: Ludus) -> None:
    take = "ludus.rollout.prefetch:PrefetchSource.take"
    done = ludus("train", BABYAI, *AHEAD, setup=f"strike({take!r}, 3, 'terminate')")
    one_sentence(done, signal.SIGTERM)
    assert "finishing this step" in done.err
    assert (ludus.run() / "checkpoints" / "rl-000003").exists()
    twice = f"strike({take!r}, 2, 'terminate twice')"
    one_sentence(ludus("train", "--resume", "tiny-1", setup=twice), signal.SIGTERM)
    assert ludus.status() == "interrupted"
    said = '<span class="bad">interrupted</span>'
    ludus("report", "tiny-1").ok()
    assert said in (ludus.run() / "report.html").read_text()
    ludus("train", "--resume", "tiny-1").ok()
    assert said not in (ludus.run() / "report.html").read_text()


HANGS = """
import sys, time
from ludus.train.trainer import Trainer
original = Trainer.score
calls = []
def score(self, *args):
    calls.append(args)
    if len(calls) == 2:
        print("an endless step", file=sys.stderr, flush=True)
        time.sleep(3600)
    return original(self, *args)
Trainer.score = score
"""
"""The learner's thread never ends the second step of RL."""


@pytest.mark.parametrize(
    "number", variants([*CODES, signal.SIGHUP], [signal.SIGINT, signal.SIGHUP])
)
def test_the_second_signal_does_not_wait_for_the_learner_s_thread(
    ludus: Ludus, number: int
) -> None:
    process = ludus.start("train", BABYAI, "sft=null", "checkpoint.every=1", *AHEAD, setup=HANGS)
    process.until("an endless step")
    os.kill(process.pid, number)
    process.until("finishing this step")
    os.kill(process.pid, number)
    done = process.wait()
    assert f"stopped; resume with: {AGAIN}" in one_sentence(done, number)
    if number != signal.SIGHUP:  # its terminal is gone
        assert f"lost: the running step; `{AGAIN}` goes on after step 1 of rl" in done.err
    assert ludus.status() == "interrupted"
    ludus("checkpoint", "check", "tiny-1").ok()
    assert [path.name for path in (ludus.run() / "checkpoints").iterdir()] == ["rl-000001"]
    done = ludus("train", "--resume", "tiny-1", "rl.steps=2").ok()
    assert "Traceback" not in done.all


@pytest.mark.parametrize("number", variants(CODES, [signal.SIGTERM]))
def test_the_server_of_the_vllm_sampler_is_ended(ludus: Ludus, number: int) -> None:
    """A program that never answers stands for vLLM during its startup, which takes minutes."""
    python = ludus.cwd / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\necho $$ >{ludus.cwd}/pid\nsleep 600\n')
    python.chmod(0o755)
    slow = [f"sampler={{name: vllm, args: {{python: {python}}}}}", "rollout.deterministic=false"]
    process = ludus.start("train", BABYAI, *slow, "sft.steps=1")
    pid = ludus.cwd / "pid"
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text().strip()):
        assert time.monotonic() < deadline, process.stderr.read_text()
        time.sleep(0.02)
    os.kill(process.pid, number)
    one_sentence(process.wait(), number)
    assert ludus.status() == "interrupted"
    assert not Path(f"/proc/{pid.read_text().strip()}").exists(), "the server is still there"


def test_generating_data_stops_and_says_how_it_goes_on(ludus: Ludus) -> None:
    generate = ["generate-data", "data", "babyai", "level=GoToLocalS5N2", "--num-tasks"]
    done = ludus(*generate, "40", setup="strike('ludus.data.journal:Journal.add', 5, 'terminate')")
    done.refused(143, "stopped", "the same command continues")
    assert not (ludus.cwd / "data" / "data.jsonl").exists()
    ludus(*generate, "40").ok()


UPLOADS = """
import signal, sys
from ludus.store.mirror.sync import RunMirror
push = RunMirror._push
def told(self):
    status = self._store.run(self._folder.id).status
    print(f"upload of a run that is {status}", file=sys.stderr, flush=True)
    push(self)
    if status == "interrupted":
        signal.raise_signal(signal.SIGINT)
        print("after the signal", file=sys.stderr, flush=True)
RunMirror._push = told
"""
"""Tells of each upload; Ctrl-C comes during the last one of an interrupted run."""


def test_another_signal_ends_the_upload_of_a_stopped_run(ludus: Ludus) -> None:
    command = ("train", BABYAI, f"mirror=file://{ludus.cwd}/copy")
    once = f"{UPLOADS}strike({TRAIN_STEP!r}, 1, 'terminate')"
    done = ludus(*command, setup=once)
    assert f"stopped; resume with: {AGAIN}" in one_sentence(done, signal.SIGTERM)
    assert "upload of a run that is interrupted" in done.err
    assert "after the signal" not in done.err
    twice = f"{UPLOADS}strike({TRAIN_STEP!r}, 1, 'terminate twice')"
    done = ludus(*command, setup=twice)
    assert f"stopped; resume with: {AGAIN}" in one_sentence(done, signal.SIGTERM)
    assert "upload" not in done.err.partition("finishing this step")[2], "it was not at once"
    assert ludus.status() == "interrupted"
