"""A run that was killed and resumed is, bit for bit, the run that was not."""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import pytest
from harness import BABYAI, Done, Ludus, Zygote

LORA = ["model.lora={rank: 2, dropout: 0.1}", "sft.optimizer.lr=0.02"]

# Where each attempt at the run is killed: a function, which call of it, and before or after it.
# They follow one another, so the run dies at every stage, and goes on after each death.
KILLS = {
    "migrating the store": ("sqlalchemy.engine.default:DefaultDialect.do_execute", 12, "kill"),
    "naming the run": ("ludus.launch:create_run", 1, "kill after"),
    "entering it in the store": ("ludus.store.store:RunStore.create_run", 1, "kill"),
    "demonstrations": ("ludus.progress:Display.tick", 5, "kill"),
    "the tokenizer, aside": ("ludus.runs:shutil.rmtree", 2, "kill"),
    "the tokenizer, in place": ("ludus.pipeline:write_folder", 1, "kill after"),
    "the first SFT step": ("ludus.train.learner:Learner.train_step", 3, "kill"),
    "between store and metrics": ("ludus.core.metrics:MetricsLog.log", 6, "kill"),
    "a line of metrics": ("ludus.core.metrics:MetricsLog.log", 9, "kill after"),
    "a checkpoint, half-written": ("ludus.train.checkpoint:require_intact", 2, "kill"),
    "a checkpoint, renamed": ("ludus.train.aside:_rename_over", 1, "kill after"),
    "a transaction": ("ludus.store.recording:StepWriter.write", 2, "kill after"),
    "the end of SFT": ("ludus.backends.local:LocalBackend.save", 2, "kill after"),
    "the evaluation before RL": ("ludus.rollout.agent:Agent.play", 5, "kill"),
    "recording that evaluation": ("ludus.pipeline:write_text", 1, "kill"),
    "rewinding, first half": ("ludus.core.metrics:MetricsLog.rewind", 1, "kill after"),
    "rewinding, second half": ("ludus.store.store:RunStore.rewind", 1, "kill after"),
    "a rollout": ("ludus.rollout.agent:Agent.play", 20, "kill"),
    "an RL step": ("ludus.train.learner:Learner.train_step", 2, "kill after"),
    "an evaluation in between": ("ludus.pipeline:write_text", 2, "kill after"),
    "letting go of a checkpoint": ("ludus.train.checkpoint:remove", 1, "kill"),
    "the last RL step": ("ludus.pipeline:TrainingRun.record", 1, "kill"),
    "the last checkpoint": ("ludus.train.aside:_flush", 1, "kill"),
    "the evaluation after RL": ("ludus.rollout.agent:Agent.play", 18, "kill"),
    "timings": ("ludus.launch:write_text", 2, "kill after"),
    "the report": ("ludus.reporting:write_report", 1, "kill"),
    "the report, written": ("ludus.launch:report", 1, "kill after"),
}  # fmt: skip


@pytest.fixture(scope="module")
def reference(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Ludus:
    """A run that nothing disturbed."""
    ludus = Ludus(zygote, tmp_path_factory.mktemp("reference"))
    ludus("train", BABYAI).ok()
    return ludus


def go_on(ludus: Ludus, *argv: str, **kwargs: Any) -> Done:
    """Start the run, or resume it where there is one to resume."""
    if (ludus.run() / "config.yaml").exists():
        return ludus("train", "--resume", "tiny-1", **kwargs)
    folder = ludus.run()
    if folder.exists():
        folder.rmdir()  # killed before it had a configuration: nothing to resume, nothing lost
    return ludus("train", BABYAI, *argv, **kwargs)


def assert_same(ludus: Ludus, reference: Ludus) -> None:
    mine, other = ludus.state(), reference.state()
    for part in other:
        assert mine[part] == other[part], f"{part} differ"


def test_two_runs_of_one_configuration_are_equal(ludus: Ludus, reference: Ludus) -> None:
    ludus("train", BABYAI).ok()
    assert_same(ludus, reference)
    steps = {step["at"][:2] for step in reference.state()["steps"]}
    assert {("sft", 23), ("rl", 4), ("evaluate/rl", 2), ("evaluate/after", 0)} <= steps
    moved = [
        line for line in reference.metrics() if line["stage"] == "rl" and line["train/updates"]
    ]
    assert moved, "RL has to change the weights, or this proves little"


def test_killed_in_every_stage_and_resumed_it_is_the_same_run(
    ludus: Ludus, reference: Ludus
) -> None:
    for place, (target, nth, how) in KILLS.items():
        done = go_on(ludus, setup=f"strike({target!r}, {nth}, {how!r})")
        assert done.code == -signal.SIGKILL, f"{place}: not reached\n{done.all}"
    go_on(ludus).ok()
    assert ludus.status() == "completed"
    assert (ludus.run() / "report.html").exists()
    assert_same(ludus, reference)


def test_killed_at_random_times(ludus: Ludus, reference: Ludus) -> None:
    """The whole process group, at times that a seed draws."""
    draw = random.Random(1)
    for _ in range(5):
        if (ludus.run() / "config.yaml").exists():
            process = ludus.start("train", "--resume", "tiny-1")
        else:
            process = ludus.start("train", BABYAI)
        time.sleep(draw.uniform(0.2, 2.0))
        process.signal(signal.SIGKILL)
        process.wait()
    go_on(ludus).ok()
    assert_same(ludus, reference)
