"""Faults end in a clear message, a non-zero exit code, and a run that can be resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from harness import BABYAI, NO_PREFLIGHT, Ludus
from safetensors.torch import load_file
from transformers import AutoTokenizer

from ludus.models.chat.template import load_template

BROKEN = Path(__file__).parents[1] / "support" / "broken_envs.py"


def echo(ludus: Ludus, env: str) -> str:
    rollout = {"max_tokens_per_turn": 4, "step_deadline_s": 2.0}
    return ludus.recipe(
        "echo",
        context_length=32,
        env=f"{BROKEN}:{env}",
        tasks={"train": {"name": "env", "args": {"num_tasks": 8}}},
        rollout={**rollout, "max_retries": 0, "concurrency": 16},
        rl={"steps": 6, "groups_per_step": 8, "group_size": 3},
        checkpoint={"every": 3},
    )


def sums(ludus: Ludus) -> str:
    """Single turns on `tasks.jsonl`."""
    return ludus.recipe(
        "sums",
        context_length=64,
        judge="answer",
        tasks={"train": {"name": "json", "args": {"path": "tasks.jsonl"}}},
        rollout={"max_tokens_per_turn": 4},
        rl={"steps": 1, "groups_per_step": 2, "group_size": 2},
    )


# Faults in the user's files


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        (["rollout.max_truns=3"], 2, ["rollout.max_truns", "did you mean rollout.max_turns?"]),
        (["rl.steps=many"], 2, ["rl.steps must be a whole number", "'many'"]),
        (["rl.steps=0"], 2, ["rl.steps", ">= 1", "got 0"]),
        (["rl.stepz=3", "sft.steps=no"], 2, ["rl.stepz", "sft.steps"]),
        (["env=null"], 2, ["`demonstrations` needs an `env`"]),
        (["model.path=somewhere"], 2, ["exactly one of `path` and `architecture`"]),
        (["demonstrations=null"], 2, ["`sft` needs `demonstrations`"]),
        (["rollout.max_tokens_per_turn=256"], 2, ["must be below `model.context_length`"]),
        (["env.name=babyay"], 2, ["babyay", "did you mean babyai?"]),
        (["env.args.levle=GoToObj"], 2, ["levle", "did you mean"]),
        (["env.args.level=GoToNowhere"], 2, ["GoToNowhere"]),
        (["rl.algorithm=grop"], 2, ["grop", "did you mean grpo?"]),
        (["metrics=[tensorbord]"], 2, ["tensorbord", "did you mean tensorboard?"]),
        (["tasks.train.args.tiers=[GoToLokal]"], 2, ["GoToLokal"]),
        (
            ["tasks.train.args.num_tasks=1100", "tasks.heldout.args.first_seed=10"],
            1,
            ["training has the tasks of 1000 seeds in a row", "tasks.allow_overlap: true"],
        ),
        (["model.architecture.args.num_kv_heads=3"], 2, ["num_kv_heads", "does not divide"]),
        (["model.device=gpu"], 2, ["model.device", "'gpu'"]),
        (["model.tokenizer=nowhere/at-all"], 2, ["model.tokenizer", "nowhere/at-all"]),
        (["model.chat_template=nowhere.jinja"], 2, ["nowhere.jinja"]),
        (["store=mysql://x/y"], 2, ["mysql is not supported"]),
        (["runs_dir=/proc/nowhere"], 2, ["runs_dir: cannot create a run in /proc/nowhere"]),
        (["demonstrations=null", "sft.data=nowhere.jsonl"], 1, ["nowhere.jsonl does not exist"]),
        (["rl"], 2, ["rl"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_wrong_configuration(
    ludus: Ludus, changes: list[str], code: int, said: list[str]
) -> None:
    # Not the expert's episodes: where a fault shows only after them, this is faster.
    ludus("train", BABYAI, "demonstrations.num_episodes=2", *changes).refused(code, *said)


def test_a_wrong_recipe(ludus: Ludus) -> None:
    recipe = ludus.cwd / "recipe.yaml"
    recipe.write_text("name: [tiny\n")
    ludus("train", "recipe.yaml").refused(2, "recipe.yaml", "line 2")
    recipe.write_text(Path(BABYAI).read_text().replace("max_turns", "max_truns"))
    ludus("train", "recipe.yaml").refused(
        2, "recipe.yaml: rollout.max_truns is not a key (did you mean rollout.max_turns?)"
    )
    (ludus.cwd / "recipe.py").write_text("def tiny():\n    return 3\n")
    ludus("train", "recipe.py:tiny").refused(2, "recipe.py:tiny")
    ludus("train", "recipe.py:tinny").refused(2, "tinny", "tiny")
    assert not (ludus.cwd / "runs").exists(), "no run was begun"


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_a_setting_without_effect_is_told_with_file_and_line(ludus: Ludus, verb: str) -> None:
    recipe = ludus.cwd / "recipe.yaml"
    text = Path(BABYAI).read_text().replace("checkpoint: {", "checkpoint: {metric: absent, ")
    recipe.write_text(text)
    [line] = [n for n, row in enumerate(text.splitlines(), 1) if "metric: absent" in row]
    ludus(verb, "recipe.yaml", "rollout.temperature=0", "env=babyay").refused(
        2,
        "override env=babyay: env.name: 'babyay' is not a known env (did you mean babyai?)",
        "override rollout.temperature=0: rollout.temperature: 0 is greedy",
    )
    ludus(verb, "recipe.yaml").refused(
        2, "recipe.yaml: checkpoint.metric: 'absent'", f"[line {line}]"
    )


def test_a_quick_test_refuses_a_sink_that_it_leaves_out(ludus: Ludus) -> None:
    ludus("train", BABYAI, "metrics=[tensorbord]", "--quick-test").refused(
        2, "override metrics=[tensorbord]: metrics.0.name", "did you mean tensorboard?"
    )


def test_malformed_lines(ludus: Ludus) -> None:
    good = [{"prompt": f"say {n}", "answer": str(n)} for n in range(3)]
    lines = [*map(json.dumps, good), '{"prompt": "say', '{"prompt": 3, "answer": "x"}']
    (ludus.cwd / "tasks.jsonl").write_text("\n".join(lines))
    sums(ludus)
    refused = ludus("train", "sums.yaml").refused(1, "line 4 is not JSON", "line 5 field 'prompt'")
    assert "tasks.on_bad_line: skip" in refused.err
    done = ludus("train", "sums.yaml", "tasks.on_bad_line=skip").ok()
    assert "tasks.train: 2 malformed lines skipped" in done.err
    log = (ludus.run("sums-1") / "log.jsonl").read_text()
    assert "tasks.jsonl:4: is not JSON" in log
    assert "tasks.jsonl:5: field 'prompt'" in log
    (ludus.cwd / "tasks.jsonl").unlink()
    ludus("train", "sums.yaml").refused(1, "tasks.jsonl does not exist")


def test_malformed_conversations(ludus: Ludus) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = [json.dumps({"messages": turns}), "{", json.dumps({"messages": turns[:1]})]
    (ludus.cwd / "chats.jsonl").write_text("\n".join(lines))
    alone = ["sft.data=chats.jsonl", "sft.steps=1", "rl=null", "tasks.heldout=null"]
    alone += ["demonstrations=null", "sft.episodes_per_step=1"]
    ludus("train", BABYAI, *alone).refused(1, "chats.jsonl", "line 2 is not JSON")
    skip = "tasks.on_bad_line=skip"
    ludus("train", BABYAI, *alone, skip).refused(1, "chats.jsonl:3", "one assistant turn")
    (ludus.cwd / "chats.jsonl").write_text("\n".join(lines[:2]))
    done = ludus("train", BABYAI, *alone, skip).ok()
    assert "sft.data: 1 malformed lines skipped" in done.err


def test_a_tokenizer_without_a_chat_template(reference: Ludus, ludus: Ludus) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reference.run() / "tokenizer")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(ludus.cwd / "plain")
    without = ["model.tokenizer=plain", "model.chat_template=null"]
    ludus("train", BABYAI, *without).refused(2, "chat template", "model.chat_template")


# Parts that do not fit


def test_prompts_that_never_fit_stop_the_run(ludus: Ludus) -> None:
    told = "no room for a turn after the first prompt of all 8 tasks"
    ludus("train", echo(ludus, "TooLong")).refused(2, "model.context_length: 32", told)
    assert not (ludus.cwd / "runs").exists()
    done = ludus("train", echo(ludus, "TooLong"), setup=NO_PREFLIGHT)
    done.refused(1, "no episode had room for a turn", "model.context_length is 32")
    with ludus.store() as store:
        [reason] = {row.reason for row in store.dropped("echo-1", "rl")}
        assert "model.context_length is 32" in reason
        assert store.run("echo-1").status == "failed"
    assert ludus.metrics("echo-1")[-1]["train/optimizer_steps"] == 0


def test_heldout_prompts_that_never_fit_stop_the_run_before_it_trains(ludus: Ludus) -> None:
    heldout = "tasks.heldout={name: env, args: {num_tasks: 3, first_seed: 100}}"
    done = ludus("train", echo(ludus, "TooLong"), heldout, setup=NO_PREFLIGHT)
    done.refused(1, "nothing to evaluate", "none of them scored", "context_length is 32")


def test_training_on_nothing_is_told(ludus: Ludus) -> None:
    """Nearly greedy rollouts are all alike, so no group has a signal."""
    done = ludus("train", echo(ludus, "Echo"), "rollout.temperature=0.001").ok()
    assert "warning: rl step 4: 100 % of the groups of the last 5 steps have equal" in done.err
    assert "`rollout.temperature` (now 0.001)" in done.err
    assert all(line["train/optimizer_steps"] == 0 for line in ludus.metrics("echo-1"))
    done = ludus("train", echo(ludus, "Echo")).ok()
    assert "have equal rewards" not in done.err
    assert any(line["train/optimizer_steps"] for line in ludus.metrics("echo-2"))


def test_conversations_too_long_for_the_context(ludus: Ludus) -> None:
    short = ["model.context_length=72", "rl=null", "sft.steps=2", "tasks.heldout=null"]
    done = ludus("train", BABYAI, *short).ok()
    assert "of 40 conversations skipped, the first (babyai/" in done.err
    assert "tokens exceed model.context_length = 72" in done.err
    with ludus.store() as store:
        dropped = store.dropped("tiny-1", "sft")
        assert f"sft: {len(dropped)} of 40" in done.err
        assert all("tokens exceed" in row.reason for row in dropped)
    short[0] = "model.context_length=24"
    ludus("train", BABYAI, *short).refused(2, "no room for a turn after the first prompt of all")
    done = ludus("train", BABYAI, *short, setup=NO_PREFLIGHT)
    done.refused(1, "sft: 40 of 40 conversations skipped")


# Failures during a run


@pytest.mark.slow
def test_an_environment_that_breaks_for_some_tasks(ludus: Ludus) -> None:
    """It raises, hangs, returns rubbish: these episodes are put on record, the others train."""
    ludus("train", echo(ludus, "Moody"), "rl.steps=1").ok()
    with ludus.store() as store:
        rows = list(store.trajectories("echo-1", "rl", 0))
        ended = Counter(row.status.value for row in rows)
        assert (ended["error_env"], ended["error_timeout"]) == (6, 3)
        assert ended["completed"] + ended["truncated_length"] == 15
        reasons = [row.reason for row in store.dropped("echo-1", "rl") if row.step == 0]
    for words, count in {
        "error_env: the environment's reset raised RuntimeError: the level file is gone": 3,
        "error_env: reset returned a dict; it has to return an Observation": 3,
        "error_timeout: the environment's reset took longer than rollout.step_deadline_s": 3,
        "nothing was sampled: the conversation has 203 tokens before turn 1": 3,
    }.items():
        assert sum(reason.startswith(words) for reason in reasons) == count, (words, reasons)
    line = ludus.metrics("echo-1")[0]
    assert line["rollout/dropped"] >= 12
    assert "the level file is gone" in ludus("show", "echo-1").ok().out
    page = (ludus.run("echo-1") / "report.html").read_text()
    assert "error_env" in page


def test_an_environment_without_tools(ludus: Ludus) -> None:
    done = ludus("train", echo(ludus, "Echo"), "rollout.format=tools")
    done.refused(2, "rollout.format: environment", "has no tools; use plain or react")


def test_methods_that_are_not_async(ludus: Ludus) -> None:
    recipe = echo(ludus, "Plain")
    ludus("train", recipe).refused(1, "reset is not async", "write `async def reset`")
    ludus("train", echo(ludus, "PlainStep"), "rl.steps=1").ok()
    assert "step is not async" in ludus("show", "echo-1").ok().out
    for name, method in (("Plain", "reset"), ("PlainStep", "step")):
        done = ludus("check-env", f"{BROKEN}:{name}")
        assert done.code == 1
        assert f"write `async def {method}`" in done.out


def test_an_environment_that_is_gone(ludus: Ludus) -> None:
    """Before anything trains, where it has to speak; else after five steps."""
    recipe = echo(ludus, "Gone")
    done = ludus("train", recipe).refused(1, "opens no episode", "the level file is gone")
    plain = ["model.tokenizer=tokenizer", "model.chat_template=null"]
    ludus("train", echo(ludus, "Echo"), "rl.steps=1").ok()
    shutil.copytree(ludus.run("echo-1") / "tokenizer", ludus.cwd / "tokenizer")
    done = ludus("train", echo(ludus, "Gone"), *plain)
    done.refused(1, "5 steps in a row: no episode could be trained on: 24 x error_env")
    assert ludus.status("echo-2") == "failed"
    heldout = "tasks.heldout={name: env, args: {num_tasks: 3, first_seed: 100}}"
    ludus("train", echo(ludus, "Gone"), *plain, heldout).refused(
        1, "nothing to evaluate", "the level file is gone"
    )


def test_code_that_exits_is_a_failure(ludus: Ludus) -> None:
    """Exit code 0 would tell of a complete run."""
    (ludus.cwd / "tasks.jsonl").write_text('{"prompt": "say 1", "answer": "1"}\n')
    sums(ludus)
    (ludus.cwd / "own.py").write_text(
        "import sys\n\nclass Quits:\n    def log(self, *values: object) -> None:\n"
        "        sys.exit()\n\n    rewind = close = lambda self, *values: None\n"
    )
    done = ludus("train", "sums.yaml", "metrics=[{name: 'own.py:Quits'}]")
    done.refused(1, "run sums-1 failed", "SystemExit", "[own.py, line 5]", "must not exit")
    assert ludus.status("sums-1") == "failed"


OWN = """\
import math
from dataclasses import replace

from ludus.core.types import Score
from ludus.train.algorithms.credit import Outcome
from ludus.train.algorithms.table import GRPO


def undefined():
    return replace(GRPO, name="undefined", advantages=Outcome(lambda r: [math.nan] * len(r)))


class Undefined:
    async def __call__(self, task, trajectory):
        return Score(value=math.nan)
"""


def test_advantages_and_scores_that_are_not_finite_are_a_failure(ludus: Ludus) -> None:
    """An own algorithm's stop the step that has them; a judge's leave no episode to train on."""
    (ludus.cwd / "own.py").write_text(OWN)
    own = ["train", echo(ludus, "Echo"), "rl.algorithm=own.py:undefined"]
    ludus(*own).refused(2, "`advantages` of undefined returned nan", "made-up episodes")
    done = ludus(*own, setup=NO_PREFLIGHT)
    done.refused(1, "rl, step 0: rl.algorithm: `advantages` of undefined returned nan", "finite")
    judged = ["train", echo(ludus, "Echo"), "judge=own.py:Undefined", "rl.steps=2"]
    ludus(*judged).refused(2, "judge: own.py:Undefined gives no score for a made-up episode")
    done = ludus(*judged, setup=NO_PREFLIGHT)
    done.refused(1, "rl: 2 steps in a row: no episode could be trained on", "24 x unscorable")
    assert ludus.status("echo-2") == "failed"


def test_a_loss_that_is_not_finite(ludus: Ludus) -> None:
    """The batch is saved, the weights of the last checkpoint are whole, a lower rate goes on."""
    done = ludus("train", BABYAI, "sft.optimizer.lr=1e30", "checkpoint.every=1", "rl=null")
    done.refused(1, "nan", "its batch is saved in runs/tiny-1/failed-batch-", "lower optimizer.lr")
    assert "ludus train --resume tiny-1" in done.err
    assert ludus.status() == "failed"
    [folder] = (ludus.run()).glob("failed-batch-*")
    assert load_file(folder / "micro-batch-000.safetensors")
    ludus("checkpoint", "check", "tiny-1").ok()


# The disk and the store


@pytest.fixture
def small_disk(ludus: Ludus) -> Iterator[Ludus]:
    """`runs` on a disk of a few megabytes, where one may be mounted."""
    runs = ludus.cwd / "runs"
    runs.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(runs)]
    mounted = shutil.which("mount") and not subprocess.run(command, capture_output=True).returncode
    yield ludus
    if mounted:
        subprocess.run(["umount", str(runs)], check=True)


FULL = {
    "demonstrations": ("ludus.pipeline.build:generate_demonstrations", 1),
    "the tokenizer": ("ludus.pipeline.build:atomic_folder", 1),
    "the store": ("ludus.store.store:RunStore.record_step", 3),
    "the metrics": ("ludus.telemetry.metrics:MetricsLog.log", 1),
    "a checkpoint": ("ludus.backends.local:LocalBackend.save", 2),
    "rewinding": ("ludus.telemetry.metrics:MetricsLog.rewind", 1),
    "an evaluation": ("ludus.pipeline.training:atomic_write", 1),
    "the RL checkpoint": ("ludus.backends.local:LocalBackend.save", 1),
    "timings": ("ludus.pipeline.launch:atomic_write", 2),
    "the report": ("ludus.pipeline.launch:report", 1),
}


@pytest.mark.slow
def test_a_full_disk_wherever_it_strikes(small_disk: Ludus, reference: Ludus) -> None:
    """Each time: clear words, nothing lost; once there is room, the same bits as ever."""
    argv: tuple[str, ...] = ("train", BABYAI)
    for place, (target, nth) in FULL.items():
        done = small_disk(*argv, setup=f"strike({target!r}, {nth}, 'full')")
        assert done.code == 1, f"{place}: {done.all}"
        done.refused(1)
        assert any(
            words in done.err for words in ("No space left", "File too large", "disk is full")
        ), f"{place}: {done.err}"
        (small_disk.run().parent / "filler").unlink(missing_ok=True)
        if (small_disk.run() / "checkpoints").exists():
            assert "all files are intact" in small_disk("checkpoint", "check", "tiny-1").ok().out
        argv = ("train", "--resume", "tiny-1")
    small_disk(*argv).ok()
    mine, other = small_disk.state(), reference.state()
    for part in other:
        assert mine[part] == other[part], f"{part} differ"


IMPATIENT = (
    "from ludus.store import RunStore\nRunStore.open.__func__.__kwdefaults__['timeout_s'] = 0.2"
)


@pytest.mark.slow
def test_a_locked_store(ludus: Ludus, reference: Ludus) -> None:
    """At the start, and in the middle of a run; once it is free, the run goes on."""
    (ludus.cwd / "runs").mkdir()
    database = sqlite3.connect(ludus.cwd / "runs" / "ludus.db", isolation_level=None)
    database.execute("BEGIN EXCLUSIVE")
    refused = ludus("train", BABYAI, setup=IMPATIENT)
    refused.refused(1, "ludus.db", "another process holds the lock")
    database.execute("ROLLBACK")

    process = ludus.start("train", BABYAI, "rl.steps=400", setup=IMPATIENT)
    process.until("rl: 400 steps")
    database.execute("BEGIN IMMEDIATE")
    process.wait().refused(1, "another process holds the lock", "ludus train --resume tiny-1")
    database.execute("ROLLBACK")
    database.close()
    ludus("train", "--resume", "tiny-1", "rl.steps=5").ok()
    assert ludus.state()["steps"][:24] == reference.state()["steps"][:24]


def test_a_store_that_is_none(ludus: Ludus) -> None:
    (ludus.cwd / "runs").mkdir()
    (ludus.cwd / "runs" / "ludus.db").write_bytes(b"this is no database, and never was one" * 99)
    for command in (("train", BABYAI), ("runs",), ("show", "tiny-1")):
        ludus(*command).refused(1, "ludus.db", "not an SQLite database")


def swap_two_tokens(path: Path) -> None:
    """Exchange the ids of two words of a tokenizer."""
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = [token for token in vocabulary if token.strip().isalpha()][:2]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(tokenizer))


def test_an_export_has_the_template_of_the_training(ludus: Ludus, reference: Ludus) -> None:
    """`model.chat_template` may differ from the tokenizer's own."""
    shutil.copytree(reference.cwd / "runs", ludus.cwd / "runs")
    template = ludus.run() / "tokenizer" / "chat_template.jinja"
    trained = template.read_text()
    template.write_text(load_template("qwen3"))
    ludus("checkpoint", "export", "tiny-1", "hf").ok()
    assert (ludus.cwd / "hf" / "chat_template.jinja").read_text() == trained
    template.write_text("{% for m in messages %}\n{% endfr %}")
    for verb in (("evaluate", "tiny-1"), ("checkpoint", "export", "tiny-1", "other")):
        ludus(*verb).refused(2, "tokenizer/chat_template.jinja, line 2: Encountered unknown tag")


def test_a_run_that_was_tampered_with(ludus: Ludus, reference: Ludus) -> None:
    shutil.copytree(reference.cwd / "runs", ludus.cwd / "runs")
    config = ludus.run() / "config.yaml"
    told = config.read_text()
    config.write_text(told.replace("max_turns", "max_truns"))
    ludus("train", "--resume", "tiny-1").refused(2, "config.yaml: rollout.max_truns is not a key")
    config.write_text(told)
    checkpoints = ludus.run() / "checkpoints"
    shutil.copytree(checkpoints / "sft-000024", checkpoints / "rl-000006")
    for verb in (("evaluate", "tiny-1"), ("checkpoint", "export", "tiny-1", "hf")):
        ludus(*verb, "--checkpoint", "rl-000006").refused(1, "was saved as sft-000024: rename it")
    done = ludus("checkpoint", "check", "tiny-1")
    assert done.code == 1
    assert "rl-000006/manifest.json is foreign" in done.out
    shutil.rmtree(checkpoints / "rl-000006")
    swap_two_tokens(ludus.run() / "tokenizer" / "tokenizer.json")
    ludus("evaluate", "tiny-1").refused(1, "were trained with another tokenizer")
    ludus("train", "--resume", "tiny-1", "rl.steps=9").refused(1, "with another tokenizer")
    shutil.rmtree(ludus.run() / "tokenizer")
    ludus("evaluate", "tiny-1").refused(2, "has checkpoints, but", "tokenizer is gone: restore")
    ludus("train", "--resume", "tiny-1", "rl.steps=9").refused(2, "tokenizer is gone: restore")
    shutil.rmtree(ludus.run() / "checkpoints")
    ludus("evaluate", "tiny-1").refused(2, "has no checkpoint yet")
    (ludus.run() / "metrics.jsonl").write_text("{}\n")
    ludus("report", "tiny-1").refused(1, "metrics.jsonl: line 1 is not a line of metrics")


def test_a_damaged_evaluation_stops_a_resume_before_it_trains(
    ludus: Ludus, reference: Ludus
) -> None:
    shutil.copytree(reference.cwd / "runs", ludus.cwd / "runs")
    before = ludus.run() / "evaluations" / "before-000000.json"
    before.write_bytes(before.read_bytes()[:20])
    lines = (ludus.run() / "metrics.jsonl").read_text()
    told = ["before-000000.json is no evaluation of a run: restore the file"]
    ludus("train", "--resume", "tiny-1", "rl.steps=9").refused(1, *told)
    ludus("report", "tiny-1").refused(1, *told)
    assert (ludus.run() / "metrics.jsonl").read_text() == lines
    before.unlink()
    ludus("train", "--resume", "tiny-1", "rl.steps=9").ok()


def test_a_damaged_line_of_metrics_stops_a_resume_before_it_loads(
    ludus: Ludus, reference: Ludus
) -> None:
    shutil.copytree(reference.cwd / "runs", ludus.cwd / "runs")
    metrics = ludus.run() / "metrics.jsonl"
    intact = metrics.read_text()
    metrics.write_text("nonsense\n" + intact)
    told = ["metrics.jsonl: line 1 is not a line of metrics", "remove that line"]
    ludus("train", "--resume", "tiny-1", "rl.steps=9").refused(1, *told)
    assert ludus.status() == "completed"
    metrics.write_text(intact)
    ludus("train", "--resume", "tiny-1", "rl.steps=9").ok()


def test_a_complete_run_without_checkpoints_does_not_start_over(
    ludus: Ludus, reference: Ludus
) -> None:
    shutil.copytree(reference.cwd / "runs", ludus.cwd / "runs")
    kept = ludus.run() / "checkpoints"
    kept.rename(ludus.cwd / "elsewhere")
    more = ("train", "--resume", "tiny-1", "rl.steps=9")
    ludus(*more).refused(1, "run tiny-1 is complete, but has no checkpoints in runs/tiny-1/chec")
    kept.write_text("")
    ludus(*more).refused(1, "runs/tiny-1/checkpoints is not a folder: restore")
    assert ludus.status() == "completed"
    kept.unlink()
    (ludus.cwd / "elsewhere").rename(kept)
    (ludus.run() / "metrics.jsonl").unlink()
    done = ludus(*more).ok()
    assert "metrics.jsonl lacks steps before rl-000005: so will the report" in done.err


def test_an_interrupted_run_without_checkpoints_does_not_start_over(ludus: Ludus) -> None:
    more = ("rl.steps=400", "evaluate.every=0", "checkpoint.every=2")
    process = ludus.start("train", BABYAI, *more)
    process.until("rl: 400 steps")
    process.signal(signal.SIGINT)
    process.wait()
    shutil.rmtree(ludus.run() / "checkpoints")
    ludus("train", "--resume", "tiny-1").refused(1, "run tiny-1 is at step", "but has no checkpo")
    for database in (ludus.cwd / "runs").glob("ludus.db*"):
        database.unlink()
    ludus("train", "--resume", "tiny-1").refused(1, "but has no checkpoints")
    with ludus.store() as store:
        assert store.run_ids() == set(), "a refused resume leaves no row that says running"


NOT_FILES = ["timings.json", "findings.json", "budget.json", "log.jsonl", "report.html"]


def test_state_of_a_run_that_is_damaged_is_told_before_anything_changes(
    ludus: Ludus, reference: Ludus
) -> None:
    """Neither a traceback nor a hang, and a complete run stays complete."""
    more = ("train", "--resume", "tiny-1", "rl.steps=9")
    shutil.copytree(reference.cwd / "runs", ludus.cwd / "runs")
    config = ludus.run() / "config.yaml"
    whole = config.read_text()
    config.write_text(whole[: len(whole) // 2])
    push = ("checkpoint", "push", "tiny-1", "me/x", "--license", "mit", "--dry-run")
    for verb in (more, ("report", "tiny-1"), ("evaluate", "tiny-1"), push):
        ludus(*verb).refused(2, "config.yaml: it was cut off after", "restore the file")
    config.rename(ludus.cwd / "config.yaml")
    ludus(*more).refused(2, "run tiny-1: runs/tiny-1/config.yaml is missing: restore it")
    config.write_text(whole)
    for name in NOT_FILES:
        path = ludus.run() / name
        kept = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        for make in (os.mkfifo, os.mkdir):
            make(path)
            ludus(*more).refused(1, f"runs/tiny-1/{name} is not a file")
            assert ludus.status() == "completed"
            path.rmdir() if path.is_dir() else path.unlink()
        if kept is not None:
            path.write_bytes(kept)
    for name in ("run.json", "splits.json", "budget.json", "timings.json", "code.json"):
        path = ludus.run() / name
        kept = path.read_bytes()
        told = "remove it"
        for content in (b"[" * 100_000, b"null", b'{"seconds": NaN, "tokens": 0}'):
            if name not in ("splits.json", "budget.json") and content.startswith(b"{"):
                continue
            path.write_bytes(content)
            ludus(*more).refused(1, name, told)
            assert ludus.status() == "completed"
        path.write_bytes(kept)
    for name in ("run.json", "splits.json", "code.json", "evaluations/before-000000.json"):
        path = ludus.run() / name
        kept = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        ludus(*more).refused(1, name, "remove")
        path.unlink()
        path.write_bytes(kept)
    for name, said in (
        ("demonstrations.jsonl", "remove demonstrations.jsonl, and the expert plays again"),
        ("tokenizer/tokenizer.json", "Restore runs/tiny-1/tokenizer/tokenizer.json"),
    ):
        path = ludus.run() / name
        kept = path.read_bytes()
        path.write_bytes(b'{"a": 1}')
        ludus(*more).refused(2 if "tokenizer" in name else 1, name, said)
        path.write_bytes(kept)
        assert ludus.status() == "completed"
    for name in ("budget.json", "run.json"):
        (ludus.run() / name).unlink()
    done = ludus(*more).ok()
    assert "budget.json is missing: time and tokens count from 0" in done.err
    assert "run.json is missing: checkpoints of another run" in done.err


def test_a_complete_run_stays_so_where_code_fails_before_its_first_step(
    ludus: Ludus, reference: Ludus
) -> None:
    shutil.copytree(reference.cwd / "runs", ludus.cwd / "runs")
    before = (ludus.run() / "config.yaml").read_text()
    raises = "from ludus.pipeline import launch\nlaunch.build_training = None\n"
    done = ludus("train", "--resume", "tiny-1", "rl.steps=9", setup=raises)
    assert done.code != 0
    assert "run tiny-1 stays as it was: complete" in done.err
    assert ludus.status() == "completed"
    assert (ludus.run() / "config.yaml").read_text() == before


def test_damaged_findings_are_told(ludus: Ludus, reference: Ludus) -> None:
    shutil.copytree(reference.cwd / "runs", ludus.cwd / "runs")
    (ludus.run() / "findings.json").write_text('[{"kind"')
    assert "findings.json is damaged" in ludus("show", "tiny-1").ok().err
    assert "findings.json is damaged" in ludus("train", "--resume", "tiny-1", "rl.steps=9").ok().err
    assert "findings.json is damaged" not in ludus("show", "tiny-1").ok().err


def test_a_folder_that_is_removed_while_its_run_trains(ludus: Ludus) -> None:
    gone = """
        import shutil
        from ludus.pipeline.training import Trainer
        record = Trainer.record

        def remove(self, *given):
            shutil.rmtree(self.run.folder.path)
            record(self, *given)

        Trainer.record = remove
    """
    done = ludus("train", BABYAI, setup=dedent(gone))
    done.refused(1, "the run's folder runs/tiny-1 was removed while the run trained")
    assert "--resume" not in done.err


LEAVES = """
import os
from pathlib import Path
from ludus import Env, Message, Observation, StepResult, Task

class Leaves(Env):
    async def reset(self, task):
        return Observation(messages=[Message(role="user", content="say 1")])

    async def step(self, action):
        os._exit(0)

    @classmethod
    def task(cls, tier, seed):
        return Task(id=f"t-{seed}", data={"seed": seed}, tier=tier, source="x")
"""


def test_an_environment_that_ends_its_process(ludus: Ludus) -> None:
    """Exit code 0 would tell of a success."""
    (ludus.cwd / "own.py").write_text(LEAVES)
    done = ludus("check-env", "own.py:Leaves")
    assert (done.code, done.err) == (1, "")
    assert "error: process: the environment ended its process with exit code 0" in done.out
    recipe = ludus.recipe(
        "leaves",
        context_length=32,
        env="own.py:Leaves",
        tasks={"train": {"name": "env", "args": {"num_tasks": 8}}},
        rollout={"max_tokens_per_turn": 4},
        rl={"steps": 1, "groups_per_step": 2, "group_size": 2},
    )
    told = ["env: 'own.py:Leaves' ends its process in an episode of task t-0, with exit code 0"]
    ludus("train", recipe).refused(1, *told)
