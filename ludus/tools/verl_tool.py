"""Tools at a server that speaks verl-tool's protocol: `ludus serve tools`, or verl-tool's own.

    POST /get_observation
    {"trajectory_ids": ["e1"], "actions": ["<tool_call>...</tool_call>"], "extra_fields": [{}],
     "finish": [false], "is_last_step": [false]}
    -> {"observations": ["42"], "dones": [false], "valids": [true], "processing_time_ms": 3.1}

`ludus serve tools` lists its functions (`GET /tools`). verl-tool's server reads a marked text out
of the model's answer and lists nothing: there, `action` says how a call is written, for example
"<python>{}</python>".
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from ludus.core.errors import ConfigError, ToolError, first_fault
from ludus.core.remote import Blamed, RemoteClient
from ludus.core.types import ToolCall, ToolSpec
from ludus.tools.base import Tool, ToolResult

PATH = "/get_observation"
CALLS_BEFORE = "ludus_calls_before"
"""Extra field: the calls of this trajectory that were answered."""

NOT_VALID = "The tool server says that this is no valid call."


class _Entry(BaseModel):
    """An observation with more than text; `error`: the tool failed."""

    obs: str
    error: Any = None
    invalid_reason: str | None = None


class _Answer(BaseModel):
    observations: list[str | _Entry] = Field(min_length=1, max_length=1)
    dones: list[bool] = Field(min_length=1, max_length=1)
    valids: list[bool] = Field(min_length=1, max_length=1)


class RemoteTools(Tool):
    """The functions of a tool server.

    Calls may change what the server keeps for an episode, so a call is sent a second time only
    where the server cannot have run it, unless `idempotent`.
    """

    def __init__(
        self,
        url: Annotated[str, Field(description="The server's address, http://host:port.")],
        action: Annotated[
            str | None,
            Field(
                description="For a server that lists no functions: the text of a call, with {} for "
                'the argument, for example "<python>{}</python>".'
            ),
        ] = None,
        name: Annotated[
            str, Field(description="With `action`: the function's name for the model.")
        ] = "python",
        argument: Annotated[str, Field(description="With `action`: its argument's name.")] = "code",
        description: Annotated[
            str, Field(description="With `action`: what it does, for the model.")
        ] = "",
        deadline_s: Annotated[
            float, Field(gt=0, description="Seconds of a call, retries included.")
        ] = 30.0,
        max_in_flight: Annotated[int, Field(ge=1, description="Calls at the same time.")] = 64,
        idempotent: Annotated[
            bool, Field(description="A call may run twice: retry it after a lost answer too.")
        ] = False,
        token_env: Annotated[
            str | None, Field(description="Environment variable with the server's token.")
        ] = None,
    ) -> None:
        if action is not None and action.count("{}") != 1:
            raise ConfigError(f"action: {action!r} must contain {{}} exactly once")
        self._action, self._argument = action, argument
        schema = {
            "type": "object",
            "properties": {argument: {"type": "string"}},
            "required": [argument],
        }
        self._fixed = ToolSpec(name=name, description=description, parameters=schema)
        self._client = RemoteClient(
            url.rstrip("/").removesuffix(PATH),
            deadline_s=deadline_s,
            max_in_flight=max_in_flight,
            idempotent=idempotent,
            token_env=token_env,
        )
        self._answered: dict[str, int] = {}  # calls by episode
        self._run = uuid.uuid4().hex  # two runs at one server share no state

    async def specs(self) -> Sequence[ToolSpec]:
        if self._action is not None:
            return [self._fixed]
        try:
            return TypeAdapter(list[ToolSpec]).validate_python(await self._client.get("/tools"))
        except (Blamed, ValidationError) as error:
            raise ToolError(
                f"{self._client.url}/tools lists no functions ({error!s:.200}): for verl-tool's "
                "own server give `action`"
            ) from None

    async def call(self, call: ToolCall, episode: str) -> ToolResult:
        self._answered.setdefault(episode, 0)
        if self._action is not None:
            action = self._action.replace("{}", call.arguments[self._argument])
        else:
            written = json.dumps({"name": call.name, "arguments": call.arguments})
            action = f"<tool_call>{written}</tool_call>"
        try:
            result = self._read(await self._send(episode, action))
            self._answered[episode] += 1
            return result
        except Blamed as error:
            return ToolResult(content=f"{call.name}: {error}", failed=True)

    async def end(self, episode: str) -> None:
        if self._answered.pop(episode, None) is not None and not self._client.is_down:
            await self._send(episode, "", finish=True)  # else it ends after the server's idle time

    async def close(self) -> None:
        await self._client.close()

    async def _send(self, episode: str, action: str, finish: bool = False) -> Any:
        # A server that was restarted has lost what these calls left: `ludus serve tools` says so.
        before = self._answered.get(episode, 0) if self._action is None else 0
        body = {
            "trajectory_ids": [f"{self._run}/{episode}"],
            "actions": [action],
            "extra_fields": [{CALLS_BEFORE: before} if before else {}],
            "finish": [finish],
            "is_last_step": [finish],
        }
        return await self._client.post(body, PATH, once=finish)

    def _read(self, answer: Any) -> ToolResult:
        """Errors: ToolError where the tool failed, or the answer has another form."""
        try:
            parsed = _Answer.model_validate(answer)
        except ValidationError as error:
            raise ToolError(
                f"{self._client.url}: not a tool server's answer: {first_fault(error)}"
            ) from None
        entry = parsed.observations[0]
        text, reason = (
            (entry, None) if isinstance(entry, str) else (entry.obs, entry.invalid_reason)
        )
        if isinstance(entry, _Entry) and entry.error is not None:
            raise ToolError(f"{self._client.url}: {entry.error!s:.400}")
        failed = not parsed.valids[0]
        if failed and not text.strip():
            text = reason or NOT_VALID
        return ToolResult(content=text, failed=failed, done=parsed.dones[0])
