"""Sampling stacks, drawing them, and `ludus profile` from end to end."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ludus.cli import app
from ludus.config.load import load_config
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError
from ludus.core.types import Trajectory
from ludus.diagnostics import profiling
from ludus.diagnostics.profiling import sampling
from ludus.diagnostics.profiling.flames import flame_page, folded, speedscope, tree
from ludus.diagnostics.profiling.sampling import PySpy, StackSampler, ThreadSampler
from ludus.pipeline.parts import checks
from ludus.telemetry.occupancy import PARTS

EVIL = "</script><script>window.hacked = 1</script>"
STACKS = Counter(
    {
        ("thread MainThread", "run_stage (ludus/loop/loop.py)", "linear (torch/nn)"): 60,
        ("thread MainThread", "run_stage (ludus/loop/loop.py)", "json (json/decoder.py)"): 20,
        ("thread MainThread", "run_stage (ludus/loop/loop.py)"): 10,
        ("thread ludus-env", EVIL): 10,
    }
)
ENV_TASKS = {"name": "env", "args": {"num_tasks": 4}}
RECIPE = """
model:
  architecture: {name: qwen3, args: {hidden_size: 16, num_layers: 1, num_heads: 2,
                                     num_kv_heads: 1, head_dim: 8, intermediate_size: 16}}
  tokenizer: words
  context_length: 96
env: {name: textcraft, args: {num_distractors: 0}}
tasks:
  train: {name: env, args: {tiers: [depth-1], first_seed: 0, num_tasks: 16}}
rollout: {max_tokens_per_turn: 12, max_turns: 2}
rl: {groups_per_step: 2, group_size: 2}
"""


class Quiet:
    def stage(self, name: str, total: int, start: int = 0) -> None: ...
    def step(self, stage: str, step: int, metrics: dict[str, float]) -> None: ...
    def tick(self) -> None: ...
    def episode(self, trajectory: Trajectory) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


def churn(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(500))


@pytest.fixture
def busy_thread() -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=churn, args=(stop,), name="churner")
    thread.start()
    yield
    stop.set()
    thread.join()


def seen(sampler: StackSampler, word: str) -> bool:
    """Returns whether a sampled stack contains `word`."""
    threading.Event().wait(0.5)
    found = sampler.stop()
    return any(word in frame for stack in found for frame in stack)


def test_the_thread_sampler_sees_other_threads(busy_thread: None) -> None:
    sampler = ThreadSampler()
    assert seen(sampler, "churn (profiling/test_profiling.py)")


def test_idle_threads_are_excluded() -> None:
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait, name="waiter")
    thread.start()
    sampler = ThreadSampler()
    assert not seen(sampler, "waiter")
    waiting.set()
    thread.join()


def permitted() -> bool:
    sampler = PySpy.start()
    if sampler is not None:
        sampler.stop()
    return sampler is not None


def test_py_spy_sees_other_threads(busy_thread: None) -> None:
    if not permitted():
        pytest.skip("py-spy is not installed, or may not trace a process here")
    sampler = PySpy.start()
    assert sampler is not None
    assert seen(sampler, "churn")


@pytest.mark.parametrize("program", ["exit 1", "echo 'Error: Permission Denied' >&2; exit 1"])
def test_the_thread_sampler_replaces_a_failed_py_spy(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "py-spy"
    fake.write_text(f"#!/bin/sh\n{program}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    sampler = sampling.start_sampling()
    assert isinstance(sampler, ThreadSampler)
    sampler.stop()


def test_stacks_form_a_call_tree() -> None:
    root = tree(STACKS)
    assert root.count == 100
    main = root.inner["thread MainThread"].inner["run_stage (ludus/loop/loop.py)"]
    assert (main.count, [f.count for f in main.inner.values()]) == (90, [60, 20])
    assert root.plain()[2][0][1] == 90, "the most seen first"


def test_speedscope_and_folded_lines() -> None:
    content = json.loads(speedscope(STACKS, "babyai", "3 steps"))
    names = [frame["name"] for frame in content["shared"]["frames"]]
    [profile] = content["profiles"]
    assert sum(profile["weights"]) == profile["endValue"] == 100
    assert [names[i] for i in profile["samples"][0]] == list(next(iter(STACKS)))
    lines = folded(STACKS, "", "").splitlines()
    assert lines[0] == "thread MainThread;run_stage (ludus/loop/loop.py);linear (torch/nn) 60"
    assert len(lines) == 4


def test_a_page_without_stacks() -> None:
    assert "too short" in flame_page(Counter(), "babyai", "1 step")


def test_the_profiled_run_is_short(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"path": "x"},
            "env": "babyai",
            "tasks": {"train": ENV_TASKS, "heldout": ENV_TASKS},
            "demonstrations": {"num_episodes": 5000},
            "sft": {"steps": 300, "until": {"every": 20}},
            "rl": {"steps": 100, "min_success_to_stop": 0.9, "min_signal": 0.1},
            "evaluate": {"num_tasks": 4, "every": 2, "temperature": 0.5},
            "checkpoint": {"metric": "evaluate/success"},
        }
    )
    short = profiling.short_run(config, 7, tmp_path)
    checks.check(short)
    assert short.rl
    assert short.sft
    assert short.demonstrations
    assert (short.rl.steps, short.sft.steps, short.demonstrations.num_episodes) == (7, 7, 64)
    assert (short.tasks.heldout, short.runs_dir, short.report) == (None, str(tmp_path), False)
    assert short.sft.until is None, "it evaluates nothing"


def test_the_parts_of_the_stage_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "start_sampling", ThreadSampler)
    profiler = profiling.Profiler("rl", Quiet())
    step = dict.fromkeys([f"time/{part}_s" for part in PARTS], 0.0)
    profiler.stage("sft", 1)
    profiler.step("sft", 0, step | {"time/train_s": 9.0})
    profiler.stage("rl", 2)
    profiler.step("rl", 0, step | {"time/train_s": 1.0, "time/sample_s": 2.0})
    profiler.step("rl", 1, step | {"time/train_s": 1.0})
    profiler.close()
    profiler.close()
    assert profiler.table() == [("train", 1.0, 0.5), ("sample", 1.0, 0.5)]


@pytest.mark.parametrize(
    ("out", "message"), [("profile.svg", r"must end in \.html"), ("nowhere/p.html", "is no folder")]
)
def test_files_that_cannot_be_written_are_refused(out: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        profiling.check_out(tmp_path / out)


def test_a_recipe_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    done = CliRunner().invoke(app, ["profile", "recipe.yaml", "--steps", "2", "--out", "p.json"])
    assert done.exit_code == 0, done.output
    assert "s a step" in done.output
    assert json.loads((tmp_path / "p.json").read_text())["profiles"][0]["name"] == "run: 2 steps"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.json", "recipe.yaml"]


def test_a_recipe_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    done = CliRunner().invoke(
        app, ["verify", "recipe.yaml", "sampler.args.cache_gib=1", "--steps", "2"]
    )
    assert done.exit_code == 0, done.output
    found = re.search(r"agree in every bit on (\d+) sampled tokens of 8 episodes", done.output)
    assert found is not None
    assert int(found[1]) > 16
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize(
    ("change", "needed"),
    [
        ("model.dtype=bfloat16", "`model.dtype: float32`"),
        ("learner.dtype=bfloat16", "`learner.dtype: float32`"),
        ("sampler=vllm", "`sampler: in_process`"),
        ("learner.gradient_checkpointing=true", "`learner.gradient_checkpointing: false`"),
        ("model.lora={dropout: 0.1}", "`model.lora.dropout: 0`"),
    ],
)
def test_verify_refuses_recipes_that_it_cannot_check(
    change: str, needed: str, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    load_config(str(path), [change])
    with pytest.raises(ConfigError, match=re.escape(f"`verify` needs {needed}")):
        load_config(str(path), [change, "verify=true"])


# Last: no event loop runs in this process while a browser is open.
def test_the_page_in_a_browser(browser: Any, tmp_path: Path) -> None:
    page = tmp_path / "flames.html"
    page.write_text(flame_page(STACKS, "babyai", f"3 steps {EVIL}"))
    tab = browser.new_page(viewport={"width": 1000, "height": 700})
    complaints: list[str] = []
    requests: list[str] = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(page.as_uri())
    assert tab.evaluate("window.hacked") is None
    bars = tab.locator("#flames button")
    assert bars.count() == 7
    widths = [bars.nth(i).bounding_box()["width"] for i in range(3)]
    assert widths[1] / widths[0] == pytest.approx(0.9, abs=0.01)
    tab.get_by_role("button", name="linear (torch/nn) 60.0 %").click()
    assert "60.0 % of all, 100.0 % of what is shown" in tab.locator("#summary").inner_text()
    assert bars.count() == 4  # and those above it
    tab.locator("#whole").click()
    tab.locator("#find").fill("loop.py")
    assert tab.locator("#summary").inner_text() == "90.0 % of what is shown is in loop.py"
    assert tab.locator("#flames .found").count() == 1
    assert not complaints
    assert requests == [page.as_uri()]
    tab.close()
