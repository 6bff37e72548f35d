"""Tool calls of episodes: the run's tools, and the calls of one episode with their limits.

    RunTools       opens the tools in the event loop of the rollouts, once; `close` at the run's end
    EpisodeTools   answers the calls of one episode: limits, shortened results, counts

A call that fails, or that is not run, is told to the model. ToolError ends the attempt: the tool
itself failed, so the episode is retried and then excluded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ludus.config.schema import RunConfig, ToolCallsConfig
from ludus.config.sections import LimitConfig
from ludus.core.errors import ConfigError, ToolError, did_you_mean
from ludus.core.modules import require
from ludus.core.types import Message, Spec, Task, ToolCall, ToolSpec, Trajectory
from ludus.telemetry.occupancy import busy
from ludus.telemetry.queues import queueing
from ludus.tools.limits.limiter import Limits, is_endpoint
from ludus.tools.toolbox import Toolbox, shortened

COUNTS = ("tool_calls", "tool_failed", "tool_malformed", "tool_refused")
"""Counts in the metrics of a trajectory: calls that ran; of these, calls whose result is an error;
turns with a call that cannot be parsed or is of no function on offer; calls over a limit."""


@dataclass(slots=True)
class RunTools:
    """The tools of a run.

    Args:
        tools: as in the configuration.
        functions: what they offer, from `read_functions`.
        deadline_s: seconds of a call, without the wait for its rate limit.
        limits: rate limits of the functions; the caller closes them.
    """

    tools: Sequence[Spec]
    functions: Sequence[ToolSpec]
    deadline_s: float = 30.0
    limits: Limits = field(default_factory=lambda: Limits({}, ()))
    _opening: asyncio.Task[Toolbox] | None = field(default=None, repr=False)

    @property
    def names(self) -> list[str]:
        return [function.name for function in self.functions]

    def offered(self, task: Task) -> list[str]:
        """The functions on offer to a task. Errors: ToolError where the task names another."""
        if task.tools is None:
            return self.names
        if fault := unknown_function(task, self.names):
            raise ToolError(f"task {task.id}: {fault}")
        return [name for name in self.names if name in task.tools]

    async def open(self) -> Toolbox:
        """The opened tools. The first call opens them; a cancelled caller does not stop that.

        Errors: ToolError where a tool cannot be opened; the next call tries again.
        """
        if self._opening is None or (self._opening.done() and self._opened is None):
            opening = Toolbox.open(self.tools, deadline_s=self.deadline_s)
            self._opening = asyncio.create_task(opening)
        return await asyncio.shield(self._opening)

    async def end(self, episode: str) -> None:
        """Release what an episode left in the tools."""
        if self._opened is not None:
            await self._opened.end(episode)

    @property
    def _opened(self) -> Toolbox | None:
        task = self._opening
        if task is None or not task.done() or task.cancelled() or task.exception():
            return None
        return task.result()

    async def close(self) -> None:
        """Release the tools. Call it in the event loop that opened them."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opened = await asyncio.gather(opening, return_exceptions=True)
            if isinstance(opened[0], Toolbox):
                await opened[0].close()


async def read_functions(tools: Sequence[Spec]) -> list[ToolSpec]:
    """The functions that tools offer. Errors: ConfigError, ToolError."""
    if not tools:
        return []
    async with await Toolbox.open(tools) as toolbox:
        return toolbox.specs


def joined_functions(own: Sequence[ToolSpec], functions: Sequence[ToolSpec]) -> list[ToolSpec]:
    """The environment's functions, and those of `tools`.

    Errors: ConfigError where both have a function of one name.
    """
    names = {function.name for function in functions}
    if both := [tool.name for tool in own if tool.name in names]:
        raise ConfigError(
            f"tools: the environment has a function {both[0]!r} too: give the tool another name, "
            "or remove it"
        )
    return [*own, *functions]


@asynccontextmanager
async def open_tools(config: RunConfig | None) -> AsyncIterator[RunTools | None]:
    """The tools of a recipe, with its rate limits, to play with outside of a run.

    None without a recipe. Errors: ConfigError, ToolError.
    """
    if config is None:
        yield None
        return
    functions = await read_functions(config.tools)
    wanted = by_address(config.limits)
    endpoints = filter(is_endpoint, wanted)  # any of them may be asked for episodes
    limits = Limits(wanted, [*(function.name for function in functions), *endpoints])
    tools = run_tools(config, functions, limits)
    try:
        yield tools
    finally:
        if tools is not None:
            await tools.close()
        limits.close()


def by_address(limits: Mapping[str, LimitConfig]) -> dict[str, LimitConfig]:
    """The limits, those of endpoints by the address that their client uses.

    Errors: ConfigError where two limits have the same endpoint, or an address is none.
    """
    if not any(map(is_endpoint, limits)):
        return dict(limits)
    require("httpx", "remote", "a limit of an endpoint")
    from ludus.models.endpoint.client import check_url

    found: dict[str, LimitConfig] = {}
    for name, limit in limits.items():
        key = check_url(name, f"limits.{name}") if is_endpoint(name) else name
        if key in found:
            raise ConfigError(f"limits.{name}: another limit has the same endpoint: remove one")
        found[key] = limit
    return found


def run_tools(config: RunConfig, functions: Sequence[ToolSpec], limits: Limits) -> RunTools | None:
    """The tools of a recipe; None if it has none."""
    if not config.tools:
        return None
    return RunTools(config.tools, functions, config.rollout.tool_calls.deadline_s, limits)


def unknown_function(task: Task, names: Sequence[str]) -> str | None:
    """Tells of a function in `Task.tools` that no tool offers."""
    for name in task.tools or ():
        if name not in names:
            near = did_you_mean(name, names) or " (no tools are configured)" * (not names)
            return f"tools: {name!r} is no function on offer{near}"
    return None


def argument_of(
    name: str, functions: Sequence[ToolSpec], place: str = "rollout.markers.tool"
) -> str:
    """The argument of a function that takes code: the only required one, of type string.

    `place` is the key of the configuration that names the function.

    Errors: ConfigError where there is no such function or argument.
    """
    known = {function.name: function for function in functions}
    if name not in known:
        raise ConfigError(f"{place}: {name!r} is no function of `tools`{did_you_mean(name, known)}")
    function = known[name]
    required = function.parameters.get("required", [])
    if len(required) == 1:
        schema = function.parameters.get("properties", {}).get(required[0], {})
        if schema.get("type", "string") == "string":
            return str(required[0])
    raise ConfigError(
        f"{place}: {name!r} cannot run code: it needs exactly one required "
        f"argument, of type string, and requires {required or 'none'}"
    )


def shortened_to_tokens(text: str, max_tokens: int) -> str:
    """Head and tail of a long text; a token is four characters: an endpoint tells no tokens."""
    return shortened(text, 4 * max_tokens)


class EpisodeTools:
    """The tool calls of one episode.

    Args:
        offered: names of the functions on offer.
        shorten: cuts a text to a number of tokens.
    """

    def __init__(
        self,
        run: RunTools,
        offered: Sequence[str],
        limits: ToolCallsConfig,
        trajectory: Trajectory,
        shorten: Callable[[str, int], str],
    ) -> None:
        self.offered = frozenset(offered)
        self._run, self._limits, self._trajectory = run, limits, trajectory
        self._shorten = shorten
        self._attempt = 0
        self.num_errors = 0
        """Attempts that a failing tool ended."""

    @property
    def functions(self) -> list[ToolSpec]:
        """The functions on offer."""
        return [function for function in self._run.functions if function.name in self.offered]

    @property
    def max_calls(self) -> int:
        return self._limits.max_per_episode

    def start(self, attempt: int) -> None:
        """Begin an attempt, after the trajectory was cleared."""
        self._attempt = attempt
        self.done = False
        """A result ended the episode."""
        self.spent = False
        """The model called on after it was told that no calls are left."""
        self._told = False
        self._num_in_turn = self._num_in_episode = 0
        self._trajectory.metrics |= dict.fromkeys(
            (*COUNTS, "tool_seconds", "tool_wait_seconds"), 0.0
        )

    def begin_turn(self) -> None:
        self._num_in_turn = 0

    def malformed(self) -> None:
        """Count a turn whose call cannot be run."""
        self._count("tool_malformed")

    @property
    def turn_is_full(self) -> bool:
        """True if the model called on after it was told that this turn has no calls left."""
        return self._num_in_turn > self._limits.max_per_turn

    async def answer(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Run the calls of a turn at the same time; one tool message for each, in order.

        Errors: ToolError where a tool failed.
        """
        limits = self._limits
        left = limits.max_per_episode - self._num_in_episode
        allowed = max(0, min(left, limits.max_per_turn - self._num_in_turn))
        self.spent = self._told and left <= 0
        run, refused = calls[:allowed], calls[allowed:]
        self._num_in_turn += len(calls)
        self._num_in_episode += len(run)
        messages = await self._answers(run) if run else []
        if refused:
            self._count("tool_refused", len(refused))
            self._told = self._told or left <= len(run)
            text = self._refusal(left - len(run))
            messages += [_message(call, text) for call in refused]
        return messages

    async def end(self) -> None:
        """Release what the attempt left in the tools."""
        await self._run.end(self._name)

    @property
    def _name(self) -> str:
        """A name for each attempt: a call of an earlier attempt may still be running."""
        id = self._trajectory.id
        return f"{id}/retry-{self._attempt}" if self._attempt else id

    async def _answers(self, calls: Sequence[ToolCall]) -> list[Message]:
        known = [call for call in calls if call.name in self.offered]
        self._count("tool_calls", len(known))
        self._count("tool_malformed", int(len(known) < len(calls)))
        started = time.monotonic()
        try:
            with busy("tool"), queueing() as queue:
                toolbox = await self._run.open()
                try:
                    results = iter(await toolbox.call(known, self._name, self._acquire))
                finally:
                    self._trajectory.metrics["tool_wait_seconds"] += queue.seconds
        except ToolError:
            self.num_errors += 1
            raise
        finally:
            self._trajectory.metrics["tool_seconds"] += time.monotonic() - started
        messages = []
        for call in calls:
            if call.name not in self.offered:
                text = f"There is no tool {call.name!r:.80}{did_you_mean(call.name, self.offered)}."
            else:
                result = next(results)
                text = self._shorten(result.content, self._limits.max_result_tokens)
                self._count("tool_failed", int(result.failed))
                self.done = self.done or result.done
            messages.append(_message(call, text))
        return messages

    async def _acquire(self, name: str) -> None:
        """Wait for a function's rate limit."""
        waited = await self._run.limits.acquire(name)
        self._trajectory.metrics["tool_wait_seconds"] += waited

    def _refusal(self, left: int) -> str:
        if left <= 0:
            limit = f"{self._limits.max_per_episode} calls of this episode are used"
            return f"Not run: the {limit}. Answer without a call."
        return f"Not run: at most {self._limits.max_per_turn} calls a turn."

    def _count(self, name: str, by: int = 1) -> None:
        self._trajectory.metrics[name] += by


def _message(call: ToolCall, text: str) -> Message:
    return Message(role="tool", content=text, name=call.name, tool_call_id=call.id)
