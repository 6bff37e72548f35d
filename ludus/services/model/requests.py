"""Request bodies of the OpenAI API, parsed into messages and sampling parameters.

Unsupported fields are refused with 400 and the field's name; none is ignored silently.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ludus.core.seeds import derive_seed
from ludus.core.types import Message, ToolCall, ToolSpec
from ludus.models.samplers.base import SamplingParams
from ludus.services.server.app import ServiceError

MAX_CHOICES = 128
MAX_ALTERNATIVES = 20

Text = Annotated[str, Field(max_length=1_000_000)]
Id = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=200)]


class ApiError(ServiceError):
    """An error in OpenAI's format; `param` is the wrong field."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(status, kind, message)
        self.param, self.code = param, code

    @classmethod
    def invalid(cls, field: str, message: str) -> ApiError:
        return cls(400, f"{field or 'the body'}: {message}", param=field or None)

    @classmethod
    def not_json(cls, message: str) -> ApiError:
        return cls(400, "the body is not JSON")

    @classmethod
    def from_http(cls, status: int, message: str) -> ApiError:
        return cls(status, message)

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


class Part(BaseModel):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: Text


class Function(BaseModel):
    """A called function; `arguments` is JSON."""

    name: str
    arguments: Text = "{}"


class Call(BaseModel):
    """A tool call of an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(BaseModel):
    """A message of the conversation. `reasoning_content` is a thinking block."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[Part] | None = None
    name: str | None = None
    reasoning_content: Text | None = None
    tool_calls: list[Call] | None = Field(None, max_length=128)
    tool_call_id: str | None = None


class FunctionSpec(BaseModel):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionSpec


class StreamOptions(BaseModel):
    """Extra fields of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CommonRequest(BaseModel):
    """The fields of both routes."""

    model_config = ConfigDict(extra="forbid")

    model: str
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 and -1: all tokens.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(
        None, description="Return the token ids: `prompt_token_ids`, `token_ids`."
    )
    ignore_eos: bool | None = Field(None, description="Continue after the end of the turn.")
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = Field(
        None, description="In an A/B roll-out, the session's key; ignored else."
    )
    safety_identifier: str | None = Field(None, description="Like `user`, which it replaces.")
    metadata: dict[str, Any] | None = Field(
        None, description="Ignored, as are the next two fields."
    )
    store: bool | None = None
    service_tier: str | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        given = self.stop or ()
        return (given,) if isinstance(given, str) else tuple(given)

    @property
    def with_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def unsupported(self) -> dict[str, bool]:
        """Unsupported fields: whether the request uses each."""
        return {
            "frequency_penalty": bool(self.frequency_penalty),
            "presence_penalty": bool(self.presence_penalty),
            "logit_bias": bool(self.logit_bias),
        }

    def check(self) -> None:
        """Errors: ApiError 400 for unsupported fields and combinations."""
        for param, used in self.unsupported().items():
            if used:
                raise ApiError(
                    400, f"{param}: not supported here; leave it out", param=param, code=UNSUPPORTED
                )
        if self.stream_options and not self.stream:
            raise ApiError(400, "stream_options: only with stream: true", param="stream_options")

    def params(
        self, max_tokens: int, stop_ids: list[int], seed: int, grammar: str | None = None
    ) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            stop=self.stops,
            stop_token_ids=() if self.ignore_eos else tuple(stop_ids),
            seed=seed,
            grammar=grammar,
        )

    def seeds(self, number: int) -> list[int]:
        """A seed per choice; the first is the client's, so that choice does not depend on `n`."""
        first = secrets.randbits(63) if self.seed is None else self.seed % 2**63
        return [first, *(derive_seed(first, "choice", i) for i in range(1, number))]


UNSUPPORTED = "unsupported_parameter"


def schema_of(param: str, wanted: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The JSON schema that an answer has to follow; None: any text. Errors: ApiError 400.

    OpenAI's chat has it in `json_schema.schema`, the other APIs in `schema`.
    """
    kind = (wanted or {}).get("type", "text")
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        told = f"{param}: {kind!r:.80}: not supported here; text, json_object or json_schema"
        raise ApiError(400, told, param=param, code=UNSUPPORTED)
    holder = wanted.get("json_schema", wanted)
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    if not isinstance(schema, dict):
        raise ApiError(400, f"{param}: json_schema has to have a `schema`, an object", param=param)
    return schema


class ChatRequest(CommonRequest):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=10_000)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_alternatives(self) -> int:
        return self.top_logprobs or 0

    def unsupported(self) -> dict[str, bool]:
        return super().unsupported() | {
            "tool_choice": self.tool_choice not in (None, "none", "auto"),
            "parallel_tool_calls": self.parallel_tool_calls is False and bool(self.tools),
        }

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs: true", param="top_logprobs")

    def offered(self) -> tuple[ToolSpec, ...]:
        if self.tool_choice == "none":
            return ()
        functions = [tool.function for tool in self.tools or []]
        names = [function.name for function in functions]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ApiError(400, f"tools: {repeated[0]!r} is there twice", param="tools")
        return tuple(
            ToolSpec(
                name=function.name,
                description=function.description or "",
                parameters=function.parameters or {"type": "object", "properties": {}},
            )
            for function in functions
        )

    def conversation(self) -> list[Message]:
        """The messages. Errors: ApiError 400 if a call's arguments are not a JSON object."""
        return [_message(message, i) for i, message in enumerate(self.messages)]


class CompletionRequest(CommonRequest):
    """`POST /v1/completions`. A prompt is a text or token ids; choices are in order."""

    prompt: (
        Text
        | Annotated[list[Id], Field(min_length=1, max_length=1_000_000)]
        | Annotated[list[Text], Field(min_length=1, max_length=1024)]
        | Annotated[
            list[Annotated[list[Id], Field(min_length=1, max_length=1_000_000)]],
            Field(min_length=1, max_length=1024),
        ]
    )
    max_tokens: int | None = Field(16, ge=0, lt=2**31, description="0: only with echo.")
    logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    suffix: str | None = None

    @property
    def num_alternatives(self) -> int:
        return self.logprobs or 0

    def unsupported(self) -> dict[str, bool]:
        return super().unsupported() | {
            "best_of": self.best_of is not None and self.best_of != self.choices,
            "suffix": bool(self.suffix),
        }

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens: 0 needs echo", param="max_tokens")
        if self.echo and self.stream:
            raise ApiError(400, "echo: not with stream: true", param="echo")
        if len(self.prompts) * self.choices > 1024:
            raise ApiError(400, "prompt: at most 1024 choices in one request", param="prompt")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        given: Any = self.prompt
        single = isinstance(given, str) or isinstance(given[0], int)
        return [given] if single else given


class SwapRequest(BaseModel):
    """`POST /admin/weights`: serve another checkpoint of the same model."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: Annotated[str, Field(min_length=1, max_length=4096)]
    policy_version: int | None = Field(
        None, ge=0, lt=2**53, description="Must exceed the current version; default: one more."
    )


def _message(given: ChatMessage, index: int) -> Message:
    content = given.content or ""
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    calls = given.tool_calls or []
    return Message(
        role="system" if given.role == "developer" else given.role,
        content=content,
        thinking=given.reasoning_content,
        tool_calls=[
            _call(call, f"messages.{index}.tool_calls.{i}") for i, call in enumerate(calls)
        ],
        tool_call_id=given.tool_call_id,
        name=given.name,
    )


def _call(given: Call, place: str) -> ToolCall:
    try:
        arguments = json.loads(given.function.arguments)
        return ToolCall(name=given.function.name, arguments=arguments, id=given.id)
    except (ValueError, RecursionError, ValidationError):
        where = f"{place}.function.arguments"
        raise ApiError(400, f"{where}: not a JSON object", param=where) from None
