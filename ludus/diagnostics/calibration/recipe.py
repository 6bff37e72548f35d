"""The commented recipe of a calibration: one page, each value with its reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from ludus.config.schema import ModelConfig, RunConfig
from ludus.core.errors import counted
from ludus.core.types import Spec
from ludus.data.conversations import Conversation
from ludus.diagnostics.calibration.calibrate import Calibration
from ludus.diagnostics.calibration.choices import is_expected
from ludus.diagnostics.calibration.levels import MOST_TOLD
from ludus.diagnostics.calibration.subject import for_training
from ludus.diagnostics.calibration.trials.sft import small_steps
from ludus.envs import ENVS

Line = tuple[str, Any, str]
"""A key, its value, and the reason; the value None is left out."""


def write(c: Calibration, command: str) -> str:
    """The recipe's text. `command`: that was called."""
    lines = [
        f"# Written by `{command}`, from measurements of {c.seconds:.0f} s on this machine.",
        "# All keys: `ludus config`. The comments say what was measured."
        + (" Paths count from where `ludus train` starts." if _has_paths(c) else ""),
        f"name: {flow(c.config.name)}",
        *([f"seed: {c.config.seed}"] if c.config.seed else []),
        *section("model", _model(c)),
        *of_products(c.config, c.trial.told_dtypes),
    ]
    for key in ("env", "judge"):
        if (spec := getattr(c.config, key)) is not None:
            lines.append(f"{key}: {flow(spec)}")
    for name, part in (
        ("tasks", _tasks(c)),
        ("rollout", _rollout(c)),
        ("demonstrations", _demonstrations(c.config)),
        ("sft", _sft(c)),
        ("rl", _rl(c)),
        ("evaluate", _evaluate(c.config)),
    ):
        lines += section(name, part)
    return "\n".join(lines) + "\n"


def _has_paths(c: Calibration) -> bool:
    """True where the recipe names a file."""
    named = c.config.env.name if c.config.env else ""
    return ".py:" in named or c.subject.kind == "data"


def write_conversations(conversations: list[Conversation], path: Path) -> None:
    """Write the questions and answers of a data set as conversations, for `sft.data`."""
    from ludus.core.files import atomic_write

    rows = [{"id": c.task.id, "messages": [m.to_json() for m in c.messages]} for c in conversations]
    atomic_write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def flow(value: Any) -> str:
    """A value in one line of YAML; small numbers as 3.0e-4, a number to every YAML reader."""
    if isinstance(value, Spec):
        value = {"name": value.name, "args": value.args} if value.args else value.name
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(key)}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str) and not value.isprintable():  # a line break, with its escape
        return yaml.safe_dump(value, default_style='"', width=10**6).strip()
    # In a list, so that a text with `,`, `[` or `}` is quoted: it may stand within a mapping.
    text = yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=10**6)
    return text.strip().removeprefix("[").removesuffix("]")


def section(name: str, lines: Iterator[Line]) -> list[str]:
    """The lines of a section; none where it is empty."""
    shown = [
        f"  {key}: {flow(value)}" + (f"  # {reason}" if reason else "")
        for key, value, reason in lines
        if value is not None
    ]
    return [f"{name}:", *shown] if shown else []


def _model(c: Calibration) -> Iterator[Line]:
    model, (in_turns, in_prompts) = c.config.model, c.unknown
    wide = model.architecture is not None and "head_dim" in model.architecture.args
    weights = "1.0 M weights, wide heads for short episodes" if wide else "0.8 M weights"
    scratch = f"from scratch: 4 layers of width 128, {weights}; begins able to look words up"
    yield "architecture", model.architecture, scratch
    told = f"starting values: {c.start.name} ({c.start.source})" if c.start else ""
    yield from of_model(model, told)
    yield (
        "tokenizer",
        model.tokenizer,  # None: the model's own
        f"{c.vocabulary} tokens; unknown in unseen episodes: {in_turns:.2%} of the turns, "
        f"{in_prompts:.2%} of the prompts",
    )
    yield "chat_template", model.chat_template, ""
    shown = "question and answer" if c.subject.kind == "data" else "the expert's episodes"
    yield (
        "context_length",
        model.context_length,
        f"{shown}: {c.lengths.episode_mean:.0f} tokens, at most {c.lengths.episode_max}"
        if c.expert.demonstrations
        else f"room for {c.config.rollout.max_turns or 1} turns, which nobody has shown",
    )


def of_model(model: ModelConfig, reason: str) -> Iterator[Line]:
    """The keys of a pretrained model; `reason`: of its starting values."""
    yield "path", model.path, reason
    if model.device != "cpu":
        yield "device", model.device, ""
    if model.lora is not None:
        yield "lora", model.lora.model_dump(include={"rank", "alpha"}), ""


def of_products(config: RunConfig, times: str = "") -> list[str]:
    """The lines of `learner` and `sampler`, where they differ from the defaults."""
    learner = config.learner.model_dump(exclude_defaults=True)
    told = []
    if "dtype" in learner:
        told.append(f"products in bfloat16, weights in float32{times}")
    if "detach_observations" in learner:
        told.append("gradients of RL through the policy's own tokens only, for they are few")
    comment = f"  # {'; '.join(told)}" if told else ""
    lines = [f"learner: {flow(learner)}{comment}"] if learner else []
    if config.sampler != type(config).model_fields["sampler"].get_default(
        call_default_factory=True
    ):
        lines.append(f"sampler: {flow(config.sampler)}")
    return lines


def _tasks(c: Calibration) -> Iterator[Line]:
    few = c.distinct < 1e6
    told = f"about {counted(c.distinct, 'different task')}" if few else "many different tasks"
    if c.subject.kind == "data":
        told = f"of {counted(c.subject.rows, 'row')}; the last are held out"
    levels = for_training(c.subject.levels)
    if 0 < len(c.subject.tiers) < len(levels):
        told += f", in {len(c.subject.tiers)} of {len(levels)} levels"
    told += "".join(f"; not {tier}: {c.broken[tier]}" for tier in list(c.broken)[:MOST_TOLD])
    for tier, dropped in list(c.expert.dropped_of(c.subject.tiers).items())[:MOST_TOLD]:
        share = len(dropped) / c.expert.played_of(tier)
        told += f"; of {tier}'s, the expert cannot play or loses {share:.0%}"
    yield "train", of_task(c.config.tasks.train), " ".join(told.split())
    if c.config.tasks.heldout is not None:
        yield "heldout", of_task(c.config.tasks.heldout), ""
    yield from of_bad_lines(c.config)


def of_bad_lines(config: RunConfig) -> Iterator[Line]:
    """The key that skips malformed rows, where there are any."""
    if config.tasks.on_bad_line == "skip":
        yield "on_bad_line", "skip", ""


def of_task(spec: Spec) -> dict[str, Any]:
    """A reader with its arguments."""
    return {"name": spec.name, "args": dict(spec.args)}


def _rollout(c: Calibration) -> Iterator[Line]:
    rollout, turns = c.config.rollout, c.expert.turns
    of = "longest answer" if c.subject.kind == "data" else "expert's longest turn"
    longest = f"the {of}: {c.lengths.turn_max}" if turns else ""
    yield "max_tokens_per_turn", rollout.max_tokens_per_turn, longest
    told = f"the expert: {fmean(turns):.1f}, at most {turns[-1]}" if turns else "no expert"
    if turns and c.searches:
        told += "; twice that, for it knows what an agent must find"
    used = rollout.max_turns
    if isinstance(used, int) and (longer := sum(number > used for number in turns)):
        told += f"; {longer:,} of its {len(turns):,} episodes are longer"
    allowed = getattr(ENVS.load(c.subject.env.name), "max_turns", 0) if c.subject.env else 0
    if turns and isinstance(allowed, int) and isinstance(used, int) and used < allowed:
        told += f"; the class allows {allowed}"
    yield "max_turns", rollout.max_turns, told
    yield "concurrency", rollout.concurrency, "episodes at the same time"
    shares = [f"{share:.0%} at {at:g}" for at, share in c.trial.signal.items()]
    told = f"groups with different rewards: {', '.join(shares)}" if shares else ""
    yield "temperature", rollout.temperature, told


def _demonstrations(config: RunConfig) -> Iterator[Line]:
    if config.demonstrations is not None:
        yield "num_episodes", config.demonstrations.num_episodes, ""
        yield "num_workers", config.demonstrations.num_workers, ""


def _sft(c: Calibration) -> Iterator[Line]:
    sft = c.config.sft
    if sft is None:
        return
    yield "data", sft.data, ""
    yield "steps", sft.steps, "at most"
    if small_steps(sft):
        tokens = sft.episodes_per_step * c.lengths.episode_mean
        told = f"about {tokens:,.0f} tokens: many small steps teach more than a few large ones"
        yield "episodes_per_step", sft.episodes_per_step, told
    if sft.observation_weight:
        yield "observation_weight", sft.observation_weight, "prompts and observations train too"
    if sft.until is not None:
        curve = ", ".join(f"{value:.0%} after {step}" for step, value in c.trial.curve[-3:])
        until = {"success": sft.until.success} | sft.until.model_dump(exclude_defaults=True)
        by_chance = f"by chance {c.trial.chance:.0%}, " if c.trial.chance else ""
        told = f"sampled episodes that succeed: {by_chance}{curve} steps" if curve else ""
        if curve and not is_expected(c.trial, sft.until.success, sft.steps):
            told += f"; not expected to reach {sft.until.success:.0%} in these steps"
        yield "until", until, told
    losses = ", ".join(f"{loss:.3f} at {flow(rate)}" for rate, loss in c.trial.losses.items())
    used = sft.optimizer
    optimizer: dict[str, Any] = {"name": used.name} if used.name != "adamw" else {}
    optimizer |= {"lr": used.lr, "warmup_steps": used.warmup_steps}
    optimizer |= {"schedule": used.schedule} if used.schedule != "constant" else {}
    told = f"loss of unseen episodes in the trial: {losses}" if losses else ""
    yield "optimizer", optimizer, told


def _rl(c: Calibration) -> Iterator[Line]:
    rl = c.config.rl
    if rl is None:
        return
    yield "algorithm", rl.algorithm, ""
    told = "by the estimate of `ludus plan`"
    planned = c.steps
    if planned is not None:
        told = f"of {planned.rl_s / planned.likely:.1f} s, where SFT takes all of its steps"
    yield "steps", rl.steps, told
    if planned is not None and rl.steps_per_unused_sft_step:
        told = f"the time that SFT leaves; about {planned.likely} in all if it ends as expected"
        yield "steps_per_unused_sft_step", rl.steps_per_unused_sft_step, told
    yield "groups_per_step", rl.groups_per_step, ""
    yield "group_size", rl.group_size, ""
    if rl.minibatches > 1:
        yield "minibatches", rl.minibatches, "optimizer steps of each step"
    used = ["lr", "eps", "warmup_steps", "schedule"]
    held = rl.optimizer.target_kl is not None
    used += ["target_kl"] if held else []
    told = (
        "target_kl lowers lr where a step moves the policy farther, in nats a token" if held else ""
    )
    yield "optimizer", {name: getattr(rl.optimizer, name) for name in used}, told
    yield (
        "min_signal",
        rl.min_signal,
        "share of groups with different rewards: RL ends where 20 steps fall below it",
    )
    if rl.min_success_to_stop is not None:
        yield "min_success_to_stop", rl.min_success_to_stop, "of an evaluation, greedy: ends RL"
    elif c.config.evaluate.every:
        yield "# min_success_to_stop", 0.95, "would end RL where an evaluation, greedy, reaches it"


def _evaluate(config: RunConfig) -> Iterator[Line]:
    yield "every", config.evaluate.every, ""
    yield "num_tasks_between", config.evaluate.num_tasks_between, ""  # without it, all
    if config.evaluate.before_sft:
        yield "before_sft", True, "what the pretrained model can do already"
