"""Costs of a run's parts: from the data sheet and stated efficiencies, given, or measured.

pass        max(bytes read / bandwidth, operations / peak) + launches + sampling a sequence
prefill     operations of its tokens / (peak * prefill_mfu)
training    max(operations / (peak * train_mfu), communication of FSDP), and STEP_S
FSDP        a micro-batch moves the weights three times (gathered in the forward and in the
            backward pass, gradients scattered), at the slowest link's bandwidth
publication bytes of the weights / bandwidth of the slowest link, once: a pipelined broadcast
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError
from ludus.diagnostics.hardware import Hardware
from ludus.diagnostics.memory import Memory
from ludus.diagnostics.plan import PARTING, STEP_S, shape_of
from ludus.diagnostics.simulation.replica import PassCost
from ludus.diagnostics.simulation.spec import ClusterSpec
from ludus.models.flops import Shape
from ludus.train import ALGORITHMS

MEMORY_USED = 0.9
"""Part of a GPU's memory that a sampler uses, as vLLM's default `gpu_memory_utilization`."""

SLOW_TURN_S, SLOW_TOKEN_S = 0.4e-3, 30e-6
"""Processor seconds of ludus for a turn, and for a sampled token, on a slow core of a busy machine
(docs/benchmarks/growth.json); `ludus plan` has those of a fast one."""

TENSOR_PARALLEL_S = 20e-6
"""Seconds a layer and pass of the two all-reduces of a tensor-parallel sampler."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of the parts. `sources` says where each number comes from.

    Args:
        train_token_s: of a computed token, all learner ranks together.
        comm_batch_s, batch_tokens: communication of a micro-batch; its tokens, over all ranks.
        turn_s, turn_env_s: processor time of a turn besides sampling; of this, the environment's.
        parting: part of a group's tokens after the prompt that its episodes do not share.
        prompt_share, observed_share: parts of prompts and observations that samplers compute; the
            rest is shared by the episodes of a group.
        capacity: tokens of a replica's KV cache.
    """

    decoding: PassCost
    prefill_token_s: float
    train_token_s: float
    train_step_s: float = STEP_S
    comm_batch_s: float = 0.0
    batch_tokens: float = math.inf
    sync_s: float = 0.0
    turn_s: float = SLOW_TURN_S
    turn_env_s: float = 0.0
    capacity: float = math.inf
    parting: float = 1.0
    shares_prefixes: bool = True
    prompt_share: float = 1.0
    observed_share: float = 1.0
    sources: Mapping[str, str] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    """Bytes by part, of a device of the learner."""

    def computed_tokens(self, tokens: float, prompts: float, group_size: int) -> float:
        """Returns the tokens that training computes, with shared prefixes once."""
        if not self.shares_prefixes:
            return tokens
        alike = tokens / group_size
        apart = tokens - prompts * (1 - 1 / group_size)
        return alike + self.parting * (apart - alike)

    def train_seconds(self, tokens: float, prompts: float, group_size: int) -> float:
        """Returns the seconds of a training step on episodes of so many tokens."""
        computed = self.computed_tokens(tokens, prompts, group_size)
        passes = computed / self.batch_tokens if math.isfinite(self.batch_tokens) else 0.0
        communication = math.ceil(passes) * self.comm_batch_s
        return max(computed * self.train_token_s, communication) + self.train_step_s


def device_costs(
    config: RunConfig, spec: ClusterSpec, on: Hardware, length: float, sampled: float
) -> Costs:
    """Returns the costs on a device by its data sheet.

    Args:
        length, sampled: mean tokens of an episode; of these, sampled ones.

    Errors: ConfigError where the model does not fit.
    """
    shape = shape_of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    num = sum(p.numel() for p in model.parameters())
    flops, memory, given = Shape.of(model), Memory(config, shape), spec.costs
    ranks, width = spec.learners, spec.gpus_per_sampler
    learner = _learner_memory(config, memory, num, ranks)
    capacity = _capacity(spec, on, memory, num, learner)
    communication = 3 * num * memory.item * (1 - 1 / ranks) / _bandwidth(spec, ranks)
    rl = config.rl
    batch = rl.tokens_per_batch * ranks if rl else math.inf
    passes = forward_passes(config, trained=1.0)
    work = flops.forward(1, sampled / length, length / 2)
    parted = 1 - math.exp(-PARTING * sampled)
    share = min(spec.samplers / rl.group_size, 1.0) if rl else 1.0
    return Costs(
        decoding=_decoding(flops, memory, on, width, given.decode_efficiency),
        prefill_token_s=flops.forward(1, 0, length / 2)
        / (width * _peak(on, memory.sampling_item) * given.prefill_mfu),
        train_token_s=passes * work / (ranks * _peak(on, memory.training_item) * given.train_mfu),
        comm_batch_s=communication,
        batch_tokens=batch if ranks > 1 else math.inf,
        sync_s=_publication(spec, num * memory.sampling_item),
        capacity=capacity,
        parting=parted,
        shares_prefixes=config.learner.share_prefixes,
        prompt_share=share,
        memory=learner,
        sources=_sources(config, spec, on),
    )


def forward_passes(config: RunConfig, trained: float) -> float:
    """Returns the work of training on a token of an episode, in forward passes.

    3 an epoch, 4 with gradient checkpointing, on the part `trained` of the episodes: groups with a
    signal. One more on all episodes for the learner's own log-probabilities (`importance_cap`), and
    for a reference model.
    """
    assert config.rl is not None
    algorithm = ALGORITHMS.build(config.rl.algorithm, "rl.algorithm")
    scored = (algorithm.importance is not None) + (algorithm.reference is not None)
    passes = 4 if config.learner.gradient_checkpointing else 3
    return config.rl.epochs * passes * trained + scored


def with_given(costs: Costs, spec: ClusterSpec) -> Costs:
    """Returns the costs with those that the SPEC gives in their place."""
    given, sources = spec.costs, dict(costs.sources)
    decoding = costs.decoding
    changes: dict[str, Any] = {}
    if given.pass_s is not None or given.row_s is not None:
        decoding = PassCost(
            fixed_s=costs.decoding.fixed_s if given.pass_s is None else given.pass_s,
            row_s=costs.decoding.row_s if given.row_s is None else given.row_s,
        )
        sources["decoding"] = "given: costs.pass_s, costs.row_s"
    for name in ("prefill_token_s", "train_token_s", "train_step_s", "turn_s", "sync_s"):
        if (value := getattr(given, name)) is not None:
            changes[name] = value
            sources[PART_OF[name]] = f"given: costs.{name}"
    if given.turn_s is not None:  # of ludus alone
        changes["turn_env_s"] = 0.0
    elif spec.environment.cpu_s is not None:  # in place of the measured one
        changes["turn_s"] = costs.turn_s - costs.turn_env_s
        changes["turn_env_s"] = 0.0
    return replace(costs, decoding=decoding, sources=sources, **changes)


PART_OF = {
    "prefill_token_s": "prefill",
    "train_token_s": "training",
    "train_step_s": "step",
    "turn_s": "turn",
    "sync_s": "publication",
}
"""Key of SPEC to the row of its source."""


def _decoding(
    flops: Shape, memory: Memory, on: Hardware, width: int, efficiency: float
) -> PassCost:
    bandwidth = width * on.bandwidth * efficiency
    peak = width * _peak(on, memory.sampling_item) * efficiency
    layer_s = on.layer_s + (TENSOR_PARALLEL_S if width > 1 else 0.0)
    return PassCost(
        read_s=(flops.body + flops.head) * memory.sampling_item / bandwidth,
        context_read_s=memory.cache_item / bandwidth,
        row_flop_s=2 * (flops.body + flops.head) / peak,
        context_flop_s=4 * flops.width / peak,
        fixed_s=memory.layers * layer_s,
        row_s=SLOW_TOKEN_S,
    )


def _peak(on: Hardware, item: int) -> float:
    return on.flops if item == 2 else on.flops32


def _learner_memory(config: RunConfig, memory: Memory, num: int, ranks: int) -> dict[str, float]:
    """Bytes of a learner's device: states split over the ranks (FSDP), activations whole."""
    trained = num if config.model.lora is None else 0
    parts = memory.parts(num, trained)
    split = {name: parts[name] / ranks for name in ("weights", "gradients", "optimizer")}
    return {**split, "activations": parts["activations"]}


def _capacity(
    spec: ClusterSpec, on: Hardware, memory: Memory, num: int, learner: Mapping[str, float]
) -> float:
    """Tokens that fit into a replica's KV cache."""
    if sum(learner.values()) > on.memory:
        largest = max(learner, key=lambda name: learner[name])
        raise ConfigError(
            f"--cluster: the learner needs {sum(learner.values()) / 1e9:,.0f} GB of a {on.name} "
            f"with {on.memory / 1e9:,.0f} GB on {spec.learners} of them; the largest part is "
            f"{largest}: set more learner_gpus, model.lora or learner.gradient_checkpointing"
        )
    width = spec.gpus_per_sampler
    room = MEMORY_USED * on.memory * width - num * memory.sampling_item
    if spec.layout != "disaggregated":
        room -= sum(learner[name] for name in ("weights", "gradients", "optimizer")) * width
    if room < memory.cache_item * memory.config.model.context_length:
        raise ConfigError(
            f"--cluster: a sampler of {width} {on.name} has no room for an episode of "
            f"{memory.config.model.context_length:,} tokens: raise gpus_per_sampler"
        )
    return room / memory.cache_item


def _bandwidth(spec: ClusterSpec, ranks: int) -> float:
    """Bytes per second of the slowest link between ranks."""
    inside = ranks <= max(spec.nodes.gpus, 1)
    return 1e9 * (spec.network.gpu_gb_s if inside else spec.network.node_gb_s)


def _publication(spec: ClusterSpec, size: float) -> float:
    if spec.layout == "local":
        return 0.0  # part of the step
    if spec.layout == "colocated":
        return spec.network.latency_s + size / _bandwidth(spec, spec.learners)
    return spec.network.latency_s + size / _bandwidth(spec, spec.num_gpus)


def _sources(config: RunConfig, spec: ClusterSpec, on: Hardware) -> dict[str, str]:
    given = spec.costs
    peaks = f"{on.name}'s peaks ({on.source})"
    return {
        "decoding": f"assumed: {given.decode_efficiency:g} of {peaks}, and "
        f"{on.layer_s * 1e6:g} us a layer, {SLOW_TOKEN_S * 1e6:g} us a sequence",
        "prefill": f"assumed: {given.prefill_mfu:g} of the peak; the prompt once a group "
        "and sampler",
        "training": f"assumed: {given.train_mfu:g} of the peak, communication overlapped, "
        "all groups have a signal",
        "step": f"assumed: {STEP_S:g} s beside the model's work",
        "turn": f"assumed: {SLOW_TURN_S * 1e3:g} ms of a core (docs/benchmarks/growth.json)",
        "publication": "assumed: the weights once over the slowest link"
        if spec.layout != "local"
        else "assumed: none, part of the step",
    }
