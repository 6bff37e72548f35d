"""Trinity itself, on this CPU: learns, is interrupted, and goes on; its rows have the tokens."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from engines import ROOT, engine_python
from harness import Ludus
from host_configs import config
from say_world import processes_of, said, write_files

from ludus.backends.trinity.host import TrinityHost
from ludus.core.errors import ConfigError

pytestmark = [pytest.mark.engine("trinity"), pytest.mark.timeout(1200)]
PYTHON = str(engine_python("trinity"))


def test_grpo_learns_with_failed_episodes_is_interrupted_and_goes_on(ludus: Ludus) -> None:
    write_files(ludus.cwd)
    backend = f"backend={{name: trinity, args: {{python: {PYTHON}}}}}"
    faults = ("env.args.fault_every=9", "rollout.max_retries=0")
    run = ludus.run("say-1")
    running = ludus.start("train", "say.yaml", backend, *faults)
    latest = run / "trinity" / "checkpoints" / "latest_checkpointed_iteration.txt"
    while not latest.exists() and "ludus: " not in said(running):
        time.sleep(0.02)
    running.signal(signal.SIGINT)
    stopped = running.wait()
    assert stopped.code == 130, stopped.all
    job = json.loads((run / "trinity" / "job.json").read_text())
    assert not Path(job["ray"]["_temp_dir"]).exists()
    assert processes_of(run) == []
    assert ludus.status("say-1") == "interrupted"

    resumed = ludus.start("train", "--resume", "say-1")
    while ludus.status("say-1") != "completed" and "ludus: " not in said(resumed):
        time.sleep(0.1)  # the start of Trinity exceeds the harness's guard against a hang
    done = resumed.wait().ok()
    assert "resuming after step 4 of rl" in done.err
    with ludus.store() as store:
        steps = {(row.stage, row.step): row for row in store.steps("say-1")}
        groups = {step: store.groups("say-1", "rl", step) for step in range(8)}
    rewards = [steps["rl", n].metrics["rollout/reward"] for n in range(8)]
    assert rewards[0] < 0.5 < 0.75 < sum(rewards[-2:]) / 2, rewards
    evaluations = {
        ("evaluate/before", 0),
        ("evaluate/rl", 4),
        ("evaluate/rl", 8),
        ("evaluate/after", 0),
    }
    assert evaluations <= set(steps)
    for step, played in groups.items():
        assert len(played) == 4
        for trajectory in (t for group in played for t in group.trajectories):
            assert {s.policy_version for s in trajectory.segments if s.sampled} <= {step}
    # Steps of fewer experiences than the trainer would wait for, and none of another step's.
    kept = [
        sum(t.dropped is None and t.error is None for g in played for t in g.trajectories)
        for played in groups.values()
    ]
    assert min(kept) < 32
    assert abs(steps["rl", 0].metrics["train/kl"]) < 1e-5  # learner and sampler agree
    metrics = steps["rl", 7].metrics
    assert {"train/loss", "train/grad_norm", "train/lr", "train/entropy"} <= set(metrics)
    assert (run / "checkpoints" / "rl-000008").is_dir()
    assert (run / "report.html").exists()


def test_settings_that_trinity_refuses_are_refused_before_the_run() -> None:
    near = r"backend.args.trinity.explorer.runer_per_model: .*did you mean .*runner_per_model"
    with pytest.raises(ConfigError, match=near):
        TrinityHost(PYTHON, {"explorer.runer_per_model": 2}).check(config())
    with pytest.raises(ConfigError, match=r"Invalid explorer\.concurrent_mode"):
        TrinityHost(PYTHON, {"explorer.concurrent_mode": "abc"}).check(config())
    with pytest.raises(ConfigError, match="at least 1 runner must play"):
        TrinityHost(PYTHON, {"explorer.runner_per_model": 0}).check(config())
    assert TrinityHost(PYTHON, {"explorer.runner_per_model": 2}).check(config()) == []
    gpu = {"architecture": "qwen3", "tokenizer": "words", "context_length": 128, "device": "cuda"}
    with pytest.raises(ConfigError, match="no CUDA device"):
        TrinityHost(PYTHON).check(config(model=gpu))


ROWS = """
import json
from ludus.backends.trinity_side.workflow import experiences
from ludus.core.types import Segment, Trajectory
tree = [
    Segment(-1, [5, 6, 7]),
    Segment(0, [8, 9], [-0.1, -0.7], policy_version=3),
    Segment(1, [3]),
    Segment(2, [2], [-0.2], policy_version=3),
    Segment(1, [4, 4]),
    Segment(4, [1], [-0.3], policy_version=3),
]
found = experiences(Trajectory("t", "g", "task", tree, reward=0.5), 6)
print(json.dumps([[e.tokens.tolist(), e.prompt_length, e.action_mask.tolist(),
                   [round(x, 4) for x in e.logprobs.tolist()], e.reward, e.eid.run, e.eid.step]
                  for e in found]))
"""


def test_experiences_have_the_tokens_of_the_tree_each_trained_once() -> None:
    done = subprocess.run(
        [PYTHON, "-c", ROWS], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [
        [[5, 6, 7, 8, 9, 3, 2], 3, [True, True, False, True], [-0.1, -0.7, 0.0, -0.2], 0.5, 6, 0],
        [[5, 6, 7, 8, 9, 4, 4, 1], 7, [True], [-0.3], 0.5, 6, 1],
    ]
