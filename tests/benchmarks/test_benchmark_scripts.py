"""The benchmarks run from their command lines, at toy size."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(name: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, str(FOLDER / name), *options],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def gpu_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    run("gpu.py", "--toy", "--out", str(folder))
    return folder


@pytest.mark.slow
def test_every_case_of_the_gpu_benchmark_measures(gpu_results: Path) -> None:
    facts = json.loads((gpu_results / "gpu.json").read_text())
    limits = facts["limits"]
    assert limits["bandwidth"] > 0
    assert limits["flops"] > 0
    results = {(row["case"], row["model"]): row for row in facts["results"]}
    assert list(results)[:6] == [  # the most important first
        ("recipe", "0.8M"),
        ("decode, batch 4", "toy"),
        ("decode, batch 8", "toy"),
        ("train", "toy"),
        ("GRPO step", "toy"),
        ("init", "toy"),
    ]
    assert len(results) == 13
    assert results["init", "toy"]["rl_step_s"] > 0
    assert "path: model  # starting values" in results["init", "toy"]["recipe"]
    assert results["recipe", "0.8M"]["trains"]
    alone, shared = (
        results[case, "toy"] for case in ("decode, batch 8", "decode, batch 8, shared prompts")
    )
    for row in (alone, shared):
        assert row["decoder"] == "static"  # what a GPU takes, without the graphs
        assert row["of_limit"] == row["tokens_per_s"] / row["limit_tokens_per_s"]
    assert shared["limit_tokens_per_s"] > alone["limit_tokens_per_s"] > 0
    for (case, _), row in results.items():
        if case.startswith("train"):
            assert row["of_limit"] == row["flops"] / row["seconds"] / limits["flops"] > 0
    tree = results["train, shared prompt", "toy"]
    assert tree["computed_tokens_per_s"] < tree["tokens_per_s"]
    assert tree["flops"] < results["train", "toy"]["flops"]
    step = results["GRPO step", "toy"]
    assert step["seconds"] >= step["rollout_s"] > 0


@pytest.mark.slow
def test_the_gpu_page_has_every_case(gpu_results: Path) -> None:
    page = (gpu_results / "gpu.md").read_text()
    assert len(re.findall(r"^\| .* \| (?:toy|toy 2|0.8M) \| ", page, re.MULTILINE)) == 13
    assert "failed: " not in page


@pytest.mark.slow
def test_a_service_beside_its_environment() -> None:
    page = run("env_service.py", "textcraft", "--quick", "--soak", "0.1")
    rows = re.findall(r"^\| (\d+) \| (in process|HTTP|WebSocket) \| ", page, re.MULTILINE)
    assert sorted(rows) == sorted(
        (size, way) for size in ("1", "4") for way in ("in process", "HTTP", "WebSocket")
    )
    [soak] = re.findall(r"^\| \d+ \| [\d,]+ \| (\d+) \| ([\d,]+) \| \d+ \|$", page, re.MULTILINE)
    assert soak == ("0", "2,000")  # none refused, all open


@pytest.mark.slow
def test_a_device_that_is_not_there_is_named() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "gpu.py"), "--device", "xpu:63"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("xpu:63 cannot be used: ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_case_that_fails_dies_or_hangs_is_recorded() -> None:
    script = """
import os, time, torch
import gpu

def fails(bench, shape): raise torch.OutOfMemoryError("17 GB are not there")
def dies(bench, shape): os._exit(3)
def hangs(bench, shape): time.sleep(1000)
def works(bench, shape): return {"error": f"none in {bench.device}"}

bench, worker = gpu.Bench(gpu.TOY_SCALE, torch.device("cpu")), gpu.Worker()
cases = ((fails, 600), (dies, 600), (hangs, 1), (hangs, 0), (works, 600))
print([worker.measure(gpu.Case("", "", m), bench, None, s)["error"] for m, s in cases])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=FOLDER, capture_output=True, text=True, timeout=240
    )
    assert done.stdout.strip() == str(
        [
            "OutOfMemoryError: 17 GB are not there",
            "its process died (exit code 3)",
            "not done after 1 s",
            "no time was left",
            "none in cpu",
        ]
    )


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_sft_and_ppo_beside_their_peers_have_equal_losses() -> None:
    """The program ends with an error where losses differ."""
    pytest.importorskip("trl", reason="TRL is not installed: nothing to compare with")
    told = run("methods.py", "--quick")
    assert re.findall(r"^(SFT|PPO) 0.9 M heavy tail \d+ [\d.]+ ", told, re.MULTILINE) == [
        "SFT",
        "PPO",
    ]


@pytest.mark.long
@pytest.mark.slow
def test_a_step_beside_trl() -> None:
    pytest.importorskip("trl", reason="TRL is not installed: nothing to compare with")
    told = run("step.py", "--quick")
    assert "0.9 M 16 + 2 turns of 4, 12 between TRL " in told
    waited = re.findall(r"^waiting: (.*): [\d.]+ s a step$", told, re.MULTILINE)
    assert waited == [
        "ludus",
        "ludus, `rl.max_staleness: 4`",
        "TRL, `rollout_func`",
        "TRL, `environment_factory`, async tool",
    ]


@pytest.mark.slow
@pytest.mark.long
def test_time_to_success_beside_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: nothing to compare with")
    names = ("ludus", "rollout", "environment")
    options = ("--quick", "--seeds", "0", "--folder", str(tmp_path), "--programs")
    run("success.py", *options, *names)
    found = {name: json.loads((tmp_path / f"{name}-0.json").read_text()) for name in names}
    for result in found.values():
        assert len(result["steps"]) == 2
        assert [point["step"] for point in result["points"]] == [0, 1, 2]
        assert result["points"][0] == found["ludus"]["points"][0]  # the same weights, the same test
    played = [
        [(step["sampled_tokens"], step["tokens"], step["reward"]) for step in found[name]["steps"]]
        for name in ("rollout", "environment")
    ]
    assert played[0] == played[1]  # two ways of one thing: episodes end where they should in both


@pytest.mark.slow
def test_the_page_of_time_to_success(tmp_path: Path) -> None:
    script = f"""
import json, pathlib, common, success_page
out = pathlib.Path({str(tmp_path)!r})
success_page.RESULTS = common.RESULTS = out
step = {{"seconds": 5.0, "rollout_s": 2.0, "sampled_tokens": 100.0, "tokens": 900.0, "reward": 0.5}}
def result(program, success):
    points = [dict(step=0, seconds=0.0, success=0.5), dict(step=5, seconds=20.0, success=success)]
    return dict(program=program, seed=0, micro_batch=16, points=points, steps=[step])
facts = common.machine(1) | {{"load_after": 0.0}}
results = [result("ludus", 0.81), result("rollout", 0.79)]
success_page.publish(results, facts, "About.", 0.8, 360.0, "A note.")
"""
    pytest.importorskip("trl", reason="TRL is not installed: nothing to compare with")
    subprocess.run([sys.executable, "-c", script], cwd=FOLDER, check=True, timeout=240)
    page = (tmp_path / "success.md").read_text()
    assert "| ludus | **20** |" in page
    assert "| TRL, `rollout_func` | not in 20 |" in page
    assert "<svg" in (tmp_path / "success.svg").read_text()


def test_a_spread_of_one_repeat_is_that_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--repeats 1`, as a quick look at one case asks for."""
    monkeypatch.syspath_prepend(str(FOLDER))
    common = importlib.import_module("common")
    assert common.Spread.of([3.0]) == common.Spread(3.0, 3.0, 3.0)
    assert common.Spread.of([1.0, 3.0]) == common.Spread(2.0, 1.5, 2.5)


@pytest.mark.long
@pytest.mark.slow
def test_native_code_beside_torch() -> None:
    lines = run("native.py", "--quick", "--repeats", "1").splitlines()
    assert [line.split()[2:4] for line in lines] == [
        ["-1", "native"], ["-1", "torch"], ["0", "torch"], ["0", "native"],
    ]  # fmt: skip
