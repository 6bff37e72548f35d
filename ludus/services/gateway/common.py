"""Shared by the gateway's APIs: sessions by key, models, tags of calls, refusals.

A trained call samples from the run's own distribution: its `temperature`, `top_p` and `top_k` are
not used, which the header `x-ludus-ignored` tells. The model `policy:untrained`, or the header
`x-ludus-train: false`, makes a call an auxiliary one: it is recorded, has no loss, and keeps its
own sampling parameters.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request

from ludus.core.errors import (
    ConfigError,
    ContextOverflow,
    LudusError,
    SchemaError,
    did_you_mean,
)
from ludus.core.types import Message, ToolSpec
from ludus.rollout.sessions.agent_session import AgentSession
from ludus.rollout.sessions.call_options import CallOptions, CallRefused, CallReply
from ludus.rollout.workflow import MODEL_NAME
from ludus.services.gateway.sessions import Sessions
from ludus.services.model.requests import UNSUPPORTED, ApiError
from ludus.services.server.disconnect import Disconnected, unless_disconnected
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")

UNTRAINED = ":untrained"

SCHEMA_PARAMS = {
    "/v1/chat/completions": "response_format",
    "/v1/responses": "text.format",
    "/v1/messages": "output_config.format",
}

TOO_LONG = "context_length_exceeded"


def key_of(request: Request) -> str:
    """The key that a request carries, or an empty text."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return request.headers.get("x-api-key") or (token if scheme.lower() == "bearer" else "")


def session_of(request: Request, sessions: Sessions) -> AgentSession:
    """The session of a request's key. Errors: ApiError 401, 410."""
    key = key_of(request)
    session = sessions.find(key)
    if session is not None:
        return session
    if sessions.has_ended(key):
        raise ApiError(410, "the episode of this key has ended", code="episode_ended")
    raise ApiError(
        401,
        "send the episode's key, model.api_key, as `Authorization: Bearer KEY` or `x-api-key`",
        kind="authentication_error",
        code="invalid_api_key",
    )


def models_of(session: AgentSession) -> list[str]:
    """The models that a session serves: its own policy and its roles, each also untrained."""
    roles = [*session.roles] if len(session.roles) > 1 else []
    return [f"{name}{tag}" for name in (MODEL_NAME, *roles) for tag in ("", UNTRAINED)]


def role_of(session: AgentSession, model: str) -> AgentSession:
    """The session of the role that a model's name means. Errors: ApiError 404 for a model that is
    not served."""
    known = models_of(session)
    if model not in known:
        near = did_you_mean(model[:200], known)
        message = f"unknown model {model[:200]!r}{near}; {MODEL_NAME!r} is the one that trains"
        raise ApiError(404, message, param="model", code="model_not_found")
    return session.roles.get(model.removesuffix(UNTRAINED), session)


def is_trained(request: Request, model: str) -> bool:
    """Returns whether a call trains, by its model and its tag. Errors: ApiError 400."""
    tag = request.headers.get("x-ludus-train", "true").strip().lower()
    if tag not in ("true", "false"):
        raise ApiError(400, f"x-ludus-train: true or false, not {tag!r:.80}", param="x-ludus-train")
    return not model.endswith(UNTRAINED) and tag == "true"


def refuse(fields: dict[str, bool]) -> None:
    """Errors: ApiError 400 that names the first unsupported field in use."""
    for param, used in fields.items():
        if used:
            raise ApiError(
                400, f"{param}: not supported here; leave it out", param=param, code=UNSUPPORTED
            )


def check_choice(choice: Mapping[str, Any], tools: Sequence[str]) -> None:
    """Check a `tool_choice` that names a tool. Errors: ApiError 400."""
    function = choice.get("function")
    own = function if isinstance(function, Mapping) else choice
    kind, name = choice.get("type"), own.get("name")
    if kind not in ("function", "tool") or not isinstance(name, str):
        told = f"tool_choice: {kind!r:.80}: not supported here; name a function, or leave it out"
        raise ApiError(400, told, param="tool_choice", code=UNSUPPORTED)
    if name not in tools:
        near = did_you_mean(name[:200], tools)
        raise ApiError(400, f"tool_choice: no tool {name[:200]!r}{near}", param="tool_choice")


def ignored(
    body: Any, options: CallOptions, others: Iterable[str], *, required: bool = False
) -> dict[str, str]:
    """The header that names the parameters without effect.

    Args:
        others: fields of the body without effect on any call.
        required: the call asks for a tool call, or for a tool by name: nothing is constrained.
    """
    sampling = ("temperature", "top_p", "top_k") if options.trained else ()
    names = [n for n in (*sampling, *others) if getattr(body, n, None) is not None]
    names += ["tool_choice"] if required else []
    return {"x-ludus-ignored": ", ".join(names)} if names else {}


async def call(
    session: AgentSession,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    options: CallOptions,
) -> list[CallReply]:
    """Answer a conversation in the event loop of the rollouts."""
    return await session.at_home(session.call(messages, tools, options))


async def answered(request: Request, work: Awaitable[T], param: str = "messages") -> T:
    """The result of a call, which ends with its client; `param` is the conversation's field.

    Errors: ApiError.
    """
    try:
        return await unless_disconnected(request, work)
    except Disconnected:
        raise ApiError(499, "the client is gone") from None
    except CallRefused as error:
        raise ApiError(400, str(error), code="call_refused") from None
    except ContextOverflow as error:
        message = f"This model's maximum context length is exceeded: {error}"
        raise ApiError(400, message, param=param, code=TOO_LONG) from None
    except SchemaError as error:
        place = SCHEMA_PARAMS.get(request.url.path, "schema")
        raise ApiError(400, f"{place}: {error}", param=place) from None
    except (ConfigError, RecursionError, ValueError) as error:
        raise ApiError(400, f"{param}: {error}", param=param) from None
    except LudusError as error:
        log.error("a call failed", error=f"{type(error).__name__}: {error}")
        raise ApiError(503, f"generation failed: {error}", kind="server_error") from None


def tool_specs(tools: Iterable[tuple[str, str | None, dict[str, Any] | None]]) -> list[ToolSpec]:
    """Tools by name, description and parameters. Errors: ApiError 400 for a name that repeats."""
    specs: dict[str, ToolSpec] = {}
    for name, description, parameters in tools:
        if name in specs:
            raise ApiError(400, f"tools: {name!r} is there twice", param="tools")
        parameters = parameters or {"type": "object", "properties": {}}
        specs[name] = ToolSpec(name=name, description=description or "", parameters=parameters)
    return list(specs.values())


def event(data: dict[str, Any]) -> str:
    """A server-sent event with its name."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {data['type']}\ndata: {text}\n\n"
