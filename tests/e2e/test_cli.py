"""Every verb of the command line, on one whole run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from harness import BABYAI, Ludus
from transformers import AutoModelForCausalLM, AutoTokenizer

from ludus.config.load import load_config
from ludus.models.samplers.base import SamplingParams
from ludus.models.samplers.engine import InProcessSampler

FILES = {
    "config.yaml", "demonstrations.jsonl", "demonstrations.dropped.jsonl", "tokenizer",
    "checkpoints", "evaluations", "metrics.jsonl", "log.jsonl", "report.html", "timings.json",
    "budget.json", ".lock", "code.json", "splits.json", "run.json",
    "findings.json",  # five steps of RL show no gain
}  # fmt: skip


def test_a_run_leaves_its_files_rows_and_report(reference: Ludus) -> None:
    assert {path.name for path in reference.run().iterdir()} == FILES
    config = load_config(reference.run() / "config.yaml")
    assert config == load_config(BABYAI)
    names = {path.name for path in (reference.run() / "checkpoints").iterdir()}
    assert {"sft-000024", "rl-000004", "rl-000005"} <= names

    lines = reference.metrics()
    assert [line["step"] for line in lines if line["stage"] == "sft"] == list(range(24))
    assert [line["step"] for line in lines if line["stage"] == "rl"] == list(range(5))
    assert all(line["rollout/episodes"] == 16 for line in lines if line["stage"] == "rl")
    sft = [line["train/loss"] for line in lines if line["stage"] == "sft"]
    assert sft[-1] < sft[0] / 2
    versions = [line["train/policy_version"] for line in lines if line["stage"] in ("sft", "rl")]
    assert versions == list(range(1, 30))

    with reference.store() as store:
        run = store.run("tiny-1")
        assert (run.status, run.error) == ("completed", None)
        assert run.config == config.model_dump(mode="json")
        assert {"ludus", "python", "torch", "transformers"} <= run.versions.keys()
        assert len(list(store.trajectories("tiny-1", "rl"))) == 5 * 16
        assert len(list(store.trajectories("tiny-1", "evaluate/after"))) == 8
        for record in store.records("tiny-1", "rl", 0):
            sampled = [s for s in record.trajectory.segments if s.sampled]
            assert all(segment.policy_version == 24 for segment in sampled)

    page = (reference.run() / "report.html").read_text()
    after = json.loads((reference.run() / "evaluations" / "after-000000.json").read_text())
    assert f"{100 * after['success']['value']:.1f}" in page
    assert "before RL" in page
    assert "after RL" in page
    assert "GoToLocalS5N2" in page
    assert "Best of the first RL step" in page or "best of the first RL step" in page


@pytest.mark.slow
def test_run_as_a_module_a_second_run_gets_another_id(tmp_path: Path) -> None:
    """The one test that pays for a fresh interpreter: the command as a user starts it."""
    recipe = ["rl=null", "sft.steps=2", "demonstrations.num_episodes=6", "tasks.heldout=null"]
    command = [sys.executable, "-m", "ludus", "train", BABYAI, *recipe]
    (tmp_path / "runs" / "tiny-1").mkdir(parents=True)
    (tmp_path / "runs" / "tiny-1" / "config.yaml").touch()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "run tiny-2 is complete: runs/tiny-2/report.html" in done.stdout
    assert "# differs from the defaults:\nname: " in done.stderr
    assert "all settings: runs/" in done.stderr
    assert (tmp_path / "runs" / "tiny-2" / "report.html").exists()


def test_findings_are_shown(reference: Ludus) -> None:
    """Five steps of RL do not show a gain: the diagnosis says so, wherever the run is shown."""
    text = "success on held-out tasks is not significantly above its start"
    assert f"warning: evaluation at the end: {text}" in reference("show", "tiny-1").ok().out
    page = (reference.run() / "report.html").read_text()
    assert "Success on held-out tasks is not significantly above" in page
    assert "ludus show tiny-1 evaluate/after-000000/" in page
    assert "Success over RL steps" in page
    log = (reference.run() / "log.jsonl").read_text()
    assert '"kind": "evaluation"' in log


def test_runs_and_show(reference: Ludus, tmp_path: Path) -> None:
    listed = reference("runs").ok().out
    assert re.search(r"tiny-1 .*completed", listed)
    shown = reference("show", "tiny-1").ok().out
    assert "evaluate/after" in shown
    assert "success" in shown

    with reference.store() as store:
        assert all("time/elapsed_s" in step.metrics for step in store.steps("tiny-1"))
        row = next(iter(store.trajectories("tiny-1", "rl", 0)))
    rollout = reference("show", "tiny-1", row.id).ok().out
    assert "mission: go to" in rollout
    assert "sampled" in rollout
    assert "+ " in rollout, "what was sampled is told apart"
    assert row.status.value in rollout

    listed = reference("show", "tiny-1", "rl-000000").ok().out
    assert row.id in listed
    assert "rl-000000: " in listed
    assert "evaluate/after-000000: " in reference("show", "tiny-1", "--failed").ok().out
    assert "train/padding" in reference("show", "tiny-1", "--metrics").ok().out
    (tmp_path / "link").symlink_to(reference.cwd / "runs" / "tiny-1")
    for path in ("runs/tiny-1", str(tmp_path / "link")):
        assert reference("show", path).ok().out == reference("show", "tiny-1").ok().out
    reference("show", "runs/tiny-1/checkpoints").refused(2, "it is not a run's")
    reference("show", "runs/tiny-1", "--runs-dir", "others").refused(2, "--runs-dir others has no")
    assert "train/padding" not in shown
    reference("show", "tiny-1", row.id, "--failed").refused(2, "--failed needs a stage, a step")
    reference("show", "tiny-1", "rl-000000", "--metrics").refused(2, "--metrics has no effect")
    reference("show", "tiny-1", "rl-000099").refused(2, "no episodes at rl-000099")

    reference("show", "tiny-2").refused(2, "'tiny-2'", "did you mean tiny-1?")
    reference("show", "tiny-1", row.id + "x").refused(2, f"did you mean {row.id}?")
    reference("runs", "--runs-dir", "elsewhere").refused(2, "elsewhere holds no runs yet")


def test_export(reference: Ludus, tmp_path: Path) -> None:
    jsonl, parquet, sft = (tmp_path / name for name in ("all.jsonl", "all.parquet", "sft.jsonl"))
    told = reference("export", "tiny-1", jsonl).ok().out
    rows = [json.loads(line) for line in jsonl.read_text().splitlines()]
    assert f"{len(rows)} lines in {jsonl}" in told
    assert {row["stage"] for row in rows} == {
        "sft", "evaluate/before", "rl", "evaluate/rl", "evaluate/after"
    }  # fmt: skip
    assert any("go to" in segment["text"] for segment in rows[0]["segments"])

    reference("export", "tiny-1", parquet, "--format", "parquet").ok()
    table = pq.read_table(parquet)
    assert table.num_rows == len(rows)
    reference("export", "tiny-1", tmp_path / "steps.jsonl", "--what", "steps").ok()
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 24 + 5 + 4

    reference("export", "tiny-1", sft, "--what", "sft", "--min-score", "0.5").ok()
    shown = [json.loads(line) for line in sft.read_text().splitlines()]
    assert shown
    assert all(row["reward"] >= 0.5 for row in shown)

    reference("export", "tiny-1", jsonl, "--format", "csv").refused(2, "csv", "jsonl")
    reference("export", "tiny-1", "/proc/nowhere/x.jsonl").refused(
        1, "cannot write /proc/nowhere/x.jsonl"
    )


def test_evaluate(reference: Ludus) -> None:
    before = reference.state()
    one = reference("evaluate", "tiny-1", "--samples", "2", "--temperature", "1").ok().out
    assert "rl-000005" in one
    assert "pass@2" in one
    two = reference(
        "evaluate", "tiny-1", "--checkpoint", "rl-000005", "--against", "sft-000024"
    ).ok()
    assert "rl-000005, policy version 29, greedy" in two.out
    assert "sft-000024, policy version 24, greedy" in two.out
    assert "Bonett-Price" in two.out
    same = reference("evaluate", "tiny-1", "--against", "latest", "--num-tasks", "2").ok().out
    assert "tiny-1/rl-000005 is both models: nothing to compare" in same
    assert "Bonett-Price" not in same
    assert reference.state() == before, "evaluating writes nothing to the run"

    reference("evaluate", "tiny-1", "--checkpoint", "rl-5").refused(2, "'rl-5'", "rl-000005")
    reference("evaluate", "tiny-1", "--num-tasks", "0").refused(2, "--num-tasks")
    reference("evaluate", "tiny-1", "--temperature=-1").refused(2, "temperature")


def test_greedy_evaluation_agrees_with_the_run_s_own(reference: Ludus) -> None:
    own = json.loads((reference.run() / "evaluations" / "after-000000.json").read_text())
    again = reference("evaluate", "tiny-1").ok().out
    assert f"{100 * own['success']['value']:.1f}" in again


def test_report_again(reference: Ludus) -> None:
    page = reference.run() / "report.html"
    told = page.read_text()
    page.unlink()
    assert reference("report", "tiny-1").ok().out.strip() == "runs/tiny-1/report.html"
    assert page.read_text() == told


def test_config(ludus: Ludus) -> None:
    assert "rollout.max_turns" in ludus("config").ok().out
    one = ludus("config", "rl.steps").ok().out
    assert "Policy iterations" in one
    ludus("config", "rl.stepz").refused(2, "rl.stepz", "did you mean rl.steps?")


@pytest.mark.parametrize("name", ["babyai", "textcraft"])
def test_check_env(ludus: Ludus, name: str) -> None:
    args = ["level=GoToLocalS5N2"] if name == "babyai" else []
    assert f"{name} follows the protocol" in ludus("check-env", name, *args, "--tasks", 2).ok().out


def test_check_env_refuses(ludus: Ludus) -> None:
    ludus("check-env", "babyay").refused(2, "babyay", "did you mean babyai?")
    ludus("check-env", "babyai", "level").refused(2, "'level'", "key=value")
    ludus("check-env", "babyai", "levle=GoToObj").refused(2, "levle", "level")


@pytest.mark.slow  # tests/diagnostics/test_doctor.py runs all checks
def test_doctor(ludus: Ludus) -> None:
    done = ludus("doctor")
    assert done.code in (0, 1), "1 where something that this machine lacks is needed"
    assert "Traceback" not in done.all
    assert "torch" in done.out


def test_checkpoint_list_and_check(reference: Ludus) -> None:
    listed = reference("checkpoint", "list", "tiny-1").ok().out
    for name in ("sft-000024", "rl-000005"):
        assert name in listed
    assert "all files are intact" in reference("checkpoint", "check", "tiny-1").ok().out
    one = reference.run() / "checkpoints" / "rl-000005"
    assert "all files are intact" in reference("checkpoint", "check", one).ok().out
    reference("checkpoint", "check", "tony-1").refused(2, "tony-1", "tiny-1")


async def test_an_exported_policy_samples_the_same_tokens(reference: Ludus, tmp_path: Path) -> None:
    """With transformers' own `generate`, greedily, as ludus' sampler does."""
    reference("checkpoint", "export", "tiny-1", tmp_path / "hf").ok()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    with reference.store() as store:
        group = store.groups("tiny-1", "evaluate/after", 0)[0]
    prompt = group.trajectories[0].segments[0].token_ids
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": group.trajectories[0].segments[0].message.content}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert tokenizer.encode(text, add_special_tokens=False) == prompt

    sampler = InProcessSampler(model, context_length=256)
    sampler.open("s")
    params = SamplingParams(max_tokens=20, temperature=0.0)
    completion = await sampler.sample(prompt, params, session="s")
    generated = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=20, eos_token_id=[]
    )
    assert generated[0, len(prompt) :].tolist() == completion.token_ids
    recorded = group.trajectories[0].segments[1].token_ids
    assert completion.token_ids[: len(recorded)] == recorded, "and as the run's evaluation did"

    refused = reference("checkpoint", "export", "tiny-1", tmp_path / "hf")
    refused.refused(2, str(tmp_path / "hf"), "--overwrite")
    reference("checkpoint", "export", "tiny-1", tmp_path / "hf", "--overwrite").ok()


def test_help_and_usage(ludus: Ludus) -> None:
    assert "train" in ludus("--help").ok().out
    assert re.fullmatch(r"ludus \d+\.\d+\.\d+\n", ludus("--version").ok().out)
    ludus("trian").refused(2)
    ludus("train", "nowhere.yaml").refused(2, "nowhere.yaml")
