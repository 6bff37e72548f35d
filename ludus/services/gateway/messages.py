"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens.

Thinking is in the answer if the request asks for it (`thinking`); the recorded tokens have it in
any case, and a client may leave it out of what it sends back.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from ludus.core.types import Message, ToolSpec
from ludus.models.chat.renderer import Renderer
from ludus.rollout.sessions.agent_session import AgentSession
from ludus.rollout.sessions.call_options import CallOptions, CallReply
from ludus.services.gateway.common import (
    TOO_LONG,
    answered,
    call,
    event,
    ignored,
    is_trained,
    role_of,
    session_of,
)
from ludus.services.gateway.messages_input import IGNORED, Conversation, MessagesRequest
from ludus.services.gateway.sessions import Sessions
from ludus.services.server.app import ERRORS, ServiceError

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: ServiceError) -> dict[str, Any]:
    """An error in Anthropic's form; agents shorten their history where a prompt is too long."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told = str(error)
    if getattr(error, "code", None) == TOO_LONG:
        told = f"prompt is too long: {told}"
    return {"type": "error", "error": {"type": kind, "message": told}}


class MessagesRoutes:
    """The routes over the sessions."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def add_to(self, app: FastAPI) -> None:
        how: dict[str, Any] = {"methods": ["POST"], "responses": ERRORS, "tags": ["anthropic"]}
        app.add_api_route("/v1/messages", self.create, response_model=None, **how)
        app.add_api_route("/v1/messages/count_tokens", self.count, **how)

    async def create(self, request: Request, body: MessagesRequest) -> Response:
        """The model's next turn of a conversation."""
        session = role_of(session_of(request, self._sessions), body.model)
        body.check()
        choice = body.tool_choice
        options = CallOptions(
            max_tokens=body.max_tokens,
            stop=tuple(body.stop_sequences or ()),
            trained=is_trained(request, body.model),
            parallel=not (choice and choice.disable_parallel_tool_use),
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            schema=body.answer_schema(),
        )
        tools = body.offered()
        work = call(session, body.conversation(), tools, options)
        (reply,) = await answered(request, work)
        answer = message_body(body, reply, session.renderers.of(tools))
        required = choice is not None and choice.type in ("any", "tool")
        headers = ignored(body, options, IGNORED, required=required)
        if not body.stream:
            return JSONResponse(answer, headers=headers)
        events = "".join(map(event, stream_events(answer)))
        return Response(events, media_type="text/event-stream", headers=headers)

    async def count(self, request: Request, body: Conversation) -> dict[str, int]:
        """The number of tokens that a call would read; nothing is recorded."""
        session = role_of(session_of(request, self._sessions), body.model)
        body.check()
        work = _count(session, body.conversation(), body.offered())
        return {"input_tokens": await answered(request, session.at_home(work))}


async def _count(
    session: AgentSession, messages: Sequence[Message], tools: Sequence[ToolSpec]
) -> int:
    return session.count(messages, tools)


def message_body(body: MessagesRequest, reply: CallReply, renderer: Renderer) -> dict[str, Any]:
    """The complete answer."""
    reason, stop = stop_reason(body, reply, renderer)
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": body.model,
        "content": blocks_of(body, reply),
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": {
            "input_tokens": len(reply.prompt_ids),
            "output_tokens": len(reply.completion.token_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def blocks_of(body: MessagesRequest, reply: CallReply) -> list[dict[str, Any]]:
    """The blocks of a turn."""
    message = reply.message
    blocks: list[dict[str, Any]] = []
    if message.thinking is not None and body.wants_thinking:
        blocks.append({"type": "thinking", "thinking": message.thinking, "signature": "unsigned"})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    for made in message.tool_calls:
        named = {"id": made.id, "name": made.name, "input": made.arguments}
        blocks.append({"type": "tool_use", **named})
    return blocks


def stop_reason(
    body: MessagesRequest, reply: CallReply, renderer: Renderer
) -> tuple[str, str | None]:
    """The end of a turn, and the stop sequence, if it was one."""
    if reply.message.tool_calls:
        return "tool_use", None
    if reply.finish_reason == "length":
        return "max_tokens", None
    stops = body.stop_sequences
    text = renderer.text(reply.completion.token_ids) if stops else ""
    found = [(text.find(stop), stop) for stop in stops or () if stop in text]
    return ("stop_sequence", min(found)[1]) if found else ("end_turn", None)


def stream_events(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of an answer that is complete: each block at once."""
    usage = answer["usage"]
    begun = {
        **answer,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(answer["content"]):
        start, deltas = _deltas(block)
        yield {"type": "content_block_start", "index": index, "content_block": start}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
    yield {"type": "message_delta", "delta": end, "usage": usage}
    yield {"type": "message_stop"}


def _deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block at its start, and what is added to it."""
    if block["type"] == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    if block["type"] == "thinking":
        return {**block, "thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
