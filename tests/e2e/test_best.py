"""The best checkpoint of a run: measured by its evaluations, named `best` in every verb."""

from __future__ import annotations

import json

import pytest
from harness import BABYAI, Ludus

from ludus.services.model.policy import ModelOverrides, load_policy

QUICK = ["sft.steps=2", "demonstrations.num_episodes=6", "report=false"]


def manifest(ludus: Ludus, checkpoint: str) -> dict[str, object]:
    path = ludus.run() / "checkpoints" / checkpoint / "manifest.json"
    return dict(json.loads(path.read_text()))


def success(ludus: Ludus, evaluation: str) -> float:
    path = ludus.run() / "evaluations" / f"{evaluation}.json"
    return float(json.loads(path.read_text())["success"]["value"])


def test_every_evaluation_measures_the_checkpoint_of_its_weights(reference: Ludus) -> None:
    measured = {
        "sft-000024": "before-000000",
        "rl-000002": "rl-000002",  # saved for its evaluation: checkpoint.every is 4
        "rl-000004": "rl-000004",
        "rl-000005": "after-000000",
    }
    kept = {path.name for path in (reference.run() / "checkpoints").iterdir()}
    assert {"sft-000024", "rl-000004", "rl-000005"} <= kept <= measured.keys()
    for name in kept:
        found = manifest(reference, name)
        assert found["metric"] == success(reference, measured[name]), name
        assert found["metric_name"] == "evaluate/success"
    best = max(measured, key=lambda name: (success(reference, measured[name]), name != "sft"))
    assert success(reference, measured[best]) == max(
        float(str(manifest(reference, name)["metric"])) for name in kept
    ), "the best is kept"


@pytest.mark.slow
def test_training_tasks_that_end_sft_measure_no_checkpoint(ludus: Ludus) -> None:
    until = "sft.until={success: 1.0, every: 2, num_tasks: 2, samples_per_task: 1}"
    ludus("train", BABYAI, "rl=null", "sft.steps=8", until, "report=false").ok()
    measured = {
        path.name: manifest(ludus, path.name).get("metric")
        for path in (ludus.run() / "checkpoints").iterdir()
    }
    assert measured["sft-000008"] == success(ludus, "after-000000")
    assert [value for name, value in measured.items() if name != "sft-000008"] == [None] * (
        len(measured) - 1
    )


@pytest.mark.slow
def test_best_and_latest_name_a_checkpoint_in_every_verb(
    reference: Ludus, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lines = reference("checkpoint", "list", "tiny-1").ok().out.splitlines()
    assert "evaluate/success 0." in lines[-1] or "evaluate/success 1" in lines[-1]
    assert [line for line in lines if "latest" in line] == [lines[-1]]
    (best,) = (line.partition(":")[0] for line in lines if line.endswith((" best", "best, latest")))
    top = max((reference.run() / "checkpoints").iterdir(), key=_rank)
    assert best == top.name

    evaluated = reference("evaluate", "tiny-1", "--checkpoint", "best", "--against", "latest").ok()
    assert f"{best}, policy version" in evaluated.out
    assert "rl-000005, policy version 29" in evaluated.out
    out = tmp_path_factory.mktemp("exported")
    reference("checkpoint", "export", "tiny-1", out / "best", "--checkpoint", "best").ok()
    assert best in (out / "best" / "README.md").read_text()
    runs = str(reference.cwd / "runs")
    for name in ("tiny-1/best", f"{runs}/tiny-1/best"):
        assert load_policy(name, runs, ModelOverrides()).origin == f"tiny-1/{best}"
    assert load_policy("tiny-1", runs, ModelOverrides()).origin == "tiny-1/rl-000005"
    reference("checkpoint", "export", "tiny-1", out / "x", "--checkpoint", "bset").refused(
        2, "no checkpoint 'bset'", "did you mean best?"
    )
    reference("serve", "model", "tiny-1/rl-5").refused(2, "'rl-5'", "rl-000005")
    reference("serve", "model", "tony-1/best").refused(2, "no run 'tony-1/best'")


def _rank(folder: object) -> tuple[float, int]:
    found = json.loads((folder / "manifest.json").read_text())  # type: ignore[operator]
    return found["metric"], found["sequence"]


def test_the_final_evaluation_selects_and_replaces(ludus: Ludus) -> None:
    """Without evaluations in between, only the stages' ends are measured, after their saves."""
    settings = ["rl.steps=2", "evaluate.every=0", "checkpoint.every=1"]
    told = ludus("train", BABYAI, *QUICK, *settings).ok().err
    assert [line[:26] for line in told.splitlines() if " tasks" in line and "success" in line] == [
        "held-out, before RL, greed",
        "held-out, after RL, greedy",
    ]
    assert manifest(ludus, "rl-000002")["metric"] == success(ludus, "after-000000")
    assert manifest(ludus, "sft-000002")["metric"] == success(ludus, "before-000000")
    assert manifest(ludus, "rl-000001")["metric"] is None
    assert "all files are intact" in ludus("checkpoint", "check", "tiny-1").ok().out


@pytest.mark.slow
def test_a_kill_while_the_metric_is_written_leaves_the_same_bits(
    ludus: Ludus, reference: Ludus
) -> None:
    at = "ludus.train.checkpoint.store:atomic_write"
    for number, moment in ((1, "kill"), (1, "kill after"), (2, "kill"), (1, "kill after")):
        argv = ["--resume", "tiny-1"] if ludus.run().exists() else [BABYAI]
        assert ludus("train", *argv, setup=f"strike({at!r}, {number}, {moment!r})").code == -9
        assert "all files are intact" in ludus("checkpoint", "check", "tiny-1").ok().out
    assert manifest(ludus, "rl-000005")["metric"] is not None, "killed after the last evaluation"
    ludus("train", "--resume", "tiny-1").ok()
    assert ludus.state() == reference.state()


def test_without_a_metric_none_is_the_best(ludus: Ludus) -> None:
    ludus("train", BABYAI, *QUICK, "rl=null", "tasks.heldout=null").ok()
    assert "no checkpoint has a metric" in ludus("checkpoint", "list", "tiny-1").ok().err
    ludus("checkpoint", "export", "tiny-1", "hf", "--checkpoint", "best").refused(
        2, "run tiny-1: no checkpoint has a metric", "tasks.heldout", "sft-000002"
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["checkpoint.metric=evaluate/sucess"], ["checkpoint.metric", "evaluate/success?"]),
        (["checkpoint.metric=rollout/reward", "rl=null"], ["checkpoint.metric", "'rollout/rew"]),
        (
            ["checkpoint.metric=evaluate/score", "tasks.heldout=null", "evaluate.every=0"],
            ["checkpoint.metric: evaluate/score is never measured", "tasks.heldout"],
        ),
        (
            ["rl.min_success_to_stop=0.5", "evaluate.every=0"],
            ["rl.min_success_to_stop", "`evaluate.every` is 0"],
        ),
        (
            ["rl.min_success_to_stop=0.5", "evaluate.every=5"],
            ["every` is 5, and RL has at most 5 steps"],
        ),
        (["rl.min_success_to_stop=0.5", "tasks.heldout=null"], ["set tasks.heldout"]),
        (["rl.min_signal=0.1", "rl.algorithm=ppo"], ["rl.min_signal has no effect with ppo"]),
        (["rl.min_signal=0.1"], ["rl.min_signal has no effect", "RL has 5 (`rl.steps`)"]),
        (["evaluate.samples_per_task=3"], ["evaluate.samples_per_task: 3", "temperature"]),
        (["sft=null", "rl=null"], ["sft, rl: both are null", "ludus evaluate"]),
        (["rl.algorithm=sft"], ["rl.algorithm: sft", "grpo"]),
        (["rollout.temperature=0"], ["rollout.temperature: 0 is greedy", "1.0"]),
        (["rl.minibatches=17"], ["rl.minibatches: 17 exceed the 16 episodes"]),
        (["sft.data=chats.jsonl"], ["demonstrations: sft.data replaces them"]),
        (['rollout.stop=[""]'], ["rollout: `stop` must not hold an empty string"]),
    ],
)
def test_a_setting_without_effect_is_refused(
    ludus: Ludus, overrides: list[str], said: list[str]
) -> None:
    ludus("train", BABYAI, *overrides).refused(2, *said)
    assert not (ludus.cwd / "runs").exists()


def test_evaluate_refuses_several_greedy_samples(reference: Ludus) -> None:
    reference("evaluate", "tiny-1", "--samples", "3").refused(
        2, "--samples: 3 episodes of each task are equal at --temperature 0"
    )
