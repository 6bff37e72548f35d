"""The run's `tools` for the agents of users: sandboxed, limited, counted, retried.

async def run(task, model, tools):
    toolkit = Toolkit(tools=[FunctionTool(function) for function in tools.functions()])

await tools.call("python", code="print(2 + 3)")      "5"
await tools.answer(message.tool_calls)               one tool message for each call
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from keyword import iskeyword
from typing import Any

from ludus.core.errors import ConfigError, ToolError
from ludus.core.types import Message, ToolCall, ToolSpec
from ludus.rollout.sessions.agent_session import AgentSession
from ludus.rollout.tool_use import EpisodeTools

TYPES: Mapping[str, type] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}
"""The annotation of a parameter by its type in JSON schema."""


class AgentTools:
    """The run's tools in an episode, for its agent; from any thread or event loop.

    What the model did wrong is a text that says so. A tool that fails ends the attempt, also where
    the agent catches its error: the episode is retried, and never counts as a reward of 0.
    """

    def __init__(self, session: AgentSession, tools: EpisodeTools) -> None:
        self._session, self._tools = session, tools
        self._turn = 0
        self.specs: list[ToolSpec] = tools.functions
        """The functions on offer to the task."""
        self.failure: ToolError | None = None

    @property
    def done(self) -> bool:
        """True once the result of a tool has ended the episode."""
        return self._tools.done

    async def call(self, name: str, /, **arguments: Any) -> str:
        """The text of a function's result. Errors: ToolError where the tool itself failed."""
        (message,) = await self.answer([ToolCall(name=name, arguments=arguments)])
        return message.content

    async def answer(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Run the calls of a turn at the same time; one tool message for each, in order.

        Errors: ToolError where a tool itself failed.
        """
        return await self._session.at_home(self._answer(calls))

    async def _answer(self, calls: Sequence[ToolCall]) -> list[Message]:
        turn = self._session.trajectory.num_turns
        if turn > self._turn:  # rollout.tool_calls.max_per_turn counts from the model's last turn
            self._turn = turn
            self._tools.begin_turn()
        try:
            return await self._tools.answer(calls)
        except ToolError as error:
            self.failure = error
            raise

    def functions(self) -> list[Callable[..., Awaitable[str]]]:
        """The tools as async functions with a signature and a docstring, from which frameworks
        make tools of their own. Errors: ConfigError for an argument without a Python name."""
        return [self._function(spec) for spec in self.specs]

    def _function(self, spec: ToolSpec) -> Callable[..., Awaitable[str]]:
        fields = spec.parameters.get("properties", {})
        required = spec.parameters.get("required", ())
        for name in fields:
            if not name.isidentifier() or iskeyword(name):
                raise ConfigError(
                    f"tools: the argument {name!r} of {spec.name} is no name in Python: use "
                    "tools.answer in place of tools.functions"
                )

        async def function(**arguments: Any) -> str:
            given = {k: v for k, v in arguments.items() if k in required or v is not None}
            return await self.call(spec.name, **given)

        kinds = {name: TYPES.get(_kind(field), Any) for name, field in fields.items()}
        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if name in required else field.get("default"),
                annotation=kinds[name] if name in required else kinds[name] | None,
            )
            for name, field in fields.items()
        ]
        function.__name__ = function.__qualname__ = spec.name
        function.__doc__ = _docstring(spec.description, fields)
        function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            parameters, return_annotation=str
        )
        annotations = {parameter.name: parameter.annotation for parameter in parameters}
        function.__annotations__ = {**annotations, "return": str}
        return function


def _kind(field: Mapping[str, Any]) -> str:
    kind = field.get("type")
    return kind if isinstance(kind, str) else ""


def _docstring(text: str, fields: Mapping[str, Mapping[str, Any]]) -> str:
    told = [
        f"    {name}: {field.get('description', '')}".rstrip() for name, field in fields.items()
    ]
    return "\n".join([text, "", "Args:", *told]) if told else text


def check_agent_tools(play: Callable[..., Any], has_tools: bool) -> None:
    """Errors: ConfigError where a run has tools and its agent takes none, or the reverse."""
    parameter = inspect.signature(play).parameters.get("tools")
    if has_tools and parameter is None:
        raise ConfigError(
            "tools: the agent takes no `tools`: write async def run(task, model, tools), or "
            "remove `tools`"
        )
    if not has_tools and parameter and parameter.default is inspect.Parameter.empty:
        raise ConfigError("agent: it takes `tools`, and the run has none: set `tools`")
