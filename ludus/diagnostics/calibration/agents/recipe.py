"""The commented recipe of an agent: one page, each value with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from ludus.config.sections import RolloutConfig
from ludus.core.errors import counted
from ludus.diagnostics.calibration.agents.calibrate import AgentCalibration
from ludus.diagnostics.calibration.recipe import (
    Line,
    flow,
    of_bad_lines,
    of_model,
    of_products,
    of_task,
    section,
)


def write_agent(c: AgentCalibration, command: str) -> str:
    """The recipe's text. `command`: that was called."""
    config = c.config
    lines = [
        f"# Written by `{command}`, from measurements of {c.seconds:.0f} s on this machine.",
        "# All keys: `ludus config`. The comments say what was measured.",
        f"name: {flow(config.name)}",
        *([f"seed: {config.seed}"] if config.seed else []),
        *section("model", _model(c)),
        *of_products(config),
    ]
    for key, reason in (("agent", ""), ("env", ""), ("judge", _judged(c))):
        if (spec := getattr(config, key)) is not None:
            lines.append(f"{key}: {flow(spec)}" + (f"  # {reason}" if reason else ""))
    if config.tools:
        lines += ["tools:", *(f"  - {flow(tool)}" for tool in config.tools)]
    if c.subject.limits:
        lines.append(f"limits: {flow(dict(c.subject.limits))}")
    for name, part in (
        ("tasks", _tasks(c)),
        ("rollout", _rollout(c)),
        ("rl", _rl(c)),
        ("evaluate", _evaluate(c)),
    ):
        lines += section(name, part)
    return "\n".join(lines) + "\n"


def _judged(c: AgentCalibration) -> str:
    told = f"it scored {c.play.judged} of {len(c.play.episodes)} episodes"
    return f"{told}: the agent returns no reward for them"


def _model(c: AgentCalibration) -> Iterator[Line]:
    yield from of_model(c.config.model, f"starting values: {c.start.name} ({c.start.source})")
    lengths = c.play.lengths
    yield (
        "context_length",
        c.config.model.context_length,
        f"conversations of {lengths.episode_mean:.0f} tokens, at most {lengths.episode_max}; first "
        f"prompts to {lengths.prompt_max}",
    )


def _tasks(c: AgentCalibration) -> Iterator[Line]:
    few = c.distinct < 1e6
    told = f"about {counted(c.distinct, 'different task')}" if few else "many different tasks"
    yield "train", of_task(c.config.tasks.train), told
    if c.config.tasks.heldout is not None:
        yield "heldout", of_task(c.config.tasks.heldout), ""
    yield from of_bad_lines(c.config)


def _rollout(c: AgentCalibration) -> Iterator[Line]:
    rollout, play = c.config.rollout, c.play
    yield "deterministic", rollout.deterministic, "an agent calls its model at any time"
    yield (
        "max_turns",
        rollout.max_turns,
        f"calls of an episode: {fmean(play.calls):.1f}, at most {play.calls[-1]}",
    )
    cut = f", {play.cut_turns:.0%} cut at {play.max_tokens}" if play.cut_turns else ""
    yield (
        "max_tokens_per_turn",
        rollout.max_tokens_per_turn,
        f"turns of {fmean(play.turns):.0f} tokens, at most {play.turns[-1]}{cut}",
    )
    if c.subject.tool_calls:
        yield "tool_calls", dict(c.subject.tool_calls), ""
    seconds = f"{play.episode_s:.2g} s an episode among {play.waves[-1][1]}"
    besides = f"{play.own_s:.2g} s besides the model's turns"
    yield "concurrency", rollout.concurrency, f"{seconds}, {besides}"
    if rollout.episode_deadline_s != RolloutConfig().episode_deadline_s:
        longest = f"the longest episode took {play.longest_s:.0f} s"
        yield "episode_deadline_s", rollout.episode_deadline_s, longest
    yield (
        "temperature",
        rollout.temperature,
        f"groups with different rewards: {play.signal:.0%} of {len(play.groups)}; mean reward "
        f"{fmean(play.rewards):.2f}",
    )


def _rl(c: AgentCalibration) -> Iterator[Line]:
    rl = c.config.rl
    assert rl is not None
    yield "algorithm", rl.algorithm, ""
    minutes = rl.steps * c.step_s / 60
    yield "steps", rl.steps, f"of about {c.step_s:.1f} s: {minutes:.1f} minutes"
    groups, table = rl.groups_per_step, c.start.groups
    yield "groups_per_step", groups, f"fewer than {table}: more steps" if groups < table else ""
    yield "group_size", rl.group_size, ""
    if rl.tokens_per_batch != type(rl).model_fields["tokens_per_batch"].default:
        yield "tokens_per_batch", rl.tokens_per_batch, "at least the context"
    used = ("lr", "eps", "warmup_steps", "schedule")
    yield "optimizer", {name: getattr(rl.optimizer, name) for name in used}, ""


def _evaluate(c: AgentCalibration) -> Iterator[Line]:
    evaluate = c.config.evaluate
    yield "num_tasks", evaluate.num_tasks, "before RL and at the end"
    yield "every", evaluate.every, ""
    yield "num_tasks_between", evaluate.num_tasks_between, ""
