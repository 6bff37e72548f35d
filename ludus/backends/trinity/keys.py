"""Recipe keys in the terms of Trinity-RFT: each is mapped, adapted or refused.

`TABLE.settings(config)` gives the values of Trinity's keys. DEFAULTS are ours;
`backend.args.trinity` overrides them, but not the keys that the table or OWN set. Keys under
`trainer.trainer_config` are those of verl, which Trinity trains with.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import ceil
from typing import Any

from ludus.backends.hosts import Table, adapted, mapped, refused
from ludus.backends.shared_keys import SHORT_DTYPES, rl_of, schedule_fault, shared_rows
from ludus.config.schema import RunConfig

ROLLOUT, VERL = "explorer.rollout_model", "trainer.trainer_config"
ACTOR, REFERENCE = f"{VERL}.actor", f"{VERL}.ref"
OPTIMIZER, RUNNERS = "algorithm.optimizer", "explorer.runner_per_model"

_KL = {"k1": "k1", "k2": "k2", "k3": "low_var_kl"}
_ARGS = {"clip_low", "clip_high", "entropy_bonus", "kl_coefficient", "kl_kind", "kl_in"}


def _algorithm(config: RunConfig) -> dict[str, Any]:
    args = rl_of(config).algorithm.args
    coefficient = args.get("kl_coefficient", 0.0)
    return {
        # Trinity's dapo is its grpo without a reference model: the rest is set here.
        "algorithm.algorithm_type": "grpo" if coefficient else "dapo",
        "algorithm.advantage_fn": "grpo",
        "algorithm.advantage_fn_args": {"epsilon": 1e-6},
        "algorithm.policy_loss_fn": "ppo",
        "algorithm.policy_loss_fn_args": {
            "clip_range_low": args.get("clip_low", 0.2),
            "clip_range_high": args.get("clip_high", 0.2),
            "loss_agg_mode": "seq-mean-token-mean",
        },
        "algorithm.loss_agg_mode": "seq-mean-token-mean",
        "algorithm.entropy_loss_fn": "default",
        "algorithm.entropy_loss_fn_args": {"entropy_coef": args.get("entropy_bonus", 0.0)},
        "algorithm.kl_loss_fn": _KL[args.get("kl_kind", "k3")] if coefficient else "none",
        "algorithm.kl_loss_fn_args": {"kl_coef": coefficient},
    }


def _algorithm_fault(config: RunConfig) -> str | None:
    if config.rl is None:
        return "without `rl` there is nothing for Trinity to train"
    name, args = config.rl.algorithm.name, config.rl.algorithm.args
    if name == "dapo":
        return "Trinity leaves out groups without a signal, but plays no others in their place"
    if name == "dr_grpo":
        return "Trinity's GRPO divides by the group's standard deviation, always"
    if name != "grpo":
        return f"{name} has no equal among Trinity's algorithms (grpo has)"
    if args.get("kl_coefficient") and args.get("kl_in", "loss") == "reward":
        return "with grpo, Trinity has KL as a loss only (kl_in: loss)"
    for arg, value in args.items():
        plain = value in (0, None) or (arg, value) == ("importance_level", "token")
        if arg not in _ARGS and not plain:
            return f"its argument {arg} has no equal in Trinity"
    return None


def _tokens(config: RunConfig) -> dict[str, Any]:
    limit = rl_of(config).tokens_per_batch
    return {"trainer.use_dynamic_bsz": True, "trainer.max_token_len_per_gpu": limit}


def _warmup(config: RunConfig) -> dict[str, Any]:
    rl = rl_of(config)
    return {f"{OPTIMIZER}.lr_warmup_steps": ceil(rl.optimizer.warmup_steps / rl.epochs) or -1}


def _lengths(config: RunConfig) -> dict[str, Any]:
    limit = config.model.context_length
    return {
        "model.max_model_len": limit,
        # Trinity wants their sum within the context. No turn reads them: each names its own.
        "model.max_prompt_tokens": limit - 1,
        "model.max_response_tokens": 1,
    }


def _model_dtype(config: RunConfig) -> dict[str, Any]:
    short = SHORT_DTYPES[config.model.dtype]
    return {
        f"{ROLLOUT}.dtype": config.model.dtype,
        f"{ACTOR}.fsdp_config.model_dtype": short,
        f"{REFERENCE}.fsdp_config.model_dtype": short,
    }


def _everywhere(*names: str) -> tuple[str, ...]:
    """verl's keys of the trained model and of the reference."""
    return tuple(f"{part}.{name}" for part in (ACTOR, REFERENCE) for name in names)


def _learner_dtype(config: RunConfig) -> dict[str, Any]:
    short = SHORT_DTYPES[config.learner.dtype]
    return dict.fromkeys(_everywhere("fsdp_config.mixed_precision.param_dtype"), short)


def _compile(config: RunConfig) -> dict[str, Any]:
    names = (f"{ACTOR}.use_torch_compile", *_everywhere("fsdp_config.use_torch_compile"))
    return dict.fromkeys(names, config.learner.compile)


def _every(config: RunConfig) -> dict[str, Any]:
    every = config.evaluate.every if config.tasks.heldout is not None else 0
    return {"explorer.eval_interval": every or NEVER, "explorer.eval_on_startup": False}


def _seed(config: RunConfig) -> dict[str, Any]:
    seed = config.seed % 2**31
    return {
        f"{ROLLOUT}.seed": seed,
        f"{ACTOR}.data_loader_seed": seed,
        f"{ACTOR}.fsdp_config.seed": seed,
    }


NEVER = 2**31 - 1

_ROWS = (
    *shared_rows("Trinity", "Trinity's runners"),
    mapped("name", note="ludus: the name of the run's folder"),
    adapted(
        "seed",
        f"{ROLLOUT}.seed",
        f"{ACTOR}.data_loader_seed",
        f"{ACTOR}.fsdp_config.seed",
        note="tasks, model and environments as with `local`; vLLM's batches, and hence the sampled "
        "tokens, depend on timing: a run is not repeated bit for bit",
        value=_seed,
    ),
    mapped("backend", note="`backend.args.trinity` holds Trinity's own keys"),
    mapped(
        "model.path",
        "model.model_path",
        note="ludus loads the model and writes it as a Hugging Face folder for Trinity",
        value=lambda config: {},
    ),
    mapped(
        "model.architecture",
        "model.model_path",
        note="ludus makes the model and writes it as a Hugging Face folder for Trinity",
        value=lambda config: {},
    ),
    mapped("model.thinking", note="ludus; a conversation with branches gives several experiences"),
    mapped(
        "model.context_length",
        "model.max_model_len",
        "model.max_prompt_tokens",
        "model.max_response_tokens",
        value=_lengths,
    ),
    mapped(
        "model.dtype",
        f"{ROLLOUT}.dtype",
        *_everywhere("fsdp_config.model_dtype"),
        value=_model_dtype,
    ),
    mapped("model.device", note="ludus: the changes for a CPU, or none"),
    refused(
        "sampler",
        "Trinity samples with its own engine",
        RunConfig.model_fields["sampler"].get_default(call_default_factory=True),
    ),
    mapped(
        "learner.dtype",
        *_everywhere("fsdp_config.mixed_precision.param_dtype"),
        value=_learner_dtype,
    ),
    mapped("learner.gradient_checkpointing", f"{VERL}.model.enable_gradient_checkpointing"),
    mapped(
        "learner.compile",
        f"{ACTOR}.use_torch_compile",
        *_everywhere("fsdp_config.use_torch_compile"),
        value=_compile,
    ),
    mapped("rollout.temperature", "model.temperature"),
    mapped("rollout.top_p", note="ludus, in each turn"),
    mapped("rollout.top_k", note="ludus, in each turn"),
    mapped("rollout.stop", note="ludus, in each turn"),
    adapted(
        "rollout.concurrency",
        note="a runner plays one group at a time (`explorer.runner_per_model`), of which it plays "
        "this many episodes, divided among the runners, at once",
    ),
    mapped(
        "rl.algorithm",
        "algorithm.algorithm_type",
        "algorithm.advantage_fn",
        "algorithm.advantage_fn_args",
        "algorithm.policy_loss_fn",
        "algorithm.policy_loss_fn_args",
        "algorithm.loss_agg_mode",
        "algorithm.entropy_loss_fn",
        "algorithm.entropy_loss_fn_args",
        "algorithm.kl_loss_fn",
        "algorithm.kl_loss_fn_args",
        note="grpo; others are refused. The unit of the loss is the experience: an episode with "
        "branches counts once for each",
        value=_algorithm,
        fault=_algorithm_fault,
    ),
    mapped(
        "rl.steps",
        "buffer.total_steps",
        "trainer.total_steps",
    ),
    mapped("rl.groups_per_step", "buffer.batch_size"),
    mapped("rl.group_size", "algorithm.repeat_times"),
    mapped("rl.epochs", f"{ACTOR}.ppo_epochs"),
    refused(
        "rl.minibatches",
        "Trinity splits a step by experiences, whose number varies with failed episodes and "
        "branches",
        1,
    ),
    adapted(
        "rl.tokens_per_batch",
        "trainer.max_token_len_per_gpu",
        "trainer.use_dynamic_bsz",
        note="Trinity adds the mean losses of a step's micro-batches: with N of them, the gradient "
        "before clipping is N times that of one",
        value=_tokens,
    ),
    mapped("rl.optimizer.lr", f"{OPTIMIZER}.lr"),
    mapped(
        "rl.optimizer.betas",
        f"{OPTIMIZER}.betas",
        value=lambda config: {f"{OPTIMIZER}.betas": list(rl_of(config).optimizer.betas)},
    ),
    mapped(
        "rl.optimizer.eps",
        f"{ACTOR}.optim.override_optimizer_config",
        value=lambda config: {
            f"{ACTOR}.optim.override_optimizer_config": {"eps": rl_of(config).optimizer.eps}
        },
    ),
    adapted(
        "rl.optimizer.weight_decay",
        f"{OPTIMIZER}.weight_decay",
        note="of all weights, also those of norms",
    ),
    mapped("rl.optimizer.max_grad_norm", f"{OPTIMIZER}.clip_grad", "trainer.grad_clip"),
    adapted(
        "rl.optimizer.warmup_steps",
        f"{OPTIMIZER}.lr_warmup_steps",
        note="the schedule moves once a step, not once an optimizer step",
        value=_warmup,
    ),
    mapped(
        "rl.optimizer.schedule",
        f"{OPTIMIZER}.lr_scheduler_type",
        fault=partial(schedule_fault, "Trinity"),
    ),
    refused("rl.optimizer.name", "Trinity's actor trains with AdamW", "adamw"),
    refused("rl.optimizer.target_kl", "Trinity's learning rate follows its schedule alone"),
    refused("rl.max_staleness", "the weights are synchronised after each step", 0),
    mapped("evaluate.num_tasks_between", note="Trinity's evaluation tasks"),
    mapped("evaluate.samples_per_task", note="ludus, in the runners"),
    mapped("evaluate.temperature", note="ludus, in each turn"),
    mapped(
        "evaluate.every",
        "explorer.eval_interval",
        "explorer.eval_on_startup",
        note="by ludus' explorer, which evaluates the weights after a step; Trinity's own "
        "evaluates those before it",
        value=_every,
    ),
    mapped("checkpoint.every", "trainer.save_interval"),
    mapped("checkpoint.keep_last", "trainer.max_checkpoints_to_keep"),
)

TABLE = Table("trinity", _ROWS)

DEFAULTS: Mapping[str, Any] = {
    f"{OPTIMIZER}.min_lr_ratio": 0.0,
    RUNNERS: 1,
    "log.level": "INFO",
}
"""Values in place of Trinity's defaults."""

CPU_DEFAULTS: Mapping[str, Any] = {
    "trainer.use_remove_padding": False,  # flash attention, which has no CPU build, unpads
    f"{VERL}.model.override_config": {"attn_implementation": "sdpa"},
    f"{ROLLOUT}.enforce_eager": True,
}
"""Further values where `model.device` is cpu."""

OWN = frozenset(
    {
        "algorithm.bypass_old_logprobs",
        "algorithm.kl_penalty_fn",
        "algorithm.sample_strategy",
        "buffer.explorer_input.eval_tasksets",
        "buffer.explorer_input.taskset",
        "buffer.train_batch_size",
        "buffer.trainer_input.experience_buffer",
        "checkpoint_root_dir",
        "cluster.gpu_per_node",
        "cluster.node_num",
        "continue_from_checkpoint",
        "data_processor.experience_pipeline.operators",
        "data_processor.experience_pipeline.save_input",
        "explorer.max_repeat_times_per_runner",
        "explorer.max_retry_times",
        "explorer.max_timeout",
        "explorer.over_rollout",
        "mode",
        "model.enable_prompt_truncation",
        "model.lora_configs",
        "model.model_path",
        "monitor.monitor_type",
        "name",
        "project",
        "ray_namespace",
        "stages",
        "synchronizer",
        "trainer.balance_batch",
        "trainer.save_hf_checkpoint",
        "trainer.trainer_strategy",
        "trainer.trainer_type",
        f"{ROLLOUT}.data_parallel_size",
        f"{ROLLOUT}.engine_num",
        f"{ROLLOUT}.engine_type",
        f"{ROLLOUT}.pipeline_parallel_size",
        f"{ROLLOUT}.tensor_parallel_size",
    }
)
"""Trinity's keys and sections that tie it to the run: `backend.args.trinity` cannot set them."""
