"""OpenAI's chat and completions.

POST /v1/chat/completions   POST /v1/completions   GET /v1/models
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import Field

from ludus.rollout.sessions.agent_session import AgentSession
from ludus.rollout.sessions.call_options import CallOptions, CallReply
from ludus.services.gateway.common import (
    answered,
    call,
    check_choice,
    ignored,
    is_trained,
    models_of,
    role_of,
    session_of,
)
from ludus.services.gateway.sessions import Sessions
from ludus.services.model.engine import tokens_of
from ludus.services.model.requests import (
    UNSUPPORTED,
    ApiError,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    schema_of,
)
from ludus.services.model.responses import (
    ChatResponse,
    Choice,
    CompletionResponse,
    ResponseBuilder,
)
from ludus.services.server.app import ERRORS

NO_EFFECT = (
    "frequency_penalty",
    "presence_penalty",
    "min_p",
    "repetition_penalty",
    "reasoning_effort",
    "verbosity",
    "chat_template_kwargs",
)
"""Fields that agents send, and that change no call."""


class AgentChatRequest(ChatRequest):
    """`POST /v1/chat/completions`. A `tool_choice` but for `none` is a wish: nothing is
    constrained."""

    min_p: float | None = Field(None, description="Ignored, as are the next six fields.")
    repetition_penalty: float | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    modalities: list[Literal["text"]] | None = None

    def unsupported(self) -> dict[str, bool]:
        return super().unsupported() | {
            "frequency_penalty": False,
            "presence_penalty": False,
            "tool_choice": False,
            "parallel_tool_calls": False,
            "top_logprobs": bool(self.top_logprobs),
            "response_format": False,
        }

    def check(self) -> None:
        super().check()
        if isinstance(self.tool_choice, dict):
            check_choice(self.tool_choice, [tool.function.name for tool in self.tools or []])


class ChatRoutes:
    """The routes over the sessions."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._created = int(time.time())

    def add_to(self, app: FastAPI) -> None:
        common: dict[str, Any] = {"responses": ERRORS, "tags": ["openai"]}
        app.add_api_route("/v1/models", self.models, methods=["GET"], **common)
        app.add_api_route("/v1/models/{model:path}", self.model, methods=["GET"], **common)
        post = {**common, "methods": ["POST"], "response_model": None}
        app.add_api_route("/v1/chat/completions", self.chat, **post)
        app.add_api_route("/v1/completions", self.complete, **post)

    async def models(self, request: Request) -> dict[str, Any]:
        """The list of models."""
        session = session_of(request, self._sessions)
        return {
            "object": "list",
            "data": [self._model(name, session) for name in models_of(session)],
        }

    async def model(self, request: Request, model: str) -> dict[str, Any]:
        """A model."""
        session = role_of(session_of(request, self._sessions), model)
        return self._model(model, session)

    async def chat(self, request: Request, body: AgentChatRequest) -> Response:
        """The model's next turn of a conversation."""
        session = role_of(session_of(request, self._sessions), body.model)
        body.check()
        parallel = body.parallel_tool_calls is not False
        options = replace(
            options_of(request, body, body.limit, parallel),
            schema=schema_of("response_format", body.response_format),
        )
        tools, given = body.offered(), body.conversation()
        replies = await answered(request, call(session, given, tools, options))
        renderer = session.renderers.of(tools)
        builder = ChatResponse(body.model, body, renderer, bool(tools))
        wish = body.tool_choice not in (None, "none", "auto")
        return respond(body, builder, replies, ignored(body, options, NO_EFFECT, required=wish))

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        """Continue texts, or token ids."""
        session = role_of(session_of(request, self._sessions), body.model)
        body.check()
        if not session.has_tokens:
            told = "/v1/completions: the model of this role takes messages: /v1/chat/completions"
            raise ApiError(400, told, param="prompt", code=UNSUPPORTED)
        renderer = session.renderers.of(())
        if "" in body.prompts:
            raise ApiError(400, "prompt: has to have a text", param="prompt")
        for param in ("echo", "logprobs"):
            if getattr(body, param) and (param == "echo" or body.num_alternatives > 1):
                raise ApiError(400, f"{param}: not supported here", param=param, code=UNSUPPORTED)
        options = options_of(request, body, body.max_tokens)
        prompts = [
            renderer.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            for prompt in body.prompts
        ]
        work = [session.at_home(session.complete(ids, options)) for ids in prompts]
        groups = await answered(request, asyncio.gather(*work), "prompt")
        replies = [reply for group in groups for reply in group]
        builder = CompletionResponse(body.model, body, renderer.tokenizer, renderer.stop_token_ids)
        return respond(body, builder, replies, ignored(body, options, ()))

    def _model(self, name: str, session: AgentSession) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "ludus",
            "max_model_len": session.context_length,
        }


def options_of(
    request: Request, body: CommonRequest, max_tokens: int | None, parallel: bool = True
) -> CallOptions:
    """The options of a call. Errors: ApiError 400."""
    return CallOptions(
        n=body.choices,
        max_tokens=max_tokens,
        stop=body.stops,
        seed=None if body.seed is None else body.seed % 2**63,
        trained=is_trained(request, body.model),
        parallel=parallel,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else max(0, body.top_k),
    )


def respond(
    body: CommonRequest,
    builder: ResponseBuilder,
    replies: Sequence[CallReply],
    headers: dict[str, str],
) -> Response:
    """The response; for clients that ask for a stream, the complete turns as one."""
    logprobs = getattr(body, "logprobs", None)  # 0: the sampled tokens' alone
    by_token = body.return_token_ids or (logprobs is not None and logprobs is not False)
    choices = [
        Choice(
            r.prompt_ids,
            r.completion,
            tokens_of(r.completion) if by_token else [],
            message=r.message,
        )
        for r in replies
    ]
    if not body.stream:
        return JSONResponse(builder.body(choices), headers=headers)

    async def events() -> AsyncIterator[str]:
        version = min(choice.completion.policy_version for choice in choices)
        yield builder.first_events(
            [choice.prompt_ids for choice in choices], version, by_token=False
        )
        for index, choice in enumerate(choices):
            yield builder.events_of(index, choice)
        yield builder.last_events()

    return StreamingResponse(events(), media_type="text/event-stream", headers=headers)
