"""OpenAI's Responses API: POST /v1/responses, whole and as a stream of events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from ludus.core.types import Message
from ludus.models.chat.renderer import Renderer
from ludus.rollout.sessions.call_options import CallOptions, CallReply
from ludus.services.gateway.common import (
    answered,
    call,
    event,
    ignored,
    is_trained,
    key_of,
    role_of,
    session_of,
)
from ludus.services.gateway.responses_input import IGNORED, ResponsesRequest, item_ids
from ludus.services.gateway.sessions import Sessions
from ludus.services.model.engine import tokens_of
from ludus.services.model.formatting import chat_logprobs
from ludus.services.model.requests import ApiError
from ludus.services.server.app import ERRORS


class ResponsesRoutes:
    """The route over the sessions."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def add_to(self, app: FastAPI) -> None:
        how: dict[str, Any] = {"methods": ["POST"], "response_model": None, "responses": ERRORS}
        app.add_api_route("/v1/responses", self.respond, tags=["openai"], **how)

    async def respond(self, request: Request, body: ResponsesRequest) -> Response:
        """The model's next turn of a conversation."""
        session = role_of(session_of(request, self._sessions), body.model)
        body.check()
        options = CallOptions(
            max_tokens=body.max_output_tokens,
            trained=is_trained(request, body.model),
            parallel=body.parallel_tool_calls is not False,
            temperature=body.temperature,
            top_p=body.top_p,
            schema=body.answer_schema(),
        )
        tools = body.offered()
        kept = self._sessions.responses(key_of(request))
        messages = _before(body, kept) + body.messages()
        work = call(session, body.instructed(messages), tools, options)
        (reply,) = await answered(request, work, "input")
        answer = Answer(body, reply, session.renderers.of(tools))
        if body.store is not False:
            kept[answer.id] = [*messages, reply.message]
        required = body.tool_choice not in (None, "none", "auto")
        headers = ignored(body, options, IGNORED, required=required)
        if not body.stream:
            return JSONResponse(answer.body(), headers=headers)
        events = "".join(map(event, answer.events()))
        return Response(events, media_type="text/event-stream", headers=headers)


class Answer:
    """The response to a call."""

    def __init__(self, body: ResponsesRequest, reply: CallReply, renderer: Renderer) -> None:
        self._body, self._reply, self._renderer = body, reply, renderer
        token = secrets.token_hex(12)
        self.id = f"resp_{token}"
        self._token, self._created = token, int(time.time())
        self._complete = reply.finish_reason == "stop"

    def body(self) -> dict[str, Any]:
        """The complete response."""
        status = "completed" if self._complete else "incomplete"
        details = None if self._complete else {"reason": "max_output_tokens"}
        frame = self._frame(status) | {"incomplete_details": details, "usage": self._usage()}
        return frame | {"output": self._items()}

    def events(self) -> Iterator[dict[str, Any]]:
        """The events of a stream, numbered."""
        for number, data in enumerate(self._unnumbered()):
            yield {**data, "sequence_number": number}

    def _unnumbered(self) -> Iterator[dict[str, Any]]:
        started = self._frame("in_progress")
        yield {"type": "response.created", "response": started}
        yield {"type": "response.in_progress", "response": started}
        for index, item in enumerate(self._items()):
            yield from _events_of(index, item)
        body = self.body()
        yield {"type": f"response.{body['status']}", "response": body}

    def _frame(self, status: str) -> dict[str, Any]:
        body, version = self._body, self._reply.completion.policy_version
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "policy_version": version,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or []],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _items(self) -> list[dict[str, Any]]:
        message = self._reply.message
        reasoning_id, message_id, call_ids = item_ids(self._token, message.tool_calls)
        status = "completed" if self._complete else "incomplete"
        items: list[dict[str, Any]] = []
        if message.thinking is not None:
            content = [{"type": "reasoning_text", "text": message.thinking}]
            items.append(
                {"type": "reasoning", "id": reasoning_id, "summary": [], "content": content}
            )
        if message.content or not message.tool_calls:
            said = {
                "type": "output_text",
                "text": message.content,
                "annotations": [],
                "logprobs": self._logprobs(),
            }
            items.append(
                {"type": "message", "id": message_id, "role": "assistant", "content": [said]}
            )
        for id, made in zip(call_ids, message.tool_calls, strict=True):
            arguments = json.dumps(made.arguments, ensure_ascii=False)
            named = {"call_id": made.id, "name": made.name, "arguments": arguments}
            items.append({"type": "function_call", "id": id, **named})
        return [{**item, "status": status} for item in items]

    def _logprobs(self) -> list[dict[str, Any]]:
        """Those of all tokens of the turn, its thinking and calls included, if requested."""
        if not self._body.wants_logprobs:
            return []
        tokens = tokens_of(self._reply.completion)
        found: list[dict[str, Any]] = chat_logprobs(tokens, self._renderer.tokenizer)["content"]
        return found

    def _usage(self) -> dict[str, Any]:
        read, sampled = len(self._reply.prompt_ids), len(self._reply.completion.token_ids)
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + sampled,
        }


def _before(body: ResponsesRequest, kept: dict[str, list[Message]]) -> list[Message]:
    """The conversation before the request's input. Errors: ApiError 404."""
    previous = body.previous_response_id
    if previous is None:
        return []
    if previous not in kept:
        raise ApiError(
            404,
            f"previous_response_id: {previous[:80]!r} is no response of this episode that was kept",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return kept[previous]


def _events_of(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of an item that is complete: its text or arguments at once."""
    at = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        begun, text = {**item, "arguments": ""}, item["arguments"]
        named = {"name": item["name"], "arguments": text}
        inner = [
            {"type": "response.function_call_arguments.delta", **at, "delta": text},
            {"type": "response.function_call_arguments.done", **at, **named},
        ]
    else:
        begun, inner = {**item, "content": []}, list(_events_of_part(item["content"][0], at))
    begun["status"] = "in_progress"
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    yield from inner
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _events_of_part(part: dict[str, Any], at: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of the only part of an item."""
    at = {**at, "content_index": 0}
    kind = f"response.{part['type']}"
    shown = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
    if part["text"]:
        yield {"type": f"{kind}.delta", **at, "delta": part["text"], **shown}
    yield {"type": f"{kind}.done", **at, "text": part["text"], **shown}
    yield {"type": "response.content_part.done", **at, "part": part}
