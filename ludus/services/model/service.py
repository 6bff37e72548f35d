"""Model service: the OpenAI API over a policy, with the policy version in each response.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models   POST /admin/weights

Beyond OpenAI's fields, a response has `policy_version` (that of its oldest token; each choice has
one too), and with `return_token_ids` the ids of the prompt and of the sampled tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import Gauge

from ludus.core.errors import (
    ConfigError,
    ContextOverflow,
    LudusError,
    MissingDependency,
    SchemaError,
)
from ludus.core.types import ToolSpec
from ludus.models.chat.parsing import external_reference
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.template import well_formed
from ludus.models.grammars import grammar_for
from ludus.models.samplers.base import SamplingParams, Selective, check_turn, num_embeddings
from ludus.services.model.engine import EngineThread
from ludus.services.model.generation import ChoiceRequest, Generator, Turns, server_error
from ludus.services.model.policy import ModelOverrides, Policy, fitting_weights, load_policy
from ludus.services.model.requests import (
    UNSUPPORTED,
    ApiError,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    SwapRequest,
    schema_of,
)
from ludus.services.model.responses import ChatResponse, CompletionResponse, new_id
from ludus.services.server.app import ERRORS, Settings, create_app
from ludus.services.server.auth import match_token
from ludus.services.server.shares import Shares
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")

MAX_RENDERERS = 64
"""Cached renderers, one per set of tools; making a renderer is slow."""


@dataclass(frozen=True)
class ModelOptions:
    """Options of a model service. Without `admin_token`, weights cannot be swapped.

    `max_turns_per_token`: of `max_turns`, those of one token, without tokens of one client address
    (0: an equal share of each token).
    """

    name: str
    runs_dir: str = "runs"
    max_turns: int = 512
    max_turns_per_token: int = 0
    admin_token: str = ""


def model_service(
    policy: Policy, engine: EngineThread, settings: Settings, options: ModelOptions
) -> FastAPI:
    """The application; the caller closes the engine.

    Errors: ConfigError if the configured chat template cannot be used.
    """
    turns = turns_of(settings, options)
    service = ModelService(policy, engine, turns, options)
    add_version(settings, lambda: engine.policy_version)
    app = create_app("model", settings, health=service.health, errors=ApiError)
    add_routes(app, service)
    return app


def turns_of(settings: Settings, options: ModelOptions) -> Turns:
    """The turns of a service, with its limits."""
    shares = Shares(options.max_turns, options.max_turns_per_token, settings.tokens)
    return Turns(options.max_turns, shares, settings.registry)


def add_version(settings: Settings, version: Callable[[], int]) -> None:
    """Add the metric of the served version."""
    name, text = "ludus_model_policy_version", "Version of the weights"
    Gauge(name, text, registry=settings.registry).set_function(version)


class OpenAIRoutes(Protocol):
    """Routes of a model, or of the two models of a roll-out."""

    async def models(self) -> dict[str, Any]: ...
    async def model(self, model: str) -> dict[str, Any]: ...
    async def chat(self, request: Request, body: ChatRequest) -> Response: ...
    async def complete(self, request: Request, body: CompletionRequest) -> Response: ...
    async def swap(self, request: Request, body: SwapRequest) -> dict[str, Any]: ...


def add_routes(app: FastAPI, service: OpenAIRoutes) -> None:
    """Add the routes of OpenAI's API, and that of swaps."""
    common: dict[str, Any] = {"responses": ERRORS, "tags": ["openai"]}
    app.add_api_route("/v1/models", service.models, methods=["GET"], **common)
    app.add_api_route("/v1/models/{model:path}", service.model, methods=["GET"], **common)
    post = {**common, "methods": ["POST"], "response_model": None}
    app.add_api_route("/v1/chat/completions", service.chat, **post)
    app.add_api_route("/v1/completions", service.complete, **post)
    app.add_api_route(
        "/admin/weights", service.swap, methods=["POST"], responses=ERRORS, tags=["service"]
    )


class ModelService:
    """The routes and their shared state."""

    def __init__(
        self, policy: Policy, engine: EngineThread, turns: Turns, options: ModelOptions
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
            if policy.settings.chat_template is not None:
                raise
            self._plain, self._no_chat = None, error  # a base model: completions only
        self._turns = turns
        self._generator = Generator(engine, turns)

    def health(self) -> dict[str, Any]:
        name, version = self._options.name, self._engine.policy_version
        return {"model": name, "policy_version": version, "turns": self._turns.num_open}

    async def models(self) -> dict[str, Any]:
        """The list of models: the served model."""
        return {"object": "list", "data": [self._model()]}

    async def model(self, model: str) -> dict[str, Any]:
        """The served model."""
        self._require(model)
        return self._model()

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """Generate the assistant's next turn of a conversation."""
        return await self.respond_chat(request, body, new_id("chatcmpl"))

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        """Continue a text, or token ids."""
        return await self.respond_completion(request, body, new_id("cmpl"))

    async def respond_chat(self, request: Request, body: ChatRequest, id: str) -> Response:
        """`chat`, with the id of the answer."""
        self._check(body)
        tools = body.offered()
        renderer = await self._renderer(tools)
        try:
            prompt = await self._in_reader(renderer.open, body.conversation())
        except (ConfigError, RecursionError) as error:
            raise ApiError(400, f"messages: {error}", param="messages") from None
        grammar = None
        if (schema := schema_of("response_format", body.response_format)) is not None:
            grammar = await self._grammar(body, schema, renderer)
        limit = body.limit or self._policy.settings.context_length - len(prompt)
        stop_ids = renderer.stop_token_ids
        choices = [
            self._choice(prompt, body.params(limit, stop_ids, seed, grammar), "messages")
            for seed in body.seeds(body.choices)
        ]
        builder = ChatResponse(self._options.name, body, renderer, bool(tools), id)
        return await self._generator.respond(request, body, choices, builder)

    async def respond_completion(
        self, request: Request, body: CompletionRequest, id: str
    ) -> Response:
        """`complete`, with the id of the answer."""
        self._check(body)
        prompts = await self._in_reader(lambda: [self._ids(prompt) for prompt in body.prompts])
        limit = 16 if body.max_tokens is None else body.max_tokens
        if self._plain is not None:
            stop_ids = self._plain.stop_token_ids
        else:
            eos = self._policy.tokenizer.eos_token_id
            stop_ids = [] if eos is None else [eos]
        seeds = body.seeds(len(prompts) * body.choices)
        choices = []
        for number, seed in enumerate(seeds):
            prompt = prompts[number // body.choices]
            # max_tokens 0 samples nothing; the prompt is checked as for 1 token.
            choice = self._choice(prompt, body.params(max(1, limit), stop_ids, seed), "prompt")
            choices.append(choice if limit else ChoiceRequest(prompt, None))
        tokenizer = self._policy.tokenizer
        builder = CompletionResponse(self._options.name, body, tokenizer, stop_ids, id)
        return await self._generator.respond(request, body, choices, builder)

    async def swap(self, request: Request, body: SwapRequest) -> dict[str, Any]:
        """Serve another checkpoint of the same model. Needs the token in LUDUS_ADMIN_TOKEN."""
        self._require_admin(request)
        if self._swapping.locked():
            raise ApiError(409, "another checkpoint is being loaded", code="busy")
        async with self._swapping:
            current = self._engine.policy_version
            version = current + 1 if body.policy_version is None else body.policy_version
            if version <= current:
                message = f"policy_version: must be greater than the current version, {current}"
                raise ApiError(409, message, param="policy_version", code="stale")
            try:
                origin, weights = await asyncio.to_thread(self._load, body.checkpoint)
            except Exception as error:  # loading may fail in any library
                reason = str(error) if isinstance(error, LudusError) else f"unreadable: {error}"
                message = " ".join(reason.split())[:400]
                raise ApiError(400, message, param="checkpoint", code="unusable") from None
            try:
                await self._engine.swap(weights, version)
            except LudusError as error:
                raise server_error(error) from error
            self._origin = origin
        log.info("weights swapped", checkpoint=origin, policy_version=version)
        return {"checkpoint": origin, "policy_version": version}

    # Checks

    async def _grammar(self, body: ChatRequest, schema: dict[str, Any], renderer: Renderer) -> str:
        """The grammar of an answer with a schema. Errors: ApiError 400."""
        param = "response_format"
        if body.ignore_eos:
            told = f"{param}: not with ignore_eos: a value that is complete ends the turn"
            raise ApiError(400, told, param=param, code=UNSUPPORTED)
        try:
            return await grammar_for(schema, renderer, self._engine.sampler)
        except (SchemaError, MissingDependency) as error:
            raise ApiError(400, f"{param}: {error}", param=param) from None

    def _check(self, body: CommonRequest) -> None:
        self._require(body.model)
        body.check()
        if self._engine.streams:
            return
        for param in ("logprobs", "top_logprobs", "echo"):
            used = getattr(body, param, None)
            if used and (param != "logprobs" or isinstance(body, CompletionRequest)):
                message = f"{param}: this service's sampler returns sampled tokens only"
                raise ApiError(400, message, param=param, code=UNSUPPORTED)

    def _require(self, model: str) -> None:
        if model != self._options.name:
            message = f"unknown model {model[:200]!r}; {self._options.name!r} is served"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _require_admin(self, request: Request) -> None:
        if not self._options.admin_token:
            message = "weights cannot be swapped: the service has no LUDUS_ADMIN_TOKEN"
            raise ApiError(403, message, kind="permission_error")
        header = request.headers.get("authorization", "").encode("latin-1")
        if match_token(header, [self._options.admin_token]) is None:
            raise ApiError(403, "the administrator's token is needed", kind="permission_error")

    def _choice(self, prompt: list[int], params: SamplingParams, param: str) -> ChoiceRequest:
        try:
            length = self._policy.settings.context_length
            if len(prompt) >= length:
                raise ContextOverflow(f"{len(prompt)} tokens of prompt leave no room in {length}")
            check_turn(prompt, params, length, num_embeddings(self._policy.model))
            if isinstance(self._engine.sampler, Selective):
                self._engine.sampler.check_params(params)
        except ContextOverflow as error:
            raise ApiError(400, str(error), param=param, code="context_length_exceeded") from None
        except ValueError as error:
            raise ApiError(400, f"{param}: {error}", param=param) from None
        except ConfigError as error:
            raise ApiError(400, str(error), code=UNSUPPORTED) from None
        return ChoiceRequest(prompt, params)

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            ids: list[int] = self._policy.tokenizer(well_formed(prompt))["input_ids"]
            return ids
        return prompt

    async def _in_reader(self, work: Callable[..., T], *args: Any) -> T:
        """Run in the reader thread: a long text would delay all streams."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, work, *args)

    async def _renderer(self, tools: tuple[ToolSpec, ...]) -> Renderer:
        if self._plain is None:
            raise ApiError(400, f"this model cannot chat: {self._no_chat}", code=UNSUPPORTED)
        if not tools:
            return self._plain
        key = "\n".join(tool.model_dump_json() for tool in tools)
        if key not in self._renderers:
            try:
                self._renderers[key] = await self._in_reader(_with_tools, self._policy, tools)
            except (ConfigError, RecursionError) as error:
                raise ApiError(400, f"tools: {error}", param="tools") from None
            while len(self._renderers) > MAX_RENDERERS:
                self._renderers.popitem(last=False)
        self._renderers.move_to_end(key)
        return self._renderers[key]

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._options.name,
            "object": "model",
            "created": self._created,
            "owned_by": "ludus",
            "max_model_len": self._policy.settings.context_length,
            "checkpoint": self._origin,
            "policy_version": self._engine.policy_version,
        }

    def _load(self, checkpoint: str) -> tuple[str, Any]:
        # On the CPU: the device may have no room for a second model.
        offered = load_policy(checkpoint, self._options.runs_dir, ModelOverrides(device="cpu"))
        return offered.origin, fitting_weights(self._policy, offered)


def _with_tools(policy: Policy, tools: tuple[ToolSpec, ...]) -> Renderer:
    for tool in tools:
        if reference := external_reference(tool.parameters):
            raise ConfigError(
                f"{tool.name}: external reference {reference!r}; references must begin with #"
            )
    return policy.renderer(tools)
