"""Model service with a challenger: splits the traffic, takes scores, follows the controller.

    POST /v1/chat/completions   POST /v1/completions      as without a challenger
    POST /feedback {"id": "chatcmpl-challenger-...", "score": 0.8}
    GET /rollout

The variant that answered is in the answer's id and in the header `x-ludus-variant`. A session stays
with its variant until the share grows past it: its key (the header `x-session-id`, or the field
`safety_identifier` or `user`) is hashed to a number from 0 to 1, and those below the share have the
challenger. A request without a key is a session of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable
from functools import partial
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ludus.core.errors import ConfigError
from ludus.services.model.engine import EngineThread
from ludus.services.model.generation import End, TurnStream, server_error
from ludus.services.model.policy import Policy
from ludus.services.model.requests import (
    ApiError,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    SwapRequest,
)
from ludus.services.model.responses import new_id
from ludus.services.model.rollout.controller import Controller, Receipt
from ludus.services.model.rollout.events import Decision, Ended, Scored, Variant
from ludus.services.model.rollout.log import LogLost, RolloutLog
from ludus.services.model.rollout.metrics import RolloutMetrics
from ludus.services.model.service import (
    ModelOptions,
    ModelService,
    add_routes,
    add_version,
    turns_of,
)
from ludus.services.server.app import ERRORS, Settings, create_app, owner_of

KEY_HEADER = "x-session-id"
VARIANT_HEADER = "x-ludus-variant"

REFUSED: dict[Receipt, tuple[int, str]] = {
    "unknown": (404, "no answer with this id can be scored: unknown, failed, or too old"),
    "conflict": (409, "this answer has another score already; the first one counts"),
    "late": (410, "this answer is too old to be scored"),
}
"""Status and message of scores that are refused. Others are answered with their receipt."""


class Feedback(BaseModel):
    """`POST /feedback`: the score of an answer, from 0 (worst) to 1."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(min_length=1, max_length=200)
    score: float = Field(ge=0, le=1, allow_inf_nan=False, strict=True)


Loaded = tuple[Policy, EngineThread]
"""A variant: its policy, and the engine that samples from it."""


def rollout_service(
    champion: Loaded,
    challenger: Loaded,
    settings: Settings,
    options: ModelOptions,
    rollout: RolloutLog,
) -> FastAPI:
    """The application; the caller closes the engines and the log."""
    service = RolloutService(champion, challenger, settings, options, rollout)
    marked = Middleware(VariantHeader)
    app = create_app("model", settings, health=service.health, errors=ApiError, middleware=[marked])
    add_routes(app, service)
    common: dict[str, Any] = {"responses": ERRORS, "tags": ["rollout"]}
    app.add_api_route("/feedback", service.feedback, methods=["POST"], **common)
    app.add_api_route("/rollout", service.rollout, methods=["GET"], **common)
    return app


class RolloutService:
    """The routes over two model services."""

    def __init__(
        self,
        champion: Loaded,
        challenger: Loaded,
        settings: Settings,
        options: ModelOptions,
        rollout: RolloutLog,
    ) -> None:
        self._rollout = rollout
        turns = turns_of(settings, options)
        loaded = {Variant.CHAMPION: champion, Variant.CHALLENGER: challenger}
        self._engines = {variant: engine for variant, (_, engine) in loaded.items()}
        self._services = {
            variant: ModelService(policy, engine, turns, options)
            for variant, (policy, engine) in loaded.items()
        }
        self._open: set[str] = set()
        self._answer_s = rollout.header.settings.answer_s
        self._metrics = RolloutMetrics(settings.registry, lambda: self._share, self._controller)
        for decision in rollout.decisions:
            self._metrics.decisions.labels(decision.action).inc()
        add_version(settings, lambda: self._engines[self._main].policy_version)

    @property
    def _controller(self) -> Controller:
        return self._rollout.controller

    @property
    def _share(self) -> float:
        """The challenger's share: none while the log of an unfinished roll-out is lost."""
        lost = self._rollout.lost and not self._controller.ended
        return 0.0 if lost else self._controller.share

    @property
    def _main(self) -> Variant:
        promoted = self._controller.phase == "promoted"
        return Variant.CHALLENGER if promoted else Variant.CHAMPION

    def health(self) -> dict[str, Any]:
        told = {"phase": self._controller.phase, "share": self._share}
        return {**self._services[self._main].health(), "rollout": told}

    # Routes

    async def models(self) -> dict[str, Any]:
        """The list of models: the champion, or the promoted challenger."""
        return await self._services[self._main].models()

    async def model(self, model: str) -> dict[str, Any]:
        """The champion, or the promoted challenger."""
        return await self._services[self._main].model(model)

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """Generate the assistant's next turn of a conversation."""
        variant, unit = self._split(request, body)
        id = new_id(f"chatcmpl-{variant}")
        work = self._services[variant].respond_chat(request, body, id)
        return await self._watched(work, variant, unit, id)

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        """Continue a text, or token ids."""
        variant, unit = self._split(request, body)
        id = new_id(f"cmpl-{variant}")
        work = self._services[variant].respond_completion(request, body, id)
        return await self._watched(work, variant, unit, id)

    async def swap(self, request: Request, body: SwapRequest) -> dict[str, Any]:
        """Refused: the models of a roll-out stay as they are."""
        message = "weights cannot be swapped in a service with a challenger"
        raise ApiError(409, message, code="rollout")

    async def feedback(self, body: Feedback) -> dict[str, str]:
        """Score an answer. The first score counts; the same one again is no error."""
        if body.id in self._open:
            raise self._refused("unfinished", 409, "this answer is still being generated")
        event = Scored(t=self._rollout.now(), id=body.id, score=body.score)
        receipt: Receipt = self._controller.receipt(event)
        if receipt in REFUSED:
            raise self._refused(receipt, *REFUSED[receipt])
        if receipt in ("counted", "same_session"):
            try:
                self._note(self._rollout.apply(event))
            except LogLost:
                message = "the log of the roll-out cannot be written; no score counts"
                raise self._refused("log_lost", 503, message) from None
            self._metrics.scores.labels(self._controller.variant_of(body.id)).observe(body.score)
        self._metrics.feedback.labels(receipt).inc()
        return {"status": receipt}

    async def rollout(self) -> dict[str, Any]:
        """State, evidence and decisions of the roll-out."""
        header, controller = self._rollout.header, self._controller
        # In a thread: with ten thousand scores it takes tens of milliseconds.
        interval = await asyncio.to_thread(controller.interval)
        return {
            "champion": header.champion,
            "challenger": header.challenger,
            **controller.state(),
            "share": self._share,
            "interval": interval,
            "log_error": self._rollout.lost or None,
            "settings": header.settings.model_dump(),
            "decisions": [d.model_dump(exclude={"kind"}) for d in self._rollout.decisions],
        }

    # Requests

    def _split(self, request: Request, body: CommonRequest) -> tuple[Variant, str]:
        """The variant of a request, and its unit."""
        key = request.headers.get(KEY_HEADER) or body.safety_identifier or body.user
        # One client cannot have another one's session.
        parts = (owner_of(request.scope), key) if key else (secrets.token_hex(16),)
        unit, number = hashed(self._rollout.header.salt, *parts)
        variant = Variant.CHALLENGER if number < self._share else Variant.CHAMPION
        request.scope.setdefault("state", {})["variant"] = variant.value
        return variant, unit

    async def _watched(
        self, work: Awaitable[Response], variant: Variant, unit: str, id: str
    ) -> Response:
        """The response; how it ends becomes an event. A refusal (4xx) does not.

        An answer that is not whole in time is a failure: a model that hangs raises no error.
        """
        started = time.monotonic()
        limit = asyncio.timeout(self._answer_s)
        ended = partial(self._ended, variant, unit, id, started)
        self._open.add(id)
        streams = False
        try:
            async with limit:
                response = await work
            if isinstance(response, TurnStream):
                response.on_end, streams = ended, True
                response.deadline = started + self._answer_s, self._late()
            else:
                ended("ok" if response.status_code < 400 else "gone", time.monotonic())
            return response
        except ApiError as error:
            if error.status >= 500:
                ended("failed", time.monotonic())
            raise
        except Exception as error:  # a model may fail in any library
            ended("failed", time.monotonic())
            raise server_error(self._late() if limit.expired() else error) from error
        finally:
            if not streams:
                self._open.discard(id)

    def _ended(
        self, variant: Variant, unit: str, id: str, started: float, end: End, at: float
    ) -> None:
        self._open.discard(id)
        seconds = max(0.0, (at or time.monotonic()) - started)
        self._metrics.requests.labels(variant.value, end).inc()
        if end == "ok":
            self._metrics.seconds.labels(variant.value).observe(seconds)
        if self._controller.ended or self._rollout.lost:
            return
        event = Ended(
            t=self._rollout.now(), id=id, variant=variant, unit=unit, end=end, seconds=seconds
        )
        try:
            self._note(self._rollout.apply(event))
        except LogLost:
            return  # said in the service's log, and by GET /rollout

    def _late(self) -> ApiError:
        told = f"the model gave no whole answer in {self._answer_s:g} s"
        return ApiError(504, told, kind="timeout", code="answer_time")

    def _note(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            self._metrics.decisions.labels(decision.action).inc()

    def _refused(
        self, receipt: Receipt | Literal["unfinished", "log_lost"], status: int, message: str
    ) -> ApiError:
        self._metrics.feedback.labels(receipt).inc()
        return ApiError(status, message, param="id", code=receipt)


def require_alike(champion: Policy, challenger: Policy) -> None:
    """Errors: ConfigError if one variant would refuse requests that the other one takes."""
    lengths = [policy.settings.context_length for policy in (champion, challenger)]
    if lengths[0] != lengths[1]:
        raise ConfigError(
            f"--challenger: its context length is {lengths[1]}, the champion's {lengths[0]}: "
            f"give --context-length {min(lengths)}"
        )
    mute = [policy.origin for policy in (champion, challenger) if not _can_chat(policy)]
    if len(mute) == 1:
        raise ConfigError(
            f"--challenger: {mute[0]} has no chat template, the other model has one: "
            "give --chat-template"
        )


def _can_chat(policy: Policy) -> bool:
    try:
        policy.renderer()
    except ConfigError:
        return False
    return True


def hashed(salt: str, *parts: str) -> tuple[str, float]:
    """A key's hash, and the number in [0, 1) that decides which variant it has."""
    digest = hashlib.sha256("\0".join((salt, *parts)).encode("utf-8", "surrogatepass")).digest()
    return digest[:12].hex(), int.from_bytes(digest[-6:], "big") / 2**48


class VariantHeader:
    """Adds the header with the variant to responses, errors included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_marked(message: Message) -> None:
            variant = scope.get("state", {}).get("variant")
            if message["type"] == "http.response.start" and variant:
                headers = MutableHeaders(scope=message)
                headers.append(VARIANT_HEADER, variant)
            await send(message)

        await self._app(scope, receive, send_marked)
