"""Values for a pretrained model: by the table of starting values, and by what fits the machine.

A short trial of a large model says nothing about its learning, so none is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ludus.config.schema import RunConfig
from ludus.config.sections import LoraConfig
from ludus.core.errors import ConfigError
from ludus.core.types import Spec
from ludus.diagnostics.calibration.starting import Start, start_of
from ludus.diagnostics.hardware import find_hardware
from ludus.diagnostics.plan import Plan, plan

IMPORTANCE_CAP = 2.0
"""Largest correction of a token where sampler and learner compute in bfloat16, whose kernels round
differently."""

ROOM = 0.8
"""Share of the machine's memory that a run may take by the estimate, whose error is about 10 %."""

SFT_SHARE = 0.5
"""Largest share of the minutes for SFT, by the estimate."""

LEAST_SFT = 20
"""Steps of SFT in any case: two measurements of `sft.until`."""


def device() -> str:
    """The first GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def with_starting_values(
    config: RunConfig, minutes: float, say: Callable[[str], object]
) -> tuple[RunConfig, Start]:
    """The recipe with starting values, in the largest form that fits: all weights, adapters, then
    adapters with activations recomputed.

    Errors: ConfigError where no form fits, with the memory that is missing.
    """
    hardware = find_hardware("here", config.model)
    start = start_of(plan(config, hardware).num_parameters)
    forms: list[tuple[str, dict[str, Any]]] = [
        ("all weights", {}),
        ("adapters of rank 16", {"lora": LoraConfig(rank=16, alpha=32.0)}),
        ("adapters, with activations recomputed", {"lora": LoraConfig(rank=16, alpha=32.0)}),
    ]
    needed = 0.0
    for number, (name, model) in enumerate(forms):
        tried = _of(config, start, model, checkpointing=number == 2)
        planned = plan(tried, hardware)
        needed = sum(planned.memory.values())
        say(f"{name}: {needed / 1e9:.1f} GB of {hardware.memory / 1e9:.1f} GB, estimated")
        if needed <= ROOM * hardware.memory:
            return _timed(tried, planned, minutes), start
    raise ConfigError(
        f"model.path: {config.model.path} needs about {needed / 1e9:.0f} GB even with adapters, "
        f"and this machine has {hardware.memory / 1e9:.0f} GB: name a smaller model with --model, "
        + ("" if config.agent else "leave --model out (a model from scratch), ")
        + "or use a larger machine"
    )


def _of(
    config: RunConfig, start: Start, model: dict[str, Any], *, checkpointing: bool
) -> RunConfig:
    factor = start.lora_factor if model else 1.0
    on_gpu = config.model.device != "cpu"
    learner: dict[str, Any] = {"gradient_checkpointing": checkpointing}
    updates: dict[str, Any] = {"model": config.model.model_copy(update=model)}
    if on_gpu:  # products in float32 take 15 times as long; weights and updates stay in float32
        learner["dtype"] = "bfloat16"
        updates["sampler"] = Spec(name="in_process", args={"dtype": "bfloat16"})
    updates["learner"] = config.learner.model_copy(update=learner)
    if config.sft is not None:
        optimizer = config.sft.optimizer.model_copy(update={"lr": start.sft_lr * factor})
        updates["sft"] = config.sft.model_copy(update={"optimizer": optimizer})
        if config.tasks.heldout is not None:
            updates["evaluate"] = config.evaluate.model_copy(update={"before_sft": True})
    assert config.rl is not None
    args = {"kl_coefficient": start.kl} if start.kl else {}
    if on_gpu:
        args["importance_cap"] = IMPORTANCE_CAP
    optimizer = config.rl.optimizer.model_copy(
        update={"lr": start.rl_lr * factor, "eps": 1e-8, "warmup_steps": 5, "schedule": "constant"}
    )
    updates["rl"] = config.rl.model_copy(
        update={
            "algorithm": Spec(name="grpo", args=args),
            "optimizer": optimizer,
            "groups_per_step": start.groups,
            "group_size": start.group_size,
            "minibatches": 1,
        }
    )
    return config.model_copy(update=updates)


def _timed(config: RunConfig, planned: Plan, minutes: float) -> RunConfig:
    """Steps that fit into the minutes by the estimate: of SFT in at most SFT_SHARE of them, of RL
    in the rest; at least LEAST_SFT and 1."""
    assert config.rl is not None
    seconds = dict(planned.seconds)
    updates: dict[str, Any] = {}
    if config.sft is not None and seconds["sft"] > (most := SFT_SHARE * 60 * minutes):
        steps = max(int(most / seconds["sft"] * config.sft.steps), LEAST_SFT)
        seconds["sft"] *= steps / config.sft.steps
        updates["sft"] = config.sft.model_copy(update={"steps": steps})
    fixed = sum(taken for part, taken in seconds.items() if not part.startswith("rl"))
    of_rl = max(sum(seconds.values()) - fixed, 1e-3)
    number = int((60 * minutes - fixed) / of_rl * config.rl.steps)
    updates["rl"] = config.rl.model_copy(update={"steps": max(min(number, 300), 1)})
    return config.model_copy(update=updates)
