"""Recipe keys in verl's terms: each is mapped, adapted or refused.

`TABLE.settings(config)` gives the values of verl's keys. DEFAULTS are ours; `backend.args.verl`
overrides them, but not the keys that the table or OWN set.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import ceil
from typing import Any

from ludus.backends.hosts import Table, adapted, mapped, refused
from ludus.backends.shared_keys import SHORT_DTYPES, rl_of, schedule_fault, shared_rows
from ludus.config.schema import RunConfig

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))

_ESTIMATORS = {"grpo": "grpo", "dr_grpo": "grpo", "dapo": "grpo", "rloo": "rloo"}
_CLIPS = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28)}
_AGGREGATES = {
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "dapo": "token-mean",
    "rloo": "seq-mean-token-sum",
}
_KL = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
_TERMS = {"entropy_bonus", "kl_coefficient", "kl_kind", "kl_in"}
_OWN_ARGS = {
    "grpo": {"clip_low", "clip_high"},
    "dr_grpo": {"clip_low", "clip_high", "length"},
    "dapo": {"clip_low", "clip_high"},
    "rloo": set(),
}


def _algorithm(config: RunConfig) -> dict[str, Any]:
    rl = rl_of(config)
    name, args = rl.algorithm.name, rl.algorithm.args
    values: dict[str, Any] = {
        "algorithm.adv_estimator": _ESTIMATORS[name],
        "algorithm.norm_adv_by_std_in_grpo": name != "dr_grpo",
        f"{ACTOR}.loss_agg_mode": _AGGREGATES[name],
        f"{ACTOR}.entropy_coeff": args.get("entropy_bonus", 0.0),
    }
    if name == "dr_grpo":
        values[f"{ACTOR}.loss_scale_factor"] = args.get("length", 1024)
    if name in _CLIPS:
        low, high = _CLIPS[name]
        values |= {
            f"{ACTOR}.clip_ratio_low": args.get("clip_low", low),
            f"{ACTOR}.clip_ratio_high": args.get("clip_high", high),
        }
    if name == "dapo":
        values |= {
            "algorithm.filter_groups.enable": True,
            "algorithm.filter_groups.metric": "reward",
        }
    if coefficient := args.get("kl_coefficient", 0.0):
        kind, reward = _KL[args.get("kl_kind", "k3")], args.get("kl_in", "loss") == "reward"
        values |= {
            "algorithm.use_kl_in_reward": reward,
            f"{ACTOR}.use_kl_loss": not reward,
        }
        values |= (
            {"algorithm.kl_ctrl.kl_coef": coefficient, "algorithm.kl_penalty": kind}
            if reward
            else {f"{ACTOR}.kl_loss_coef": coefficient, f"{ACTOR}.kl_loss_type": kind}
        )
    return values


def _algorithm_fault(config: RunConfig) -> str | None:
    if config.rl is None:
        return "without `rl` there is nothing for verl to train"
    name, args = config.rl.algorithm.name, config.rl.algorithm.args
    if name not in _ESTIMATORS:
        known = ", ".join(_ESTIMATORS)
        return f"{name} has no equal among verl's algorithms ({known} have)"
    known_args = _TERMS | _OWN_ARGS[name]
    if name == "rloo" and config.rl.epochs * config.rl.minibatches > 1:
        return "verl clips the ratios of rloo; with one optimizer step there is nothing to clip"
    for arg, value in args.items():
        if (
            arg not in known_args
            and value not in (0, None)
            and (arg, value)
            != (
                "importance_level",
                "token",
            )
        ):
            return f"its argument {arg} has no equal in verl"
    return None


def _minibatch(config: RunConfig) -> dict[str, Any]:
    rl = rl_of(config)
    return {f"{ACTOR}.ppo_mini_batch_size": rl.groups_per_step // rl.minibatches}


def _minibatch_fault(config: RunConfig) -> str | None:
    rl = rl_of(config)
    if rl.groups_per_step % rl.minibatches:
        return (
            f"it splits a step by groups, and {rl.minibatches} does not divide rl.groups_per_step"
        )
    return None


def _tokens(config: RunConfig) -> dict[str, Any]:
    limit = rl_of(config).tokens_per_batch
    return {
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": limit,
        f"{ROLLOUT}.log_prob_use_dynamic_bsz": True,
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": limit,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": limit,
    }


def _warmup(config: RunConfig) -> dict[str, Any]:
    rl = rl_of(config)
    steps = ceil(rl.optimizer.warmup_steps / (rl.epochs * rl.minibatches))
    return {f"{ACTOR}.optim.lr_warmup_steps": steps or -1}


def _lengths(config: RunConfig) -> dict[str, Any]:
    limit = config.model.context_length
    names = ("data.max_prompt_length", "data.max_response_length", f"{ROLLOUT}.max_model_len")
    return dict.fromkeys(names, limit)


def _model_dtype(config: RunConfig) -> dict[str, Any]:
    short = SHORT_DTYPES[config.model.dtype]
    return {
        f"{ACTOR}.fsdp_config.model_dtype": short,
        "actor_rollout_ref.ref.fsdp_config.model_dtype": short,
        f"{ROLLOUT}.dtype": config.model.dtype,
    }


def _learner_dtype(config: RunConfig) -> dict[str, Any]:
    """verl's FSDP computes in the type of `mixed_precision`, by default bfloat16; `dtype` is
    Megatron's."""
    short = SHORT_DTYPES[config.learner.dtype]
    settings: dict[str, Any] = {}
    for part in (ACTOR, "actor_rollout_ref.ref"):
        settings[f"{part}.fsdp_config.dtype"] = config.learner.dtype
        settings[f"+{part}.fsdp_config.mixed_precision.param_dtype"] = short
    return settings


def _device(config: RunConfig) -> dict[str, Any]:
    return {"trainer.device": config.model.device.partition(":")[0]}


def _compile(config: RunConfig) -> dict[str, Any]:
    names = (
        f"{ACTOR}.use_torch_compile",
        f"{ACTOR}.fsdp_config.use_torch_compile",
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile",
    )
    return dict.fromkeys(names, config.learner.compile)


def _every(config: RunConfig) -> dict[str, Any]:
    every = config.evaluate.every if config.tasks.heldout is not None else 0
    return {"trainer.test_freq": every or -1, "trainer.val_before_train": False}


def _greedy(config: RunConfig) -> dict[str, Any]:
    temperature = config.evaluate.temperature
    return {
        f"{ROLLOUT}.val_kwargs.temperature": temperature,
        f"{ROLLOUT}.val_kwargs.do_sample": temperature > 0,
    }


def _stop(config: RunConfig) -> dict[str, Any]:
    stops = config.rollout.stop or config.rollout.format == "code"
    parts = any(part.format == "code" for part in config.rollout.parts.values())
    return {f"{ROLLOUT}.skip_tokenizer_init": not (stops or parts)}  # else it matches no strings


def _seed(config: RunConfig) -> dict[str, Any]:
    seed = config.seed % 2**31
    return {
        f"{ROLLOUT}.seed": seed,
        f"{ACTOR}.data_loader_seed": seed,
        f"{ACTOR}.fsdp_config.seed": seed,
    }


def _top_k(config: RunConfig) -> dict[str, Any]:
    return {f"{ROLLOUT}.top_k": config.rollout.top_k or -1}


_ROWS = (
    *shared_rows("verl", "verl's workers"),
    mapped("name", "trainer.experiment_name"),
    adapted(
        "seed",
        f"{ROLLOUT}.seed",
        f"{ACTOR}.data_loader_seed",
        f"{ACTOR}.fsdp_config.seed",
        note="tasks, model and environments as with `local`; vLLM's batches, and hence the sampled "
        "tokens, depend on timing: a run is not repeated bit for bit",
        value=_seed,
    ),
    mapped("backend", note="`backend.args.verl` holds verl's own keys"),
    mapped(
        "model.path",
        f"{MODEL}.path",
        note="ludus loads the model and writes it as a Hugging Face folder for verl",
        value=lambda config: {},
    ),
    mapped(
        "model.architecture",
        f"{MODEL}.path",
        note="ludus makes the model and writes it as a Hugging Face folder for verl",
        value=lambda config: {},
    ),
    mapped("model.thinking", note="ludus; a conversation with branches gives several rows"),
    mapped(
        "model.context_length",
        "data.max_prompt_length",
        "data.max_response_length",
        f"{ROLLOUT}.max_model_len",
        value=_lengths,
    ),
    mapped(
        "model.dtype", f"{ACTOR}.fsdp_config.model_dtype", f"{ROLLOUT}.dtype", value=_model_dtype
    ),
    mapped("model.device", "trainer.device", value=_device),
    refused(
        "sampler",
        "verl samples with its own engine (actor_rollout_ref.rollout.name in backend.args.verl)",
        RunConfig.model_fields["sampler"].get_default(call_default_factory=True),
    ),
    mapped(
        "learner.dtype",
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype",
        f"{ACTOR}.fsdp_config.dtype",
        value=_learner_dtype,
    ),
    mapped("learner.gradient_checkpointing", f"{MODEL}.enable_gradient_checkpointing"),
    mapped(
        "learner.compile",
        f"{ACTOR}.use_torch_compile",
        f"{ACTOR}.fsdp_config.use_torch_compile",
        value=_compile,
    ),
    mapped("rollout.temperature", f"{ROLLOUT}.temperature"),
    mapped("rollout.top_p", f"{ROLLOUT}.top_p"),
    mapped("rollout.top_k", f"{ROLLOUT}.top_k", value=_top_k),
    mapped("rollout.stop", f"{ROLLOUT}.skip_tokenizer_init", value=_stop),
    adapted(
        "rollout.concurrency",
        note=f"divided among the workers (`{ROLLOUT}.agent.num_workers`)",
    ),
    mapped(
        "rl.algorithm",
        "algorithm.adv_estimator",
        f"{ACTOR}.loss_agg_mode",
        f"{ACTOR}.clip_ratio_low",
        f"{ACTOR}.clip_ratio_high",
        f"{ACTOR}.entropy_coeff",
        f"{ACTOR}.use_kl_loss",
        "algorithm.filter_groups.enable",
        note="grpo, dr_grpo, dapo, rloo; others are refused. The unit of the loss is the row: an "
        "episode with branches counts once for each",
        value=_algorithm,
        fault=_algorithm_fault,
    ),
    mapped("rl.steps", "trainer.total_training_steps"),
    mapped("rl.groups_per_step", "data.train_batch_size"),
    mapped("rl.group_size", f"{ROLLOUT}.n"),
    mapped("rl.epochs", f"{ACTOR}.ppo_epochs"),
    adapted(
        "rl.minibatches",
        f"{ACTOR}.ppo_mini_batch_size",
        note="has to divide `rl.groups_per_step`: verl splits by groups",
        value=_minibatch,
        fault=_minibatch_fault,
    ),
    adapted(
        "rl.tokens_per_batch",
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        note="of each GPU",
        value=_tokens,
    ),
    mapped("rl.optimizer.lr", f"{ACTOR}.optim.lr"),
    mapped(
        "rl.optimizer.betas",
        f"{ACTOR}.optim.betas",
        value=lambda config: {f"{ACTOR}.optim.betas": list(rl_of(config).optimizer.betas)},
    ),
    mapped(
        "rl.optimizer.eps",
        f"{ACTOR}.optim.override_optimizer_config",
        value=lambda config: {
            f"+{ACTOR}.optim.override_optimizer_config.eps": rl_of(config).optimizer.eps
        },
    ),
    adapted(
        "rl.optimizer.weight_decay",
        f"{ACTOR}.optim.weight_decay",
        note="of all weights, also those of norms",
    ),
    mapped("rl.optimizer.max_grad_norm", f"{ACTOR}.optim.clip_grad", f"{ACTOR}.grad_clip"),
    adapted(
        "rl.optimizer.warmup_steps",
        f"{ACTOR}.optim.lr_warmup_steps",
        note="verl's schedule moves once a step, not once an optimizer step",
        value=_warmup,
    ),
    mapped(
        "rl.optimizer.schedule",
        f"{ACTOR}.optim.lr_scheduler_type",
        fault=partial(schedule_fault, "verl"),
    ),
    refused("rl.optimizer.name", "verl's actor trains with AdamW", "adamw"),
    refused("rl.optimizer.target_kl", "verl's learning rate follows its schedule alone"),
    refused("rl.max_staleness", "verl's asynchronous trainers count staleness otherwise", 0),
    mapped("evaluate.num_tasks_between", note="verl's validation set"),
    mapped("evaluate.samples_per_task", f"{ROLLOUT}.val_kwargs.n"),
    mapped("evaluate.temperature", f"{ROLLOUT}.val_kwargs.temperature", value=_greedy),
    mapped("evaluate.every", "trainer.test_freq", value=_every),
    mapped("checkpoint.every", "trainer.save_freq"),
    mapped("checkpoint.keep_last", "trainer.max_actor_ckpt_to_keep"),
)

TABLE = Table("verl", _ROWS)

DEFAULTS: Mapping[str, Any] = {
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    f"{ACTOR}.strategy": "fsdp2",
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    f"{ROLLOUT}.agent.num_workers": 1,
    f"{ROLLOUT}.load_format": "auto",
    "reward.num_workers": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
}
"""Values in place of verl's defaults: one GPU, one worker."""

CPU_DEFAULTS: Mapping[str, Any] = {
    f"{MODEL}.use_remove_padding": False,  # flash attention, which has no CPU build, unpads
    f"+{MODEL}.override_config.attn_implementation": "sdpa",
    f"{ROLLOUT}.enforce_eager": True,
    f"{ROLLOUT}.free_cache_engine": False,  # vLLM's CPU build cannot sleep
    f"+{ROLLOUT}.enable_sleep_mode": False,
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 64,
    "+ray_kwargs.ray_init.num_gpus": 1,  # logical: verl places its workers on them (`cpu.py`)
    "ray_kwargs.ray_init.num_cpus": 16,  # logical: verl asks for more than a small machine has
}
"""Further values where `model.device` is cpu."""

MEGATRON: Mapping[str, str | None] = {
    f"{ACTOR}.fsdp_config.seed": f"{ACTOR}.megatron.seed",
    f"{ACTOR}.fsdp_config.dtype": f"{ACTOR}.megatron.dtype",
    "actor_rollout_ref.ref.fsdp_config.dtype": "actor_rollout_ref.ref.megatron.dtype",
    f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype": None,
    "+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype": None,
    f"{ACTOR}.fsdp_config.model_dtype": None,
    "actor_rollout_ref.ref.fsdp_config.model_dtype": None,
    f"{ACTOR}.fsdp_config.use_torch_compile": None,
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile": None,
    f"{ACTOR}.grad_clip": None,  # it reads optim.clip_grad
    f"{ACTOR}.optim.lr_scheduler_type": f"{ACTOR}.optim.lr_decay_style",
    f"+{ACTOR}.optim.override_optimizer_config.eps": (
        f"+{ACTOR}.optim.override_optimizer_config.adam_eps"
    ),
}
"""Keys of the FSDP engine by their names in verl's Megatron engine; None: it has none."""


OWN = frozenset(
    {
        "data.custom_cls.name",
        "data.custom_cls.path",
        "data.shuffle",
        "data.train_files",
        "data.val_files",
        "data.validation_shuffle",
        "trainer.default_local_dir",
        "trainer.logger",
        "trainer.resume_mode",
        "trainer.total_epochs",
        "trainer.use_v1",
        "trainer.v1.trainer_mode",
        f"{ACTOR}.checkpoint.save_contents",
        f"{MODEL}.path",
        f"{ROLLOUT}.agent.agent_loop_config_path",
        f"{ROLLOUT}.agent.default_agent_loop",
        f"{ROLLOUT}.calculate_log_probs",
        f"{ROLLOUT}.logprobs_mode",
    }
)
"""verl's keys that tie it to the run: `backend.args.verl` cannot set them."""
