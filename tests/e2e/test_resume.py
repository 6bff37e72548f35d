"""A run that was killed and resumed is, bit for bit, the run that was not."""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest
from harness import BABYAI, Done, Ludus, Zygote

LORA = ["model.lora={rank: 2, dropout: 0.1}", "sft.optimizer.lr=0.02"]

# The place of each kill of the run: a function, which call of it, and before or after it.
# They follow one another, so the run dies at every stage, and goes on after each death.
KILLS = {
    "migrating the store": ("sqlalchemy.engine.default:DefaultDialect.do_execute", 12, "kill"),
    "naming the run": ("ludus.pipeline.launch:create_run", 1, "kill after"),
    "entering it in the store": ("ludus.store.store:RunStore.create_run", 1, "kill"),
    "demonstrations": ("ludus.pipeline.monitoring.progress:Display.tick", 5, "kill"),
    "the tokenizer, beside its place": ("ludus.core.files:_flush_folder", 1, "kill"),
    "the tokenizer, in place": ("ludus.core.files:_replace_folder", 1, "kill after"),
    "the first SFT step": ("ludus.train.learner:Learner.train_step", 3, "kill"),
    "between store and metrics": ("ludus.telemetry.metrics:MetricsLog.log", 6, "kill"),
    "a line of metrics": ("ludus.telemetry.metrics:MetricsLog.log", 9, "kill after"),
    "a checkpoint, half-written": ("ludus.train.checkpoint.store:require_intact", 2, "kill"),
    "a checkpoint, renamed": ("ludus.core.files:_replace_folder", 1, "kill after"),
    "a transaction": ("ludus.store.recording:StepWriter.write", 2, "kill after"),
    "the end of SFT": ("ludus.backends.local:LocalBackend.save", 1, "kill after"),
    "the evaluation before RL": ("ludus.rollout.collect:run_episode", 5, "kill"),
    "recording that evaluation": ("ludus.pipeline.training:atomic_write", 1, "kill"),
    "rewinding, first half": ("ludus.telemetry.metrics:MetricsLog.rewind", 1, "kill after"),
    "rewinding, second half": ("ludus.store.store:RunStore.rewind", 1, "kill after"),
    "a rollout": ("ludus.rollout.collect:run_episode", 20, "kill"),
    "an RL step": ("ludus.train.learner:Learner.train_step", 2, "kill after"),
    "an evaluation in between": ("ludus.pipeline.training:atomic_write", 2, "kill after"),
    "letting go of a checkpoint": ("ludus.train.checkpoint.store:remove_folder", 1, "kill"),
    "the last RL step": ("ludus.pipeline.training:Trainer.record", 1, "kill"),
    "the last checkpoint": ("ludus.core.files:_flush_folder", 1, "kill"),
    "the evaluation after RL": ("ludus.rollout.collect:run_episode", 18, "kill"),
    "timings": ("ludus.pipeline.launch:atomic_write", 2, "kill after"),
    "the report": ("ludus.report.collect:write_report", 1, "kill"),
    "the report, written": ("ludus.pipeline.launch:report", 1, "kill after"),
}  # fmt: skip


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
        line
        for line in reference.metrics()
        if line["stage"] == "rl" and line["train/optimizer_steps"]
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


@pytest.mark.slow
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


def test_interrupted_once_it_saves_twice_it_stops_at_once(ludus: Ludus, reference: Ludus) -> None:
    """Ctrl-C everywhere: outside of stages, in SFT, in a rollout, twice, in an evaluation."""
    again = "ludus train --resume tiny-1"
    process = ludus.start("train", BABYAI)
    process.until("demonstrations: 40 episodes")
    process.signal(signal.SIGINT)
    process.wait().refused(130, f"stopped; resume with: {again}")
    assert ludus.status() == "interrupted"

    interrupt = "strike('ludus.train.learner:Learner.train_step', 3, 'interrupt')"
    go_on(ludus, setup=interrupt).refused(130, "finishing this step, then saving", again)
    assert ludus.status() == "interrupted"
    assert [path.name for path in (ludus.run() / "checkpoints").iterdir()] == ["sft-000003"]

    twice = "strike('ludus.train.learner:Learner.train_step', 3, 'interrupt twice')"
    lost = "lost: the running step and 1 complete step of sft without a checkpoint"
    goes_on = f"`{again}` goes on after step 4 of sft"
    go_on(ludus, setup=twice).refused(130, "finishing this step", f"{lost}; {goes_on}", again)
    assert ludus.metrics()[-1]["step"] == 4, "it stopped inside of step 5"

    rollout = "strike('ludus.rollout.collect:run_episode', 10, 'interrupt')"
    go_on(ludus, setup=rollout).refused(130, again)
    rollout = "strike('ludus.rollout.collect:run_episode', 20, 'interrupt')"
    go_on(ludus, setup=rollout).refused(130, "finishing this step", again)
    go_on(ludus).ok()
    assert_same(ludus, reference)
    assert ludus.status() == "completed"


def test_a_complete_run_is_left_alone_and_may_be_given_more_steps(
    ludus: Ludus, reference: Ludus
) -> None:
    shutil.copytree(reference.cwd / "runs", ludus.cwd / "runs")
    files = {path: path.stat().st_mtime_ns for path in ludus.run().rglob("*") if path.is_file()}
    done = ludus("train", "--resume", "tiny-1").ok()
    assert "was complete already" in done.err
    after = {path: path.stat().st_mtime_ns for path in ludus.run().rglob("*") if path.is_file()}
    assert {path for path in files if files[path] != after[path]} <= {ludus.run() / ".lock"}
    assert_same(ludus, reference)

    more = ("rl.steps=7", "rollout.temperature=0.9", "evaluate.num_tasks=3")
    done = ludus("train", "--resume", "tiny-1", *more).ok()
    assert "changed: rl.steps from 5 to 7" in done.err
    assert "changed: rollout.temperature from 1.0 to 0.9" in done.err
    assert "resuming after step 5 of rl" in done.err
    rl = [line["step"] for line in ludus.metrics() if line["stage"] == "rl"]
    assert rl == list(range(7))
    assert ludus.state()["steps"][:29] == reference.state()["steps"][:29]
    with ludus.store() as store:
        assert store.run("tiny-1").status == "completed"
    report = (ludus.run() / "report.html").read_text()
    assert "3 tasks of both evaluations; 5 were played in one alone" in report

    ludus("train", "--resume", "tiny-1", "rl=null").refused(2, "rl", "rl-000007")


def test_what_cannot_be_resumed_is_refused(ludus: Ludus, reference: Ludus) -> None:
    shutil.copytree(reference.cwd / "runs", ludus.cwd / "runs")
    before = (ludus.run() / "config.yaml").read_text()
    wrong = ludus("train", "--resume", "tinny-1").refused(2, "tinny-1", "did you mean tiny-1?")
    assert "config" not in wrong.out
    ludus("train", "--resume", "tiny-1", "rl.stepz=8").refused(2, "rl.stepz", "rl.steps")
    ludus("train", "--resume", "tiny-1", "--runs-dir", "nowhere").refused(2, "nowhere")
    ludus("train").refused(2, "give either a recipe or --resume RUN")
    ludus("train", BABYAI, "--resume", "tiny-1").refused(2, "give either a recipe or --resume RUN")
    assert (ludus.run() / "config.yaml").read_text() == before

    more = ("train", "--resume", "tiny-1", "rl.steps=6")
    ludus(*more, "model.architecture.args.hidden_size=48").refused(
        1, "is a checkpoint of another model", "[59, 32]", "[59, 48]"
    )
    assert ludus.status() == "completed", "nothing was discarded"
    assert (ludus.run() / "evaluations" / "after-000000.json").exists()
    ludus("train", "--resume", "tiny-1", "env=textcraft").refused(
        2, "env.name: run tiny-1 is of babyai, not of textcraft", "start a new run"
    )
    ludus("train", "--resume", "tiny-1", "sft.observation_weight=0.5").refused(
        2, "sft.observation_weight: SFT of run tiny-1 has ended (RL is at step 5)", "new run"
    )
    ludus("train", "--resume", "tiny-1", "rl.steps=3").refused(
        2, "rl.steps: run tiny-1 is at RL step 5, so 3 has no effect", "new run"
    )
    ludus("train", "--resume", "tiny-1", "rl.epochs=2", "rl.minibatches=2").refused(
        2, "rl.epochs, rl.minibatches: RL of run tiny-1 has ended (after step 5)", "new run"
    )
    assert ludus.status() == "completed"
    assert_same(ludus, reference)
    ludus(*more, "tasks.train.args.num_tasks=65").refused(1, "another task list")
    assert (ludus.run() / "config.yaml").read_text() == before, "what failed at once is not kept"


def test_sft_ends_no_earlier_than_it_has_come(ludus: Ludus) -> None:
    kill = "strike('ludus.train.learner:Learner.adapt', 4, 'kill')"
    short = ["rl=null", "tasks.heldout=null", "report=false", "checkpoint.every=1", "sft.steps=6"]
    assert ludus("train", BABYAI, *short, setup=kill).code == -signal.SIGKILL
    ludus("train", "--resume", "tiny-1", "sft.steps=2").refused(
        2, "sft.steps: run tiny-1 is at SFT step 3 and cannot end at 2", "sft.steps=3 ends"
    )
    ludus("train", "--resume", "tiny-1", "sft.steps=3").ok()
    assert [line["step"] for line in ludus.metrics() if line["stage"] == "sft"] == [0, 1, 2]


def test_one_process_owns_a_run(ludus: Ludus) -> None:
    """The second is refused and changes nothing; readers are not disturbed, nor disturb."""
    # Steps of milliseconds would remove the newest checkpoint while it is evaluated.
    first = ludus.start("train", BABYAI, "rl.steps=500", "checkpoint.keep_last=500")
    first.until("rl: 500 steps")
    config = (ludus.run() / "config.yaml").read_text()
    second = ludus("train", "--resume", "tiny-1", "rl.steps=2")
    second.refused(1, f"run tiny-1 is in use by process {first.pid}")
    assert (ludus.run() / "config.yaml").read_text() == config
    assert ludus.status() == "running"
    for reader in (
        ("runs",),
        ("show", "tiny-1"),
        ("evaluate", "tiny-1", "--num-tasks", "4"),
        ("export", "tiny-1", "all.jsonl"),
        ("checkpoint", "list", "tiny-1"),
        ("checkpoint", "export", "tiny-1", "hf", "--checkpoint", "sft-000024"),
    ):
        ludus(*reader).ok()
    first.signal(signal.SIGINT)
    first.wait().refused(130)
    steps = [line["step"] for line in ludus.metrics() if line["stage"] == "rl"]
    assert steps == list(range(len(steps)))
    assert len(steps) > 1


def test_damaged_checkpoints(ludus: Ludus, reference: Ludus) -> None:
    shutil.copytree(reference.cwd / "runs", ludus.cwd / "runs")
    weights = ludus.run() / "checkpoints" / "rl-000005" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    found = ludus("checkpoint", "check", "tiny-1")
    assert found.code == 1
    assert "rl-000005/model.safetensors" in found.out

    more = ("train", "--resume", "tiny-1", "rl.steps=6")
    ludus(*more).refused(1, "rl-000005", "model.safetensors", "rl-000004", "--skip-damaged")
    assert weights.read_bytes() == content
    done = ludus(*more, "--skip-damaged").ok()
    assert "resuming after step 4 of rl" in done.err
    ludus("checkpoint", "check", "tiny-1").ok()
    rl = [step for step in ludus.state()["steps"] if step["at"][0] == "rl"]
    mine = [step for step in reference.state()["steps"] if step["at"][0] == "rl"]
    assert rl[:5] == mine, "falling back does step 5 again, to the same bits"


def killed_twice_it_is_the_same(ludus: Ludus, undisturbed: Ludus, settings: Sequence[str]) -> None:
    """Killed in training and before the report, a run ends with the bits of an undisturbed one."""
    undisturbed("train", BABYAI, *settings).ok()
    for target, nth in (
        ("ludus.train.learner:Learner.train_step", 7),
        ("ludus.pipeline.launch:report", 1),
    ):
        done = go_on(ludus, *settings, setup=f"strike({target!r}, {nth}, 'kill')")
        assert done.code == -signal.SIGKILL, done.all
    go_on(ludus).ok()
    assert_same(ludus, undisturbed)


@pytest.mark.slow
def test_adapters_with_dropout_resume_too(
    ludus: Ludus, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Dropout draws from torch's global generator, whose state has to come back as well."""
    killed_twice_it_is_the_same(ludus, Ludus(zygote, tmp_path_factory.mktemp("lora")), LORA)
    tensors = ludus.state()["checkpoints"]["rl-000005/model.safetensors"]
    assert tensors
    assert all("lora_" in name for name in tensors)


MEASURED = ["sft.until={success: 0.9, patience: 2, every: 4, num_tasks: 4, samples_per_task: 2}"]


@pytest.mark.slow
def test_a_measured_end_of_sft_resumes_too(
    ludus: Ludus, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> None:
    killed_twice_it_is_the_same(ludus, Ludus(zygote, tmp_path_factory.mktemp("until")), MEASURED)
    steps = [step["at"][:2] for step in ludus.state()["steps"]]
    assert ("evaluate/sft", 4) in steps
    assert ("evaluate/sft", 8) in steps


FALLING = [
    "sft.until={success: 0.01, every: 4, num_tasks: 8, samples_per_task: 4}",
    "sft.optimizer.schedule=wsd",
    "checkpoint.every=1",
    "rl=null",
]


@pytest.mark.slow
def test_a_rate_that_falls_before_the_measured_end_resumes_too(
    ludus: Ludus, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> None:
    undisturbed = Ludus(zygote, tmp_path_factory.mktemp("falling"))
    done = undisturbed("train", BABYAI, *FALLING).ok()
    found = re.search(r"the rate falls until it ends, after step (\d+)", done.all)
    assert found, done.all
    last = int(found[1])
    rates = [m["train/lr"] for m in undisturbed.metrics() if m["stage"] == "sft"]
    assert len(rates) == last < 24, "SFT has to end early, or this proves little"
    assert rates[-1] < rates[-2] < max(rates)
    assert f"sft: ends after step {last}: " in done.all

    strike = f"strike('ludus.pipeline.training:Trainer._save', {last}, 'kill')"
    killed = go_on(ludus, *FALLING, setup=strike)
    assert killed.code == -signal.SIGKILL, killed.all
    steps = [m["step"] for m in ludus.metrics() if "train/lr" in m]
    assert max(steps) == last - 1, "killed while the rate falls"
    go_on(ludus).ok()
    assert_same(ludus, undisturbed)


@pytest.mark.slow
def test_a_rate_that_follows_the_kl_resumes_too(
    ludus: Ludus, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> None:
    held = ["rl.optimizer.target_kl=1e-4", "rl.minibatches=2"]
    undisturbed = Ludus(zygote, tmp_path_factory.mktemp("kl"))
    undisturbed("train", BABYAI, *held).ok()
    scales = {m["train/rate_scale"] for m in undisturbed.metrics() if "train/rate_scale" in m}
    assert len(scales) > 2, "the rate has to move, or this proves little"
    killed = go_on(ludus, *held, setup="strike('ludus.train.learner:Learner.adapt', 28, 'kill')")
    assert killed.code == -signal.SIGKILL, killed.all
    assert any(line["stage"] == "rl" for line in ludus.metrics()), "killed within RL"
    go_on(ludus).ok()
    assert_same(ludus, undisturbed)


LEFT = [
    "sft.until={success: 0.01, every: 4, num_tasks: 8, samples_per_task: 4}",
    "rl.steps=3",
    "rl.steps_per_unused_sft_step=0.5",
]


@pytest.mark.slow
def test_steps_that_sft_leaves_to_rl_are_resumed_too(
    ludus: Ludus, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> None:
    undisturbed = Ludus(zygote, tmp_path_factory.mktemp("left"))
    done = undisturbed("train", BABYAI, *LEFT).ok()
    found = {step["at"][:2] for step in undisturbed.state()["steps"]}
    last = max(step for stage, step in found if stage == "evaluate/sft")
    steps = 3 + (24 - last) // 2
    assert steps > 6, "SFT has to end early, or this proves little"
    assert f"rl: {steps - 3} more steps in the time that SFT has left, {steps} in all" in done.all
    assert max(step for stage, step in found if stage == "rl") == steps - 1

    killed = go_on(ludus, *LEFT, setup="strike('ludus.pipeline.training:Trainer._save', 4, 'kill')")
    assert killed.code == -signal.SIGKILL, killed.all
    assert any(line["stage"] == "rl" for line in ludus.metrics()), "killed within RL"
    go_on(ludus).ok()
    assert_same(ludus, undisturbed)

    fewer = ludus("train", "--resume", "tiny-1", "rl.steps_per_unused_sft_step=0.1")
    assert fewer.code == 2
    assert f"run tiny-1 is at RL step {steps}, so 3 and the " in fewer.all
    assert " that SFT has left have no effect" in fewer.all


@pytest.mark.parametrize("mode", ["float32", "stochastic_rounding"])
@pytest.mark.slow
def test_weights_in_bfloat16_resume_too(
    ludus: Ludus, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory, mode: str
) -> None:
    """Masters and the random bits of a rounded step come back."""
    half = ["model.dtype=bfloat16", f"learner.master_weights={mode}"]
    killed_twice_it_is_the_same(ludus, Ludus(zygote, tmp_path_factory.mktemp("half")), half)
    tensors = ludus.state()["checkpoints"]["rl-000005/optimizer.safetensors"]
    assert any(name.endswith("/master") for name in tensors) == (mode == "float32")


def test_changed_code_of_a_plug_in_is_told_on_resume(ludus: Ludus) -> None:
    file = ludus.cwd / "own_env.py"
    code = (
        "import rewards\nfrom ludus.envs.babyai.env import BabyAI\nclass Own(BabyAI):\n    pass\n"
    )
    file.write_text(code)
    (ludus.cwd / "rewards.py").write_text("BONUS = 1")
    own = ["env.name=own_env:Own", "sft.steps=1", "demonstrations.num_episodes=4", "rl=null"]
    ludus("train", BABYAI, *own, "report=false", "tasks.heldout=null").ok()
    resume = ("train", "--resume", "tiny-1")
    same = ludus(*resume, "sft.steps=2").ok()
    ludus(*resume, "sft.episodes_per_step=3").refused(2, "has ended (after step 2)", "no effect")
    assert "changed since the run started" not in same.err
    file.write_text(code + "\n# another reward\n")
    told = ludus(*resume, "sft.steps=3").ok()
    assert "changed since the run started: the code of env own_env:Own;" in told.err
    (ludus.cwd / "rewards.py").write_text("BONUS = 2")
    told = ludus(*resume, "sft.steps=4").ok()
    assert "started: the code of env own_env:Own (rewards.py);" in told.err
