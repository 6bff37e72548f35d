"""The model service: OpenAI's API over a policy, with its version in each answer.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models   POST /admin/weights

Beyond OpenAI's fields an answer has `policy_version` (that of its oldest token; each choice has
its own), and with `return_token_ids` the ids that the model saw and sampled.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from ludus.core.errors import ConfigError, ContextOverflow, LudusError
from ludus.core.types import ToolSpec
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.template import well_formed
from ludus.models.samplers.base import SamplingParams, check_turn
from ludus.services.model.engine import EngineThread
from ludus.services.model.generation import Turn, Turns, api_error
from ludus.services.model.policy import ModelOverrides, Policy, fitting_weights, load_policy
from ludus.services.model.requests import (
    NOT_HERE,
    ApiError,
    ChatRequest,
    Common,
    CompletionRequest,
    SwapRequest,
)
from ludus.services.model.responses import ChatAnswer, TextAnswer
from ludus.services.server.app import ERRORS, Settings, create_app
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")

MOST_RENDERERS = 64
"""Sets of tools whose renderers are kept: each is probed once, which takes its time."""


@dataclass(frozen=True)
class ModelOptions:
    """Of a model service. Without an `admin_token` nobody may swap weights."""

    name: str
    runs_dir: str = "runs"
    max_turns: int = 512
    admin_token: str = ""


def model_service(
    policy: Policy, engine: EngineThread, settings: Settings, options: ModelOptions
) -> FastAPI:
    """The application; whoever made the engine ends it.

    Errors: ConfigError for a chat template that was asked for and cannot be used.
    """
    service = ModelService(policy, engine, settings, options)

    app = create_app("model", settings, health=service.health)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    common: dict[str, Any] = {"responses": ERRORS, "tags": ["openai"]}
    app.add_api_route("/v1/models", service.models, methods=["GET"], **common)
    app.add_api_route("/v1/models/{model:path}", service.model, methods=["GET"], **common)
    for path, handler in (
        ("/v1/chat/completions", service.chat),
        ("/v1/completions", service.complete),
    ):
        app.add_api_route(path, handler, methods=["POST"], response_model=None, **common)
    app.add_api_route(
        "/admin/weights", service.swap, methods=["POST"], responses=ERRORS, tags=["service"]
    )
    return app


class ModelService:
    """The routes, and what they share."""

    def __init__(
        self, policy: Policy, engine: EngineThread, settings: Settings, options: ModelOptions
    ) -> None:
        self._policy, self._engine, self._options = policy, engine, options
        self._origin = policy.origin
        self._created = int(time.time())
        self._renderers: OrderedDict[str, Renderer] = OrderedDict()
        self._swapping = asyncio.Lock()
        self._reader = ThreadPoolExecutor(1, "ludus-reader")
        self._no_chat: ConfigError | None = None
        try:
            self._plain: Renderer | None = policy.renderer()
        except ConfigError as error:
            if policy.chat_template is not None:
                raise
            self._plain, self._no_chat = None, error  # a base model: it completes, and no more
        self._turns = Turns(engine, options.max_turns, settings.registry)

    def health(self) -> dict[str, Any]:
        """What `/health` tells."""
        version = self._engine.policy_version
        return {
            "model": self._options.name,
            "policy_version": version,
            "turns": self._turns.num_open,
        }

    async def models(self) -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [self._model()]}

    async def model(self, model: str) -> dict[str, Any]:
        """The model of that name."""
        self._require(model)
        return self._model()

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """Sample the assistant's next turn in a conversation."""
        self._check(body)
        tools = body.offered()
        renderer = await self._renderer(tools)
        try:
            prompt = await self._apart(renderer.open, body.conversation())
        except (ConfigError, RecursionError) as error:
            raise ApiError(400, f"messages: {error}", param="messages") from None
        limit = body.limit or self._policy.context_length - len(prompt)
        stop_ids = renderer.stop_token_ids
        turns = [
            self._turn(prompt, body.params(limit, stop_ids, seed), "messages")
            for seed in body.seeds(body.choices)
        ]
        answer = ChatAnswer(self._options.name, body, renderer, bool(tools))
        return await self._turns.answer(request, body, turns, answer)

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        """Continue a text, or token ids."""
        self._check(body)
        prompts = await self._apart(lambda: [self._ids(prompt) for prompt in body.prompts])
        limit = 16 if body.max_tokens is None else body.max_tokens
        stop_ids = self._stop_ids()
        seeds = body.seeds(len(prompts) * body.choices)
        turns = []
        for number, seed in enumerate(seeds):
            prompt = prompts[number // body.choices]
            # Nothing is sampled where max_tokens is 0: the prompt is then checked as if one were.
            turn = self._turn(prompt, body.params(max(1, limit), stop_ids, seed), "prompt")
            turns.append(turn if limit else Turn(prompt, None))
        answer = TextAnswer(self._options.name, body, self._policy.tokenizer, stop_ids)
        return await self._turns.answer(request, body, turns, answer)

    async def swap(self, request: Request, body: SwapRequest) -> dict[str, Any]:
        """Serve another checkpoint of the same model. Needs the token of LUDUS_ADMIN_TOKEN."""
        self._require_admin(request)
        if self._swapping.locked():
            raise ApiError(409, "another checkpoint is being loaded", code="busy")
        async with self._swapping:
            present = self._engine.policy_version
            version = present + 1 if body.policy_version is None else body.policy_version
            if version <= present:
                message = f"policy_version: it must be greater than the present one, {present}"
                raise ApiError(409, message, param="policy_version", code="stale")
            try:
                origin, weights = await asyncio.to_thread(self._load, body.checkpoint)
            except Exception as error:  # whatever lies there, loading it is all that was tried
                what = (
                    str(error) if isinstance(error, LudusError) else f"it cannot be read: {error}"
                )
                message = " ".join(what.split())[:400]
                raise ApiError(400, message, param="checkpoint", code="unusable") from None
            try:
                await self._engine.swap(weights, version)
            except LudusError as error:
                raise api_error(error) from error
            self._origin = origin
        log.info("other weights", checkpoint=origin, policy_version=version)
        return {"checkpoint": origin, "policy_version": version}

    # What a request asks for

    def _check(self, body: Common) -> None:
        self._require(body.model)
        body.check()
        if self._engine.streams:
            return
        for param in ("logprobs", "top_logprobs", "echo"):
            wanted = getattr(body, param, None)
            if wanted and (param != "logprobs" or isinstance(body, CompletionRequest)):
                message = f"{param}: this service's sampler tells sampled tokens only"
                raise ApiError(400, message, param=param, code=NOT_HERE)

    def _require(self, model: str) -> None:
        if model != self._options.name:
            message = f"the model {model[:200]!r} is not here; {self._options.name!r} is"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _require_admin(self, request: Request) -> None:
        if not self._options.admin_token:
            message = "weights cannot be swapped: the service has no LUDUS_ADMIN_TOKEN"
            raise ApiError(403, message, kind="permission_error")
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        known = secrets.compare_digest(token.encode(), self._options.admin_token.encode())
        if kind.lower() != "bearer" or not known:
            raise ApiError(403, "this needs the administrator's token", kind="permission_error")

    def _turn(self, prompt: list[int], params: SamplingParams, param: str) -> Turn:
        try:
            length = self._policy.context_length
            if len(prompt) >= length:
                raise ContextOverflow(f"{len(prompt)} tokens of prompt leave no room in {length}")
            check_turn(prompt, params, length)
        except ContextOverflow as error:
            raise ApiError(400, str(error), param=param, code="context_length_exceeded") from None
        except ValueError as error:
            raise ApiError(400, f"{param}: {error}", param=param) from None
        return Turn(prompt, params)

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            ids: list[int] = self._policy.tokenizer(well_formed(prompt))["input_ids"]
            return ids
        if max(prompt) >= (size := len(self._policy.tokenizer)):
            message = f"prompt: {max(prompt)} is no token id; they go from 0 to {size - 1}"
            raise ApiError(400, message, param="prompt")
        return prompt

    def _stop_ids(self) -> list[int]:
        if self._plain is not None:
            return self._plain.stop_token_ids
        eos = self._policy.tokenizer.eos_token_id
        return [] if eos is None else [eos]

    async def _apart(self, work: Callable[..., T], *args: Any) -> T:
        """Done in one thread, in turns: a long text would hold up everybody's streams."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, work, *args)

    async def _renderer(self, tools: tuple[ToolSpec, ...]) -> Renderer:
        if self._plain is None:
            raise ApiError(400, f"this model cannot chat: {self._no_chat}", code=NOT_HERE)
        if not tools:
            return self._plain
        key = "\n".join(tool.model_dump_json() for tool in tools)
        if key not in self._renderers:
            try:
                self._renderers[key] = await self._apart(_with_tools, self._policy, tools)
            except (ConfigError, RecursionError) as error:
                raise ApiError(400, f"tools: {error}", param="tools") from None
            while len(self._renderers) > MOST_RENDERERS:
                self._renderers.popitem(last=False)
        self._renderers.move_to_end(key)
        return self._renderers[key]

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._options.name,
            "object": "model",
            "created": self._created,
            "owned_by": "ludus",
            "max_model_len": self._policy.context_length,
            "checkpoint": self._origin,
            "policy_version": self._engine.policy_version,
        }

    def _load(self, checkpoint: str) -> tuple[str, Any]:
        # On the CPU: a second model need not fit beside the one that is served.
        offered = load_policy(checkpoint, self._options.runs_dir, ModelOverrides(device="cpu"))
        return offered.origin, fitting_weights(self._policy, offered)


def _with_tools(policy: Policy, tools: tuple[ToolSpec, ...]) -> Renderer:
    for tool in tools:
        if place := _reference(tool.parameters):
            raise ConfigError(f"{tool.name}: {place!r} lies elsewhere; references begin with #")
    return policy.renderer(tools)


def _reference(schema: Any) -> str:
    """A reference out of a JSON schema, which checking a call would follow; or nothing."""
    if isinstance(schema, dict):
        for key in ("$ref", "$dynamicRef"):
            if isinstance(schema.get(key), str) and not schema[key].startswith("#"):
                return str(schema[key])
        schema = list(schema.values())
    found = map(_reference, schema) if isinstance(schema, list) else ()
    return next(filter(None, found), "")


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()[0]
    place = ".".join(str(part) for part in found["loc"] if part != "body")
    if found["type"] == "json_invalid":
        place, message = "", "the body is no JSON"
    else:
        message = f"{place or 'the body'}: {found['msg']}"
    return JSONResponse(ApiError(400, message, param=place or None).body, 400)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = ApiError(error.status_code, f"{request.url.path}: {error.detail}").body
    return JSONResponse(body, error.status_code, headers=error.headers)
