"""Recipe keys in verl's terms: what verl cannot honour is refused."""

from __future__ import annotations

from typing import Any

import pytest
from host_configs import config

from ludus.backends.verl.host import VerlHost
from ludus.backends.verl.keys import ACTOR, TABLE
from ludus.core.errors import ConfigError


def test_a_grpo_recipe_in_verls_terms() -> None:
    rl = {
        "steps": 7,
        "groups_per_step": 6,
        "group_size": 4,
        "minibatches": 3,
        "epochs": 2,
        "optimizer": {"lr": 1e-4, "warmup_steps": 12, "schedule": "cosine"},
        "algorithm": {"name": "grpo", "args": {"clip_high": 0.3, "kl_coefficient": 0.01}},
    }
    settings = TABLE.settings(config(rl=rl, rollout={"temperature": 0.7, "max_tokens_per_turn": 9}))
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    expected = {
        "trainer.total_training_steps": 7,
        "data.train_batch_size": 6,
        f"{rollout}.n": 4,
        f"{actor}.ppo_mini_batch_size": 2,
        f"{actor}.ppo_epochs": 2,
        f"{actor}.optim.lr": 1e-4,
        f"{actor}.optim.lr_warmup_steps": 2,
        f"{actor}.optim.lr_scheduler_type": "cosine",
        f"{actor}.clip_ratio_low": 0.2,
        f"{actor}.clip_ratio_high": 0.3,
        f"{actor}.loss_agg_mode": "seq-mean-token-mean",
        f"{actor}.use_kl_loss": True,
        f"{actor}.kl_loss_coef": 0.01,
        f"{actor}.kl_loss_type": "low_var_kl",
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": True,
        f"+{actor}.fsdp_config.mixed_precision.param_dtype": "fp32",
        f"{rollout}.temperature": 0.7,
        f"{rollout}.max_model_len": 128,
        "trainer.test_freq": -1,
    }
    assert {key: settings[key] for key in expected} == expected


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
    "rl.algorithm": {"rl": {"algorithm": "ppo"}},
    "rl.minibatches": {"rl": {"groups_per_step": 4, "minibatches": 3}},
    "rl.optimizer.schedule": {"rl": {"optimizer": {"schedule": "linear"}}},
    "traces": {"traces": {"endpoint": "http://127.0.0.1:4318"}},
    "checkpoint.metric": {"checkpoint": {"metric": "rollout/reward"}},
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_verl_cannot_honour_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TABLE.require_honoured(config(**REFUSED[key]))
    lines = str(caught.value).splitlines()
    (line,) = [line for line in lines if line.startswith(f"{key}: ")]
    assert "verl cannot honour it: " in line
    assert line.endswith("Back ends that can: local")


MEGATRON = {f"{ACTOR}.strategy": "megatron"}


def test_megatron_gets_the_settings_by_its_own_names() -> None:
    settings = VerlHost(verl=MEGATRON).settings(config(seed=5))
    assert settings[f"{ACTOR}.megatron.seed"] == 5
    assert not any("fsdp_config" in key for key in settings)


def test_arguments_without_an_equal_in_verl_are_refused() -> None:
    algorithm = {"name": "grpo", "args": {"importance_cap": 2.0}}
    with pytest.raises(ConfigError, match="its argument importance_cap has no equal in verl"):
        TABLE.require_honoured(config(rl={"algorithm": algorithm}))


def test_only_keys_that_the_recipe_changes_are_told() -> None:
    assert TABLE.adaptations(config()) == []
    (note,) = TABLE.adaptations(config(rl={"minibatches": 2}))
    assert note.startswith("rl.minibatches: ")


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"data.train_batch_size": 3}, "set rl.groups_per_step in the recipe instead"),
        ({"data": {"train_batch_size": 3}}, "set rl.groups_per_step in the recipe instead"),
        ({"trainer.logger": ["console"]}, "it ties verl to the run"),
        (
            {"actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "bf16"},
            "set learner.dtype in the recipe instead",
        ),
        ({**MEGATRON, f"{ACTOR}.megatron.seed": 7}, "set seed in the recipe instead"),
        (
            {**MEGATRON, f"{ACTOR}.optim.lr_decay_style": "cosine"},
            r"set rl\.optimizer\.schedule in the recipe instead",
        ),
    ],
)
def test_verls_own_keys_cannot_contradict_the_recipe(own: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        VerlHost(verl=own).check(config())


def test_without_verl_the_error_names_the_command() -> None:
    with pytest.raises(ConfigError, match="`make verl` creates an environment"):
        VerlHost(python="/absent/python").check(config())


def test_an_interpreter_without_verl_names_the_command() -> None:
    with pytest.raises(ConfigError, match=r"cannot run verl .*`make verl`"):
        VerlHost(python="/bin/false").check(config())


def test_metrics_of_verl_get_our_names() -> None:
    values = {
        "actor/pg_loss": 0.5,
        "timing_s/step": 3.0,
        "timing_s/gen": 1.0,
        "perf/x": 2,
        "y": "z",
    }
    assert VerlHost().metrics(values) == {
        "train/loss": 0.5,
        "time/step_s": 3.0,
        "time/rollout_s": 1.0,
        "time/train_s": 2.0,
        "verl/perf/x": 2.0,
    }
