"""Tasksets of verifiers (https://github.com/PrimeIntellect-ai/verifiers, version 1 of its API) as
environments: `env: {name: verifiers, args: {taskset: gsm8k}}`.

An episode is one of verifiers' own: its harness, tool servers, `@stop` and `@reward` functions run
unchanged, in a process of verifiers' environment. The harness' calls of the model are the turns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ludus.core.errors import ConfigError, EnvError
from ludus.core.types import Message, Observation, StepResult, Task, ToolCall, ToolSpec
from ludus.envs.base import Env, set_limits
from ludus.envs.verifiers.process import VerifiersProcess, process_of

PYTHON = ".venv-verifiers/bin/python"

ANSWER = ToolSpec(
    name="answer",
    description="Give the answer in words, without a further tool call.",
    parameters={
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    },
)
"""The tool for the turn that calls no tool: in the format `tools`, a turn is one call."""


class Verifiers(Env):
    """An episode of a taskset of verifiers."""

    blocking: ClassVar[bool] = False

    def __init__(
        self,
        taskset: Annotated[
            str,
            Field(
                min_length=1,
                description='An installed package, "module:Class" or "path/file.py:Class".',
            ),
        ],
        taskset_args: Annotated[
            dict[str, Any] | None, Field(description="Fields of the taskset's config.")
        ] = None,
        harness: Annotated[
            str,
            Field(
                min_length=1,
                description="ludus: verifiers' chat loop with tools; or a harness of verifiers.",
            ),
        ] = "ludus",
        env: Annotated[
            str | None, Field(description="An env of verifiers; null: the taskset's own.")
        ] = None,
        agent: Annotated[
            str, Field(min_length=1, description="The agent that the trained model plays.")
        ] = "agent",
        config: Annotated[
            dict[str, Any] | None,
            Field(description="Further fields of the env's config, such as other agents' models."),
        ] = None,
        max_turns: Annotated[int, Field(ge=1, description="Turns of an episode.")] = 20,
        score_range: Annotated[
            tuple[float, float], Field(description="Lowest and highest sum of the rewards.")
        ] = (0.0, 1.0),
        success_at: Annotated[float, Field(description="Reward of a success.")] = 1.0,
        python: Annotated[
            str, Field(min_length=1, description="The interpreter with verifiers.")
        ] = PYTHON,
    ) -> None:
        set_limits(self, max_turns, score_range, success_at)
        self._python = python
        self._arguments = {
            "taskset": taskset,
            "taskset_args": taskset_args or {},
            "harness": harness,
            "env": env,
            "agent": agent,
            "config": config or {},
            "max_turns": max_turns,
        }
        self._process: VerifiersProcess | None = None
        self._session: str | None = None
        self._scores: dict[str, float] = {}

    async def reset(self, task: Task) -> Observation:
        await self.close()
        self._scores = {}
        index = task.data.get("index")
        if not isinstance(index, int):
            raise EnvError(f"verifiers: the task {task.id!r} has no index in its data")
        process = self._running()
        opened = await self._call(process, "reset", index=index)
        self._process, self._session = process, opened["session"]
        messages = [Message.model_validate(message) for message in opened["messages"]]
        return Observation(messages=messages, info={"index": index})

    async def step(self, action: Message) -> StepResult:
        session = self._session
        if session is None or self._process is None:
            raise EnvError("verifiers: the episode is over, or was never reset; call reset first")
        try:
            result = await self._call(
                self._process, "step", session=session, message=self._wire(action)
            )
        except BaseException:
            await self.close()
            raise
        messages = [Message.model_validate(message) for message in result["messages"]]
        if not result["done"]:
            return StepResult(messages=messages)
        self._session = None
        self._scores = {**result["metrics"], **result["rewards"]}
        return StepResult(
            messages=messages,
            reward=result["reward"],
            terminated=not result["truncated"],
            truncated=result["truncated"],
            info={"rewards": result["rewards"], "stop": result["stop"]},
        )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None and self._process is not None:
            self._process.tell("close", session=session)

    def scores(self) -> dict[str, float]:
        """The values of the taskset's `@reward` and `@metric` functions, before their weights."""
        return self._scores

    def tools(self) -> Sequence[ToolSpec]:
        """The tools of the first task, and `answer` for the turn that calls none of them."""
        key = json.dumps([self._python, self._arguments], sort_keys=True)
        if key not in _TOOLS:
            found = self._running().ask("describe")["tools"]
            specs = [ToolSpec.model_validate(tool["function"]) for tool in found]
            _TOOLS[key] = [*specs, ANSWER]
        return _TOOLS[key]

    def text_of(self, call: ToolCall) -> str:
        """The text of `answer`; the JSON of any other call."""
        if call.name == ANSWER.name:
            if not isinstance(text := call.arguments.get("text"), str):
                raise ValueError("the argument text is missing")
            return text
        return json.dumps({"name": call.name, "arguments": call.arguments})

    def call_of(self, action: str) -> ToolCall:
        return _call_in(action) or ToolCall(name=ANSWER.name, arguments={"text": action})

    def _wire(self, action: Message) -> dict[str, Any]:
        """The assistant's message: a text, or calls of the taskset's tools.

        A text that is the JSON of a call is that call, for formats without tool calls.
        """
        calls = list(action.tool_calls)
        if len(calls) == 1 and calls[0].name == ANSWER.name:
            return {"content": action.content or str(calls[0].arguments.get("text", ""))}
        if not calls and (call := _call_in(action.content)) is not None:
            calls = [call]
        if not calls:
            return {"content": action.content}
        fields = {"name", "arguments", "id"}
        return {"content": "", "tool_calls": [call.model_dump(include=fields) for call in calls]}

    def _running(self) -> VerifiersProcess:
        return process_of(self._python, self._arguments)

    async def _call(self, process: VerifiersProcess, op: str, **fields: Any) -> Any:
        """The result of a call. Errors: EnvError; a wrong argument too, once an episode runs."""
        try:
            return await process.call(op, **fields)
        except ConfigError as error:
            raise EnvError(f"verifiers: {error}") from error

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """The taskset's task of this position."""
        return Task(id=f"verifiers/{seed}", data={"index": seed}, source="verifiers")


_TOOLS: dict[str, list[ToolSpec]] = {}
"""Tools by the environment's arguments."""


def _call_in(text: str) -> ToolCall | None:
    """The call of a text that is `{"name": ..., "arguments": {...}}` and nothing else."""
    stripped = text.strip()
    if not stripped.startswith("{"):
        return None
    try:
        found = json.loads(stripped)
    except (RecursionError, ValueError):
        return None
    if not isinstance(found, dict) or found.keys() != {"name", "arguments"}:
        return None
    if not isinstance(found["name"], str) or not isinstance(found["arguments"], dict):
        return None
    return ToolCall(**found)
