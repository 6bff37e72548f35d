"""verl itself, on this CPU: learns, is interrupted, and goes on; its rows have the exact tokens."""

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

from ludus.backends.verl.host import VerlHost
from ludus.core.errors import ConfigError

pytestmark = [pytest.mark.engine("verl"), pytest.mark.timeout(1200)]
PYTHON = str(engine_python("verl"))


def test_grpo_learns_is_interrupted_and_goes_on(ludus: Ludus) -> None:
    write_files(ludus.cwd)
    backend = f"backend={{name: verl, args: {{python: {PYTHON}}}}}"
    run = ludus.run("say-1")
    running = ludus.start("train", "say.yaml", backend)
    latest = run / "verl" / "checkpoints" / "latest_checkpointed_iteration.txt"
    while not latest.exists() and "ludus: " not in said(running):
        time.sleep(0.02)
    running.signal(signal.SIGINT)
    stopped = running.wait()
    assert stopped.code == 130, stopped.all
    job = json.loads((run / "verl" / "job.json").read_text())
    assert not Path(job["settings"]["+ray_kwargs.ray_init._temp_dir"]).exists()
    assert processes_of(run) == []
    assert ludus.status("say-1") == "interrupted"

    resumed = ludus.start("train", "--resume", "say-1")
    while ludus.status("say-1") != "completed" and "ludus: " not in said(resumed):
        time.sleep(0.1)  # the start of verl exceeds the harness's guard against a hang
    done = resumed.wait().ok()
    assert "resuming after step 4 of rl" in done.err
    with ludus.store() as store:
        steps = {(row.stage, row.step): row for row in store.steps("say-1")}
        groups = store.groups("say-1", "rl", 7)
    rewards = [steps["rl", n].metrics["rollout/reward"] for n in range(8)]
    assert rewards[0] < 0.5 < 0.75 < sum(rewards[-2:]) / 2, rewards
    assert {
        ("evaluate/before", 0),
        ("evaluate/rl", 4),
        ("evaluate/rl", 8),
        ("evaluate/after", 0),
    } <= set(steps)
    assert steps["evaluate/after", 0].metrics["evaluate/score"] > 0.75
    assert len(groups) == 4
    for trajectory in (t for group in groups for t in group.trajectories):
        assert {s.policy_version for s in trajectory.segments if s.sampled} == {7}
        assert all(s.token_ids for s in trajectory.segments if s.sampled)
    assert abs(steps["rl", 0].metrics["train/kl"]) < 1e-5  # learner and sampler agree
    metrics = steps["rl", 7].metrics
    assert {"train/loss", "train/grad_norm", "train/lr", "train/entropy"} <= set(metrics)
    assert (run / "checkpoints" / "rl-000008").is_dir()
    assert (run / "report.html").exists()


def test_settings_that_verl_refuses_are_refused_before_the_run() -> None:
    own = {"actor_rollout_ref.actor.stratgy": "fsdp2"}
    near = r"backend.args.verl.actor_rollout_ref.actor.stratgy: .*did you mean .*actor.strategy"
    with pytest.raises(ConfigError, match=near):
        VerlHost(PYTHON, own).check(config())
    assert VerlHost(PYTHON).check(config()) == []
    megatron = {
        "actor_rollout_ref.actor.strategy": "megatron",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 2,
    }
    assert VerlHost(PYTHON, megatron).check(config()) == []
    gpu = {"architecture": "qwen3", "tokenizer": "words", "context_length": 128, "device": "cuda"}
    with pytest.raises(ConfigError, match="no CUDA device"):
        VerlHost(PYTHON).check(config(model=gpu))


ROWS = """
import json
from ludus.backends.verl_side.loop import rows
from ludus.core.types import Segment, Trajectory
tree = [
    Segment(-1, [5, 6, 7]),
    Segment(0, [8, 9], [-0.1, -0.7], policy_version=3),
    Segment(1, [3]),
    Segment(2, [2], [-0.2], policy_version=3),
    Segment(1, [4, 4]),
    Segment(4, [1], [-0.3], policy_version=4),
]
found = rows(Trajectory("t", "g", "task", tree, reward=0.5))
print(json.dumps([[r.prompt_ids, r.response_ids, r.response_mask, r.response_logprobs,
                   r.reward_score, r.extra_fields["max_global_steps"]] for r in found]))
"""


def test_rows_have_the_tokens_of_the_tree_each_trained_once() -> None:
    done = subprocess.run(
        [PYTHON, "-c", ROWS], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [
        [[5, 6, 7], [8, 9, 3, 2], [1, 1, 0, 1], [-0.1, -0.7, 0.0, -0.2], 0.5, 4],
        [[5, 6, 7, 8, 9, 4, 4], [1], [1], [-0.3], 0.5, 4],
    ]
