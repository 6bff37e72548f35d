"""Estimate memory, time and cost of a recipe on given hardware. Trains nothing.

Computed from the recipe, the model's shape and a few of the expert's episodes (`episodes.Usage`):
a policy in training is taken to use a quarter of the turns between the expert's and the limit.
Without an expert, or where `fill` is given, episodes use the fraction `fill` of their turns and
context. The device reaches the fraction `efficiency` of its peak.

    weights                                parameters * bytes of model.dtype
    gradients, AdamW's state               trained parameters * bytes of `optimizers.adamw`'s table
    activations                            saved by autograd for tokens_per_batch tokens
    KV cache                               rollout.concurrency * model.context_length tokens
    sampling    max(bytes read / bandwidth, operations / peak), one pass a token of a turn
    training    3 forward passes of every token, with prefixes that a group shares computed once
    episodes    the environment's seconds as measured, one call after the other, or `env_step_s` a
                step with `Env.at_once` of them at once; those of ludus a turn (TURN_S); in RL
                on a CPU divided by the processes that play (`rollout.processes`)
    tools       calls * seconds of a call (`ToolCalls`)

Floors, on any device: the time of a layer's kernels (`Hardware.layer_s`) a pass, SAMPLED_S a token,
TURN_S a turn, STEP_S a step and START_S a run. TURN_S and SAMPLED_S come from RL of five recipes of
`ludus init` (a million parameters, two cores of an AMD EPYC of 2024, docs/log.md); a slower core
takes up to three times as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ludus.backends import BACKENDS
from ludus.config.schema import RunConfig
from ludus.core.types import Spec
from ludus.diagnostics.episodes import Usage, local
from ludus.diagnostics.hardware import Hardware
from ludus.diagnostics.memory import WEIGHTS, Memory
from ludus.diagnostics.placement import of_class
from ludus.diagnostics.tool_calls import NO_CALLS, ToolCalls, tool_calls
from ludus.envs import ENVS
from ludus.models.build import model_shape
from ludus.models.flops import Shape
from ludus.pipeline.rollout_processes import expected_processes
from ludus.tasks import READERS
from ludus.tasks.ratios import shares
from ludus.train.schedule import turn_limit

UNKNOWN_VOCABULARY = 1024
"""Size of a tokenizer that is not trained yet and sets no `vocab_size`."""

START_S = 10.0
"""Seconds of imports, set-up and report."""

STEP_S = 0.05
"""Seconds of a step besides the model's work: batches, optimizer, publication, metrics."""

TURN_S = 0.1e-3
"""Processor seconds of ludus for a turn: parsing, templates, tokens, records. One core does it."""

SAMPLED_S = 6e-6
"""Processor seconds for a sampled token besides the model's: a draw, its record."""

EFFICIENCY, CPU_SAMPLING = 0.35, 0.8
"""Fractions of torch's peak that training and sampling reach, and that ludus' sampler reaches on a
CPU: its products of a few rows are faster than torch's, and keys and values mostly lie in the
caches."""

PARTING = 0.005
"""Probability that an episode parts from its group's others at a sampled token; fitted to the
distinct tokens of BabyAI's tiny recipe."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes and seconds by part, in the order of the run."""

    hardware: Hardware
    num_parameters: int
    memory: dict[str, float]
    seconds: dict[str, float]
    tokens: float
    notes: Sequence[str] = ()

    @property
    def fits(self) -> bool:
        return sum(self.memory.values()) <= self.hardware.memory

    @property
    def hours(self) -> float:
        return sum(self.seconds.values()) / 3600


@dataclass(frozen=True, slots=True)
class Episodes:
    """Sizes of an episode: all tokens, tokens of the prompt, sampled tokens, turns."""

    length: float
    sampled: float
    turns: float
    prompt: float = 0.0


def plan(
    config: RunConfig,
    on: Hardware,
    *,
    fill: float | None = None,
    efficiency: float | None = None,
    env_step_s: float | None = None,
    usage: Usage | None = None,
    num_calls: float | None = None,
    call_s: float | None = None,
) -> Plan:
    """Estimate memory and time of a recipe.

    Args:
        usage: sizes and seconds of the expert's episodes.
        fill: fraction of the turns, of the tokens a turn and of the context that episodes use, in
            place of the expert's sizes; the environment's seconds stay. None without an expert: 1.
        efficiency: fraction of the device's peak that training and sampling reach; None:
            EFFICIENCY, and CPU_SAMPLING of sampling on this machine's CPU.
        env_step_s: seconds of one step of the environment, in place of the measured ones.
        num_calls, call_s: tool calls an episode and seconds of a call, see `tool_calls`.

    Errors: ConfigError for a model that cannot be read.
    """
    estimate, num, trained = _estimate(
        config, on, fill, efficiency, env_step_s, usage, num_calls, call_s
    )
    seconds = estimate.seconds()
    memory = estimate.memory.parts(num, trained, estimate.cost.body)
    return Plan(on, num, memory, seconds, estimate.tokens, estimate.calls.lines)


def playing(
    config: RunConfig,
    on: Hardware,
    num_tasks: int,
    samples: int,
    *,
    fill: float | None = None,
    efficiency: float | None = None,
    usage: Usage | None = None,
    num_calls: float | None = None,
    call_s: float | None = None,
) -> Plan:
    """Estimate memory and time of episodes of a model that does not train: `samples` a task.

    Further arguments and errors: as `plan`. Without the time of a start.
    """
    estimate, num, _ = _estimate(config, on, fill, efficiency, None, usage, num_calls, call_s)
    memory = estimate.memory.parts(num, 0, estimate.cost.body)
    memory = {part: memory[part] for part in (*WEIGHTS, "KV cache") if part in memory}
    seconds = estimate.played(num_tasks * samples, samples)
    return Plan(on, num, memory, seconds, 0.0, estimate.calls.lines)


def _estimate(
    config: RunConfig,
    on: Hardware,
    fill: float | None,
    efficiency: float | None,
    env_step_s: float | None,
    usage: Usage | None,
    num_calls: float | None,
    call_s: float | None,
) -> tuple[_Estimate, int, int]:
    """Returns the estimate, all parameters, and the trained ones."""
    config = local(config)
    shape = shape_of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    num = sum(p.numel() for p in model.parameters())
    trained = _adapters(model, config.model.lora.rank) if config.model.lora else num
    sizes = usage if fill is None else None
    fill = 1.0 if fill is None else fill
    calls = tool_calls(config, sizes, fill, num_calls, call_s)
    cost = Shape.of(model)
    memory = Memory(config, shape)
    found = _Estimate(config, on, memory, cost, fill, efficiency, env_step_s, sizes, calls, usage)
    return found, num, trained


def shape_of(config: RunConfig) -> PreTrainedConfig:
    """Returns the shape of the recipe's model. Errors: ConfigError."""
    tokenizer = config.model.tokenizer
    size = tokenizer.args.get("vocab_size") if isinstance(tokenizer, Spec) else None
    return model_shape(config.model, size or UNKNOWN_VOCABULARY)


def _adapters(model: Any, rank: int) -> int:
    """Returns the parameters of low-rank adapters on all linear layers except the head."""
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return sum(rank * (m.in_features + m.out_features) for m in linear)


@dataclass(slots=True)
class _Estimate:
    config: RunConfig
    on: Hardware
    memory: Memory
    cost: Shape
    fill: float
    given_efficiency: float | None
    env_step_s: float | None
    usage: Usage | None = None
    """Sizes of episodes; None: by `fill`."""
    calls: ToolCalls = NO_CALLS
    timed: Usage | None = None
    """Seconds of episodes; None: unknown."""
    tokens: float = 0.0
    """Of all training episodes; counted by `seconds`."""

    @property
    def efficiency(self) -> float:
        return EFFICIENCY if self.given_efficiency is None else self.given_efficiency

    @property
    def sampling_efficiency(self) -> float:
        on_cpu = self.config.model.device == "cpu" and self.on.name == "here"
        return CPU_SAMPLING if self.given_efficiency is None and on_cpu else self.efficiency

    def _flops(self, item: int, efficiency: float) -> float:
        return efficiency * (self.on.flops if item == 2 else self.on.flops32)

    def seconds(self) -> dict[str, float]:
        """Returns seconds by part; counts `tokens`."""
        config, parts = self.config, {"start": START_S}
        self.tokens = 0.0
        episode = self._episode(config.rollout.max_turns)
        if config.demonstrations is not None and self.timed is not None:
            played = self.timed.expert_s * config.demonstrations.num_episodes
            parts["demonstrations"] = played / config.demonstrations.num_workers
            if self.calls.demonstrated:
                parts["demonstrations: tools"] = self.calls.demonstration_s(config)
        if config.sft is not None:
            number = config.sft.steps * config.sft.episodes_per_step
            shown = self._shown(episode)
            tokens = number * shown.length
            parts["sft"] = self._training(
                tokens, tokens, shown.length, config.sft.tokens_per_batch, config.sft.steps
            )
        if config.rl is not None:
            sampling, training, waiting = 0.0, 0.0, 0.0
            computes = self.env_step_s is None and config.model.device == "cpu"
            processes = expected_processes(config) if computes else 1
            for steps, turns in _phases(config):
                now = self._episode(turns)
                number = config.rl.groups_per_step * config.rl.group_size
                distinct = self._distinct(now, config.rl.group_size)
                sampling += steps * self._sampling(number, now, distinct)
                training += config.rl.epochs * self._training(
                    steps * number * now.length,
                    steps * number * now.length * distinct,
                    now.length,
                    config.rl.tokens_per_batch,
                    steps,
                    now.sampled / now.length if config.learner.detach_observations else 1.0,
                )
                waiting += steps * self._playing(number, now) / processes
            parts |= {"rl: sampling": sampling, "rl: training": training}
            if waiting:
                parts["rl: environment"] = waiting
            played = config.rl.steps * config.rl.groups_per_step * config.rl.group_size
            if self.calls.number:
                parts["rl: tools"] = self.calls.time(played)
        evaluated = self._measured() + (self._evaluated() if config.tasks.heldout else 0)
        if evaluated or config.tasks.heldout is not None:
            parts["evaluation"] = self._evaluation(evaluated, episode)
            if self.calls.number and evaluated:
                parts["evaluation: tools"] = self.calls.time(evaluated)
        return parts

    def played(self, episodes: int, samples: int) -> dict[str, float]:
        """Returns seconds by part of episodes that do not train, `samples` a task."""
        if not episodes:
            return {}
        one = self._episode(self.config.rollout.max_turns)
        parts = {"sampling": self._sampling(episodes, one, self._distinct(one, samples))}
        parts["environment"] = self._playing(episodes, one)
        if self.calls.number:
            parts["tools"] = self.calls.time(episodes)
        return parts

    def _shown(self, episode: Episodes) -> Episodes:
        """Returns an episode of the SFT data: the expert's, or one of the policy's."""
        return self._of_turns(self.usage.turns) if self.usage is not None else episode

    def _of_turns(self, turns: float) -> Episodes:
        """Returns an episode of measured turns, at most the context."""
        usage, context = self.usage, self.config.model.context_length
        assert usage is not None
        a_turn = usage.observed + usage.sampled
        turns = max(min(turns, (context - usage.prompt) / max(a_turn, 1e-9)), 1.0)
        length = min(usage.prompt + turns * a_turn, context)
        return Episodes(length, turns * usage.sampled, turns, min(usage.prompt, context))

    def _distinct(self, one: Episodes, group_size: int) -> float:
        """Returns the fraction of a group's tokens that are computed.

        Between one episode for all, where a group's episodes are alike, and only the prompt shared.
        """
        if self.usage is None:
            return 1.0
        apart = one.prompt + group_size * (one.length - one.prompt)
        parted = 1 - math.exp(-PARTING * one.sampled)
        return (one.length + parted * (apart - one.length)) / (group_size * one.length)

    def _playing(self, episodes: float, one: Episodes) -> float:
        """Returns the seconds of environments and of ludus for episodes, on one core; with
        `env_step_s`, the environment's steps take place `_at_once`."""
        timed = self.timed
        if self.env_step_s is not None:
            step_s = self.env_step_s / max(min(self._at_once, episodes), 1)
        else:
            step_s = timed.step_s if timed else 0.0
        return episodes * ((timed.reset_s if timed else 0.0) + one.turns * (step_s + TURN_S))

    @property
    def _at_once(self) -> float:
        """Steps of environments at the same time."""
        config = self.config
        most = config.rollout.concurrency
        bound: int | None = of_class(config.env, "at_once") if config.env else None
        if bound is None:
            return most
        workers: int = 1
        if config.backend.name == "ray":
            workers = BACKENDS.check(config.backend, "backend").get("env_workers") or 1
        return min(most, bound * workers)

    def _episode(self, max_turns: int | dict[str, int] | None) -> Episodes:
        """Returns a policy's episode: from the measured usage, or the largest times `fill`. For a
        mixture, the mean of its parts."""
        context, tokens = self.config.model.context_length, self.config.rollout.max_tokens_per_turn
        parts = _turns(self.config, max_turns)
        turns = sum(share * number for share, number in parts)
        if self.usage is not None:
            shown = min(self.usage.turns, turns)
            return self._of_turns(shown + (turns - shown) / 4)
        sampled = sum(share * min(number * tokens, context) for share, number in parts)
        return Episodes(self.fill * context, self.fill * sampled, max(self.fill * turns, 1.0))

    def _sampling(self, episodes: int, one: Episodes, distinct: float = 1.0) -> float:
        """Returns seconds of prefill (the `distinct` fraction of prompts and observations) and of
        decoding the turns."""
        batch = min(episodes, self.config.rollout.concurrency)
        item = self.memory.sampling_item
        efficiency = self.sampling_efficiency
        flops = self._flops(item, efficiency)
        weights = (self.cost.body + self.cost.head) * item
        read = weights + batch * one.length / 2 * self.memory.cache_item
        step = max(
            read / (efficiency * self.on.bandwidth),
            self.cost.forward(batch, batch, batch * one.length / 2) / flops,
        )
        observed = max(one.length - one.sampled, 0.0) * episodes * distinct
        prefill = self.cost.forward(observed, 0, observed * one.length / 2) / flops
        step += self.memory.layers * self.on.layer_s
        sampled = one.sampled * episodes
        return prefill + step * sampled / batch + SAMPLED_S * sampled

    def _training(
        self,
        tokens: float,
        distinct: float,
        length: float,
        tokens_per_batch: int,
        steps: int,
        back: float = 1.0,
    ) -> float:
        """Returns seconds of `steps` steps on `tokens`, of which `distinct` are computed, with the
        gradients of the share `back` of their states."""
        self.tokens += tokens
        passes = 4 if self.config.learner.gradient_checkpointing else 3
        forward = self.cost.forward(distinct, distinct, distinct * length / 2)
        work = (passes - 2 + 2 * back) * forward
        batches = max(distinct / tokens_per_batch, steps)
        overhead = passes * batches * self.memory.layers * self.on.layer_s
        return (
            work / self._flops(self.memory.training_item, self.efficiency)
            + overhead
            + steps * STEP_S
        )

    def _measured(self) -> int:
        """Returns the episodes that `sft.until` plays in all steps of SFT."""
        sft = self.config.sft
        if sft is None or sft.until is None:
            return 0
        times = -(-sft.steps // sft.until.every)
        return times * sft.until.num_tasks * sft.until.samples_per_task

    def _evaluated(self) -> int:
        """Returns the episodes of all evaluations on held-out tasks."""
        settings, rl = self.config.evaluate, self.config.rl
        heldout = self.config.tasks.heldout
        listed = int(heldout.args.get("num_tasks", 0)) if heldout else 0
        whole = settings.num_tasks or listed
        between = settings.num_tasks_between or whole
        times = (rl.steps - 1) // settings.every if rl and settings.every else 0
        ends = (2 if rl else 1) + settings.before_sft
        return (whole * ends + between * times) * settings.samples_per_task

    def _evaluation(self, played: int, episode: Episodes) -> float:
        if not played:
            return 0.0
        return self._sampling(played, episode) + self._playing(played, episode)


def _phases(config: RunConfig) -> list[tuple[int, int | dict[str, int] | None]]:
    """Returns pairs of RL steps and the turn limit of their episodes."""
    rl = config.rl
    assert rl is not None
    horizon = rl.horizon or []
    schedules = horizon.values() if isinstance(horizon, dict) else [horizon]
    changes = {start for schedule in schedules for start, _ in schedule if start < rl.steps}
    starts = [*sorted({0, *changes}), rl.steps]
    return [(stop - start, turn_limit(config, start)) for start, stop in pairwise(starts)]


def turns_of_parts(config: RunConfig) -> list[tuple[float, int]]:
    """Returns pairs of a share of the episodes and their turn limit, in the last steps of RL."""
    return _turns(config, _phases(config)[-1][1])


def _turns(config: RunConfig, limit: int | dict[str, int] | None) -> list[tuple[float, int]]:
    """Returns pairs of a share of the episodes (the sum is 1) and their turn limit."""
    if config.env is None or isinstance(limit, int):
        return [(1.0, limit if isinstance(limit, int) else 1)]
    env = ENVS.build(config.env, "env")
    if not (members := env.members()):
        return [(1.0, env.max_turns)]
    parts = READERS.check(config.tasks.train, "tasks.train").get("parts", {})
    ratios, limits = shares({name: part.ratio for name, part in parts.items()}), limit or {}
    alone = {name for name, part in parts.items() if part.env}  # without environment: one turn
    turns = {n: 1 if n in alone else limits.get(n) or members[n].max_turns for n in ratios}
    return [(r / sum(ratios.values()), turns[n]) for n, r in ratios.items()]
