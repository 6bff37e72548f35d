"""Time of tool calls, for `ludus plan`: how many an episode makes, and how long each takes."""

from __future__ import annotations

from dataclasses import dataclass

from ludus.config.schema import RunConfig
from ludus.core.system.machine import num_cores
from ludus.diagnostics.episodes import Usage
from ludus.tasks import READERS
from ludus.tasks.ratios import shares

CORE_S = 2 / 129
"""Core seconds of a warm Python call: 129 a second on 2 cores (docs/benchmarks/sandbox.md)."""

CALCULATOR_S = 0.25e-3
"""Seconds of a call of `calculator`, in this process: 500 calls on one core, Intel Xeon."""


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """Tool calls of a recipe.

    `number` an episode of the policy; each takes `seconds`, `parallel` at the same time.
    `demonstrated`: of all demonstrations together. `lines`: the assumptions, in words.
    """

    number: float = 0.0
    demonstrated: float = 0.0
    seconds: float = CORE_S
    parallel: int = 1
    lines: tuple[str, ...] = ()

    def time(self, episodes: float) -> float:
        """Returns the seconds of the calls of the policy's episodes."""
        return episodes * self.number * self.seconds / self.parallel

    def demonstration_s(self, config: RunConfig) -> float:
        """Returns the seconds of the calls of the demonstrations."""
        workers = config.demonstrations.num_workers if config.demonstrations else 1
        return self.demonstrated * self.seconds / min(self.parallel, workers)


NO_CALLS = ToolCalls()


def tool_calls(
    config: RunConfig, usage: Usage | None, fill: float, number: float | None, call_s: float | None
) -> ToolCalls:
    """Returns the calls of a recipe.

    Args:
        number: calls an episode; None: as the expert's, or the fraction `fill` of
            `rollout.tool_calls.max_per_episode`.
        call_s: seconds of a call that waits for another machine, so that all episodes under way
            can wait at the same time; None: a warm Python call, on the cores of this machine, or
            the calculator's where there is no other tool.
    """
    if not config.tools:
        return NO_CALLS
    if number is not None:
        source = "--tool-calls"
    elif usage is not None:
        number, source = usage.calls, "as the expert"
    else:
        limit = config.rollout.tool_calls.max_per_episode
        number = fill * limit * _share(config)
        source = f"{fill:g} of rollout.tool_calls.max_per_episode, {limit}"
    cores = num_cores()
    if call_s is None and {tool.name for tool in config.tools} == {"calculator"}:
        call_s, parallel = CALCULATOR_S, 1
        each = f"{CALCULATOR_S * 1e3:g} ms for each, as the calculator"
    elif call_s is None:
        call_s, parallel = CORE_S, cores
        each = f"{CORE_S * 1e3:.1f} ms of a core for each, as a warm Python call, on {cores} cores"
    else:
        parallel = config.rollout.concurrency
        each = f"{call_s:g} s for each, {parallel} at the same time"
    text = [f"(tools: {number:.2g} calls an episode, {source}; {each})"]
    if not number and source == "as the expert":
        text.append("(the expert calls no tool: --tool-calls sets the policy's calls an episode)")
    demonstrated = 0.0
    if config.demonstrations is not None and usage is not None:
        settings = config.demonstrations
        demonstrated = settings.num_episodes * settings.code_share * usage.calls
    return ToolCalls(number, demonstrated, call_s, parallel, tuple(text))


def _share(config: RunConfig) -> float:
    """Returns the share of the episodes that have tools."""
    parts = READERS.check(config.tasks.train, "tasks.train").get("parts") or {}
    if not parts:
        return 1.0
    ratios = shares({name: part.ratio for name, part in parts.items()})
    with_tools = sum(ratio for name, ratio in ratios.items() if parts[name].tools != [])
    return with_tools / sum(ratios.values())
