"""Runs of other kinds than the reference: single stages, other tasks, models and sinks."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from harness import BABYAI, TEXTCRAFT, Ludus
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from variants import variants


def sums(ludus: Ludus, tier: str) -> str:
    """Single turns on `tasks.jsonl`; `tier` is the key of a task's tier."""
    return ludus.recipe(
        "sums",
        context_length=64,
        architecture="llama",
        judge="answer",
        tasks={"train": {"name": "json", "args": {"path": "tasks.jsonl", "tier": tier}}},
        rollout={"max_tokens_per_turn": 2, "temperature": 1.0},
        rl={
            "algorithm": "rloo",
            "steps": 3,
            "groups_per_step": 6,
            "group_size": 8,
            "optimizer": {"lr": 1.0e-2},
        },
    )


def stages(ludus: Ludus, name: str = "tiny-1") -> list[str]:
    return list(dict.fromkeys(line["stage"] for line in ludus.metrics(name)))


def test_sft_alone_then_rl_on_top_of_it(ludus: Ludus) -> None:
    """A stage that is added on resume starts from what was trained."""
    ludus("train", BABYAI, "rl=null", "sft.steps=6").ok()
    assert stages(ludus) == ["sft", "evaluate/after"]
    done = ludus("train", "--resume", "tiny-1", "rl={steps: 2, groups_per_step: 2, group_size: 2}")
    assert "changed: rl" in done.ok().err
    assert stages(ludus) == ["sft", "evaluate/before", "rl", "evaluate/after"]
    versions = [line["train/policy_version"] for line in ludus.metrics() if line["stage"] == "rl"]
    assert versions == [7, 8]


def test_what_the_policy_can_do_before_sft_is_evaluated_where_asked(ludus: Ludus) -> None:
    """In a run that is killed and resumed once; without RL, SFT's gain is the headline."""
    start = ["evaluate.before_sft=true", "sft.steps=4", "checkpoint.every=1"]
    kill = "strike('ludus.train.learner:Learner.adapt', 3, 'kill')"
    assert ludus("train", BABYAI, *start, "rl.steps=2", setup=kill).code == -signal.SIGKILL
    again = ("train", "--resume", "tiny-1")
    ludus(*again, "evaluate.before_sft=false").refused(2, "evaluate.before_sft: run tiny-1 is at")
    ludus(*again).ok()
    expected = ["evaluate/start", "sft", "evaluate/before", "rl"]
    assert [name for name in stages(ludus) if name != "evaluate/rl"][:4] == expected
    lines = {line["stage"]: line for line in ludus.metrics()}
    assert "evaluate/gain" not in lines["evaluate/start"]
    gains = lines["evaluate/before"], lines["evaluate/start"]
    assert gains[0]["evaluate/gain_from"] == gains[1]["evaluate/success"]
    page = (ludus.run() / "report.html").read_text()
    assert "Step 0: before and after SFT" in page
    assert re.search(r'scope="row">before SFT <small>greedy', page)
    shown = " ".join(ludus("show", "tiny-1").ok().out.split())
    assert re.search(r"held-out success \d+\.\d % before SFT, \d+\.\d % before RL", shown)

    ludus("train", BABYAI, *start, "rl=null", "name=alone").ok()
    page = (ludus.run("alone-1") / "report.html").read_text()
    assert re.search(r"Success on held-out tasks (rose|did not change significantly,) from", page)
    assert "Success, after SFT" in page
    ludus("train", BABYAI, "sft=null", "evaluate.before_sft=true").refused(
        2, "evaluate.before_sft: sft is null"
    )


def test_sft_on_observations_and_rl_with_an_entropy_target(ludus: Ludus) -> None:
    target = "rl.algorithm={name: grpo, args: {entropy_bonus: 0.1, entropy_target: 9.0}}"
    ludus("train", BABYAI, "sft.observation_weight=0.2", "sft.steps=3", target, "rl.steps=1").ok()
    lines = ludus.metrics()
    for line in (line for line in lines if line["stage"] == "sft"):
        unread = line["rollout/episodes"]  # the first token of each: nothing predicts it
        assert line["rollout/sampled_tokens"] < line["train/loss_tokens"]
        assert line["train/loss_tokens"] <= line["train/tokens"] - unread
    [rl] = [line for line in lines if line["stage"] == "rl"]
    assert rl["train/loss_tokens"] <= rl["rollout/sampled_tokens"]
    assert 0 < rl["train/entropy_bonus"] <= 0.1
    faulty = "rl.algorithm={name: grpo, args: {entropy_target: 9.0}}"
    ludus("train", BABYAI, faulty).refused(2, "entropy_target has no effect")


def test_rl_alone_needs_no_expert(ludus: Ludus) -> None:
    """Its tokenizer is trained on what the environment says first."""
    alone = ["demonstrations=null", "sft=null", "rl.steps=2", "evaluate.every=0"]
    ludus("train", BABYAI, *alone).ok()
    assert stages(ludus) == ["evaluate/before", "rl", "evaluate/after"]
    assert not (ludus.run() / "demonstrations.jsonl").exists()
    assert "mission" in (ludus.run() / "tokenizer" / "tokenizer.json").read_text()


def test_textcraft_with_tool_calls(ludus: Ludus) -> None:
    ludus("train", TEXTCRAFT).ok()
    assert stages(ludus, "craft-1") == ["sft", "evaluate/before", "rl", "evaluate/after"]
    with ludus.store() as store:
        shown = next(iter(store.records("craft-1", "sft", 0))).trajectory
        assert shown.segments[1].message is not None
        assert shown.segments[1].message.tool_calls
    found = json.loads((ludus.run("craft-1") / "evaluations" / "after-000000.json").read_text())
    assert set(found["tiers"]) == {"depth-1"}


def test_a_hugging_face_folder_and_its_own_rollouts_as_sft_data(
    reference: Ludus, ludus: Ludus, tmp_path: Path
) -> None:
    """Exports can train again: the policy as `model.path`, its best episodes as `sft.data`."""
    reference("checkpoint", "export", "tiny-1", tmp_path / "policy").ok()
    best = ("--what", "sft", "--min-score", "0.8")
    reference("export", "tiny-1", tmp_path / "best.jsonl", *best).ok()
    lines = (tmp_path / "best.jsonl").read_text().splitlines()
    assert len({json.loads(line)["task_id"] for line in lines}) < len(lines), "episodes of one task"

    model = "model={path: policy, context_length: 256}"
    sft = "sft={data: best.jsonl, steps: 3, episodes_per_step: 64, optimizer: {lr: 0.01}}"
    ludus("train", BABYAI, model, sft, "demonstrations=null", "rl=null").ok()
    with ludus.store() as store:
        first = list(store.records("tiny-1", "sft", 0))
    assert len({record.row.task_id for record in first}) == len(lines), "each line is visited"
    assert first[0].row.task_id.startswith("best.jsonl:")
    before = reference("evaluate", "tiny-1").ok()
    assert "rl-000005" in before.out
    losses = [line["train/loss"] for line in ludus.metrics() if line["stage"] == "sft"]
    fresh = [line["train/loss"] for line in reference.metrics() if line["stage"] == "sft"]
    assert losses[0] < fresh[0] / 3, "it starts from what had been trained"
    start = load_file(tmp_path / "policy" / "model.safetensors")
    end = load_file(ludus.run() / "checkpoints" / "sft-000003" / "model.safetensors")
    assert start.keys() == end.keys()


def test_single_turns_with_a_judge_and_no_environment(ludus: Ludus) -> None:
    words = ["one", "two", "three"]
    rows = [
        {"prompt": f"say {word}", "answer": word, "kind": word, "id": n}
        for n, word in enumerate(words * 4)
    ]
    tasks = ludus.cwd / "tasks.jsonl"
    tasks.write_text("\n".join(map(json.dumps, rows)))
    ludus("train", sums(ludus, "kind")).ok()
    assert stages(ludus, "sums-1") == ["rl"]
    with ludus.store() as store:
        rows_ = list(store.trajectories("sums-1", "rl"))
        assert {row.tier for row in rows_} == set(words)
        assert all(row.num_turns == 1 for row in rows_)
        assert {"correct", "found"} <= rows_[0].scores.keys()
    shown = ludus("show", "sums-1", rows_[0].id).ok().out
    assert "say " in shown


def test_a_task_s_own_judge_comes_before_the_run_s(ludus: Ludus) -> None:
    rows = [{"prompt": "say one", "answer": "one"}]
    (ludus.cwd / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sums(ludus, "id")
    own = "tasks.train.args={path: tasks.jsonl, judge: {name: answer, args: {extract: boxed}}}"
    ludus("train", "sums.yaml", "judge={name: answer, args: {extract: whole}}", own).ok()
    with ludus.store() as store:
        found = {row.scores["found"] for row in store.trajectories("sums-1", "rl")}
    assert found == {0.0}, "nothing is boxed; the run's judge would have taken the whole text"
    ludus("train", "sums.yaml", own.replace("boxed", "bocksed")).refused(
        2, "tasks.train: judge", "bocksed"
    )


def test_all_sinks_together(ludus: Ludus) -> None:
    wandb, prometheus = (
        "{name: wandb, args: {mode: offline}}",
        "{name: prometheus, args: {port: 0}}",
    )
    sinks = f"metrics=[tensorboard, {wandb}, {prometheus}]"
    ludus(
        "train", BABYAI, sinks, "sft.steps=3", "rl.steps=1", "evaluate={}", "tasks.heldout=null"
    ).ok()
    log = (ludus.run() / "log.jsonl").read_text()
    assert "error" not in log.lower(), log
    folders = {path.parent for path in ludus.run().rglob("events.out.tfevents*")}
    found = {folder.name: EventAccumulator(str(folder)).Reload().Tags() for folder in folders}
    assert "train/loss" in found["sft"]["scalars"]
    assert "rollout/reward" in found["rl"]["scalars"]
    assert list(ludus.run().rglob("*.wandb"))


def test_two_runs_share_a_store_by_url(ludus: Ludus) -> None:
    quick = ["rl=null", "sft.steps=1", "tasks.heldout=null", "demonstrations.num_episodes=4"]
    url = f"sqlite:///{ludus.cwd}/other/all.db"
    ludus("train", BABYAI, *quick, f"store={url}").ok()
    assert not (ludus.cwd / "runs" / "ludus.db").exists()
    assert "tiny-1" in ludus("runs", "--store", url).ok().out
    ludus("report", "tiny-1").ok()
    assert "complete already" in ludus("train", "--resume", "tiny-1").ok().err


@pytest.mark.slow
def test_another_runs_folder_and_a_recipe_in_python(ludus: Ludus) -> None:
    """A run is found by its path too, from wherever it is resumed."""
    (ludus.cwd / "recipe.py").write_text(
        "from ludus.config.load import load_config\n"
        f"def tiny():\n    return load_config({BABYAI!r}, ['rl=null', 'sft.steps=2'])\n"
    )
    (ludus.cwd / "deep").mkdir()
    ludus("train", "recipe.py:tiny", "--runs-dir", "deep/runs").ok()
    assert "tiny-1" in ludus("runs", "--runs-dir", "deep/runs").ok().out
    inside = Ludus(ludus.zygote, ludus.cwd / "deep")
    assert "complete already" in inside("train", "--resume", "tiny-1").ok().err
    done = ludus("train", "--resume", "deep/runs/tiny-1", "sft.steps=3").ok()
    assert "resuming after step 2 of sft" in done.err
    assert not (ludus.cwd / "runs").exists()
    interrupt = "strike('ludus.train.learner:Learner.train_step', 1, 'interrupt')"
    done = ludus("train", "--resume", "deep/runs/tiny-1", "sft.steps=9", setup=interrupt)
    done.refused(130, "ludus train --resume tiny-1 --runs-dir deep/runs")


@pytest.mark.slow
def test_a_good_evaluation_ends_the_stage_and_stays_its_end(ludus: Ludus) -> None:
    enough = ["rl.min_success_to_stop=0.01", "rl.steps=9"]
    ludus("train", BABYAI, *enough).ok()
    rl = [line["step"] for line in ludus.metrics() if line["stage"] == "rl"]
    assert rl == [0, 1]
    ludus("train", "--resume", "tiny-1", "rl.steps=8").ok()
    assert [line["step"] for line in ludus.metrics() if line["stage"] == "rl"] == rl
    ludus("train", "--resume", "tiny-1", "rl.min_success_to_stop=null", "rl.steps=3").ok()
    assert [line["step"] for line in ludus.metrics() if line["stage"] == "rl"] == [0, 1, 2]


@pytest.mark.slow
def test_rl_without_signal_ends_and_stays_ended(ludus: Ludus) -> None:
    """`rl.min_signal`, of single steps: the first has a signal in three of four groups, the third
    in one."""
    every_step = "import ludus.pipeline.monitoring.rl_end as end; end.WINDOW = 1"

    def steps() -> list[int]:
        return [line["step"] for line in ludus.metrics() if line["stage"] == "rl"]

    options = ["rl.min_signal=0.4", "rl.steps=9", "evaluate.every=0"]
    ended = ludus("train", BABYAI, *options, setup=every_step).ok()
    assert "rl: ends after step 3: 25 % of the groups" in ended.err
    assert steps() == [0, 1, 2]
    resumed = ludus("train", "--resume", "tiny-1", "rl.steps=8", setup=every_step).ok()
    assert "rl: ended after step 3: 25 % of the groups" in resumed.err
    assert steps() == [0, 1, 2]
    ludus("train", "--resume", "tiny-1", "rl.min_signal=null", "rl.steps=4", setup=every_step).ok()
    assert steps() == [0, 1, 2, 3]


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_by_the_metric_that_is_asked_for(ludus: Ludus) -> None:
    keep = ["checkpoint.metric=rollout/reward", "checkpoint.every=1", "checkpoint.keep_last=1"]
    ludus("train", BABYAI, *keep, "rl.steps=6", "evaluate.every=0").ok()
    rewards = {
        line["step"] + 1: line["rollout/reward"]
        for line in ludus.metrics()
        if line["stage"] == "rl"
    }
    best = max(rewards, key=lambda step: (rewards[step], step))
    names = {path.name for path in (ludus.run() / "checkpoints").iterdir()}
    assert {f"rl-{best:06d}", "rl-000006", "sft-000024"} >= {
        name for name in names if name.startswith("rl")
    }
    assert f"rl-{best:06d}" in names


@pytest.mark.parametrize("algorithm", variants(["grpo", "dr_grpo", "dapo", "rloo"], ["dapo"]))
def test_every_algorithm_trains(ludus: Ludus, algorithm: str) -> None:
    short = ["sft.steps=14", "rl.steps=2", "evaluate.every=0", "tasks.heldout=null"]
    more = [f"rl.algorithm={algorithm}", "rl.epochs=2", "rl.minibatches=2", "report=false"]
    done = ludus("train", BABYAI, *short, *more).ok()
    assert done.out.strip() == "run tiny-1 is complete: runs/tiny-1"
    lines = [line for line in ludus.metrics() if line["stage"] == "rl"]
    assert max(line["train/optimizer_steps"] for line in lines) == 4
    assert not (ludus.run() / "report.html").exists()
