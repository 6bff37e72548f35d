"""Recipe keys in Trinity's terms: what Trinity cannot honour is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from host_configs import config

from ludus.backends.hosts import HostPlay
from ludus.backends.trinity.host import TrinityHost
from ludus.backends.trinity.keys import TABLE
from ludus.core.errors import ConfigError


def test_a_grpo_recipe_in_trinitys_terms() -> None:
    rl = {
        "steps": 7,
        "groups_per_step": 6,
        "group_size": 4,
        "epochs": 2,
        "optimizer": {"lr": 1e-4, "warmup_steps": 12, "schedule": "cosine"},
        "algorithm": {"name": "grpo", "args": {"clip_high": 0.3, "kl_coefficient": 0.01}},
    }
    settings = TABLE.settings(config(rl=rl, rollout={"temperature": 0.7}))
    actor = "trainer.trainer_config.actor"
    expected = {
        "algorithm.algorithm_type": "grpo",
        "algorithm.repeat_times": 4,
        "algorithm.loss_agg_mode": "seq-mean-token-mean",
        "algorithm.kl_loss_fn": "low_var_kl",
        "algorithm.kl_loss_fn_args": {"kl_coef": 0.01},
        "algorithm.optimizer.lr": 1e-4,
        "algorithm.optimizer.lr_warmup_steps": 6,
        "algorithm.optimizer.lr_scheduler_type": "cosine",
        "buffer.batch_size": 6,
        "buffer.total_steps": 7,
        "trainer.total_steps": 7,
        "model.temperature": 0.7,
        "model.max_model_len": 128,
        f"{actor}.ppo_epochs": 2,
        f"{actor}.fsdp_config.mixed_precision.param_dtype": "fp32",
    }
    assert {key: settings[key] for key in expected} == expected
    clips = settings["algorithm.policy_loss_fn_args"]
    assert (clips["clip_range_low"], clips["clip_range_high"]) == (0.2, 0.3)


def test_without_kl_no_reference_model_is_loaded() -> None:
    settings = TABLE.settings(config())
    assert settings["algorithm.algorithm_type"] == "dapo"  # Trinity's type without a reference
    assert settings["algorithm.kl_loss_fn"] == "none"


REFUSED = {
    "mirror": {"mirror": "file:///tmp/copy"},
    "verify": {"verify": True},
    "sampler": {"sampler": {"name": "vllm"}},
    "model.lora": {"model": {"path": "x", "lora": {"rank": 2}}},
    "rl.max_staleness": {
        "rl": {"max_staleness": 1, "algorithm": {"name": "grpo", "args": {"importance_cap": 2.0}}},
        "rollout": {"deterministic": False},
    },
    "rl.min_success_to_stop": {"rl": {"min_success_to_stop": 0.5}},
    "rl.min_signal": {"rl": {"min_signal": 0.02}},
    "rl.steps_per_unused_sft_step": {
        "sft": {"data": "x.jsonl", "until": {}},
        "rl": {"steps_per_unused_sft_step": 0.1},
    },
    "rl.minibatches": {"rl": {"groups_per_step": 4, "minibatches": 2}},
    "rl.optimizer.schedule": {"rl": {"optimizer": {"schedule": "linear"}}},
    "traces": {"traces": {"endpoint": "http://127.0.0.1:4318"}},
    "checkpoint.metric": {"checkpoint": {"metric": "rollout/reward"}},
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_trinity_cannot_honour_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TABLE.require_honoured(config(**REFUSED[key]))
    lines = str(caught.value).splitlines()
    (line,) = [line for line in lines if line.startswith(f"{key}: ")]
    assert "trinity cannot honour it: " in line
    assert line.endswith("Back ends that can: local")


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ({"name": "ppo"}, "ppo has no equal among Trinity's algorithms"),
        ({"name": "dapo"}, "plays no others in their place"),
        ({"name": "dr_grpo"}, "divides by the group's standard deviation"),
        ({"name": "grpo", "args": {"importance_cap": 2.0}}, "importance_cap has no equal"),
        ({"name": "grpo", "args": {"kl_coefficient": 0.1, "kl_in": "reward"}}, "as a loss only"),
    ],
)
def test_algorithms_without_an_equal_in_trinity_are_refused(
    algorithm: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        TABLE.require_honoured(config(rl={"algorithm": algorithm}))


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"buffer.batch_size": 3}, "set rl.groups_per_step in the recipe instead"),
        ({"algorithm": {"repeat_times": 3}}, "set rl.group_size in the recipe instead"),
        ({"monitor.monitor_type": "wandb"}, "it ties trinity to the run"),
        (
            {"algorithm.policy_loss_fn_args": {"clip_range_low": 0.5}},
            "clip_range_low: ludus sets it: set rl.algorithm in the recipe instead",
        ),
        ({"trainer.trainer_config": {"actor": None}}, "actor: ludus sets keys in it, "),
        ({"explorer": {"rollout_model": 1}}, "give those of yours by name"),
    ],
)
def test_trinitys_own_keys_cannot_contradict_the_recipe(own: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrinityHost(trinity=own).check(config())


def test_without_trinity_the_error_names_the_command() -> None:
    with pytest.raises(ConfigError, match="`make trinity` creates an environment"):
        TrinityHost(python="/absent/python").check(config())


def test_a_cluster_that_does_not_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS: no Ray cluster answers at 127.0.0.1:9"):
        TrinityHost().check(config())


def test_the_tasks_that_trinity_reads_are_places_in_the_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for split in ("train", "heldout"):
        (tmp_path / f"{split}.jsonl").write_text("{}\n{}\n")
    play = HostPlay(
        run=tmp_path,
        model=tmp_path / "model",
        env=None,
        train=tmp_path / "train.jsonl",
        heldout=tmp_path / "heldout.jsonl",
        opener="m:f",
    )
    job = TrinityHost().prepare(config(), tmp_path, play)
    lines = (tmp_path / "tasksets" / "train" / "tasks.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"split": "train", "place": 0},
        {"split": "train", "place": 1},
    ]
    assert job.temporary is not None
    assert job.environment["LUDUS_HOST_JOB"] == str(tmp_path / "job.json")
    assert "torch" in job.environment["LUDUS_TRINITY_CPU"].split(",")


def test_metrics_of_trinity_get_our_names() -> None:
    values = {
        "actor/pg_loss": 0.5,
        "time/read_experience": 2.0,
        "time/train_step": 1.0,
        "time/sync_weight": 0.5,
        "critic/score/mean": 0.25,
    }
    assert TrinityHost().metrics(values) == {
        "train/loss": 0.5,
        "time/rollout_s": 2.0,
        "time/train_s": 1.0,
        "trinity/time/sync_weight": 0.5,
        "trinity/critic/score/mean": 0.25,
        "time/step_s": 3.5,
    }
