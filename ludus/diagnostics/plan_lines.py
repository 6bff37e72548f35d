"""A plan as text: memory, time and cost by part, and settings that reduce them."""

from __future__ import annotations

from ludus.config.schema import RunConfig
from ludus.core.types import Spec
from ludus.diagnostics.hardware import Hardware
from ludus.diagnostics.placement import placement
from ludus.diagnostics.plan import UNKNOWN_VOCABULARY, Plan

GIB = 1024**3
WIDTH = 21

LESS_STATE = (
    "set model.lora, or model.dtype: bfloat16 with learner.master_weights: stochastic_rounding"
)

REMEDIES = {
    "activations": "lower rl.tokens_per_batch and sft.tokens_per_batch, or set "
    "learner.gradient_checkpointing: true",
    "KV cache": "lower rollout.concurrency or model.context_length",
    "optimizer": LESS_STATE,
    "gradients": LESS_STATE,
    "weights": "set model.dtype: bfloat16, or take a smaller model",
    "other policies": "train fewer of `policies`, or adapters of a lower rank",
    "packed weights": "set sampler.args.dtype: bfloat16, or take a smaller model",
    "sampler's weights": "set sampler.args.dtype: auto, or take a smaller model",
}
"""Settings that reduce each part of the memory."""


def lines(config: RunConfig, plan: Plan) -> list[str]:
    """Returns the lines of a plan."""
    on = plan.hardware
    text = [
        f"{config.name}: {plan.num_parameters:,} parameters, {plan.tokens:,.0f} tokens "
        "of training episodes",
        *_assumptions(config),
        *plan.notes,
        device_line(on),
        "",
        *placement(config),
        "",
        "memory",
        *[f"  {part:{WIDTH}} {size(count):>12}" for part, count in plan.memory.items()],
        f"  {'total':{WIDTH}} {size(sum(plan.memory.values())):>12} of {size(on.memory)}",
        "",
        "time",
        *[f"  {part:{WIDTH}} {duration(seconds):>12}" for part, seconds in plan.seconds.items()],
        f"  {'total':{WIDTH}} {duration(plan.hours * 3600, exact=True):>12}",
        *_method(config),
    ]
    budget = config.budget
    if budget.price_per_hour is not None:
        cost = plan.hours * budget.price_per_hour
        text += ["", f"cost  {cost:,.2f} {budget.currency}"]
        if budget.max_cost is not None and cost > budget.max_cost:
            text.append(f"more than budget.max_cost, {budget.max_cost:g}: the run may stop there")
    if budget.max_hours is not None and plan.hours > budget.max_hours:
        text.append(f"longer than budget.max_hours, {budget.max_hours:g}: the run may stop there")
    if budget.max_tokens is not None and plan.tokens > budget.max_tokens:
        text.append(f"more than budget.max_tokens, {budget.max_tokens:,}: the run may stop there")
    if not plan.fits:
        largest = max(plan.memory, key=lambda part: plan.memory[part])
        text += ["", f"out of memory: the largest part is {largest}: {REMEDIES[largest]}"]
    return text


def device_line(on: Hardware) -> str:
    """Returns the device and its rates."""
    return (
        f"on {on.name}: {on.memory / GIB:,.0f} GiB, {on.bandwidth / 1e9:,.0f} GB/s, "
        f"{_peak(on.flops)} in bfloat16, {_peak(on.flops32)} in float32 ({on.source})"
    )


def size(count: float) -> str:
    """Returns bytes in MiB or GiB."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / 1024**2:,.0f} MiB"


def _peak(flops: float) -> str:
    return f"{flops / 1e12:,.2f} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:,.0f} GFLOP/s"


def duration(seconds: float, *, exact: bool = False) -> str:
    """Returns seconds as s, min or h; `exact`: up to ten minutes as min and s."""
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} h"
    if exact and 60 <= (whole := round(seconds)) < 600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{seconds / 60:,.0f} min" if seconds >= 60 else f"{seconds:,.0f} s"


def _method(config: RunConfig) -> list[str]:
    """The algorithm, steps and episodes that RL's times are of."""
    rl = config.rl
    if rl is None:
        return []
    added = "; SFT's unused steps add to them" if rl.steps_per_unused_sft_step else ""
    return [
        f"(rl: {rl.algorithm.name}, {rl.steps:,} steps of {rl.groups_per_step} x {rl.group_size} "
        f"episodes{added})"
    ]


def _assumptions(config: RunConfig) -> list[str]:
    tokenizer = config.model.tokenizer
    sized = isinstance(tokenizer, Spec) and tokenizer.args.get("vocab_size")
    if config.model.path is not None or sized:
        return []
    return [f"(for {UNKNOWN_VOCABULARY:,} tokens: the tokenizer is not trained yet)"]
