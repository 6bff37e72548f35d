"""Runs generation requests; cancels them on disconnect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.types import Receive, Scope, Send

from ludus.core.errors import LudusError, SamplerError, TrainingError
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.services.model.engine import EngineThread, PromptScores, Token, tokens_of
from ludus.services.model.requests import ApiError, CommonRequest
from ludus.services.model.responses import Choice, ResponseBuilder, event
from ludus.services.server.disconnect import Disconnected, unless_disconnected, wait_for_disconnect
from ludus.services.server.shares import Shares, client_of
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")

MAX_UNSENT = 2048
"""Tokens of a stream that may wait for a client which has not read for SLOW_S seconds; beyond that,
its turns are cancelled."""

SLOW_S = 2.0

End = Literal["ok", "failed", "gone"]
"""The end of a request; `gone`: the client disconnected, or read too slowly."""

OnEnd = Callable[[End, float], object]
"""Gets the end of a stream and the time.monotonic() of it: when the last token was there."""


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """One choice to generate. `params` is None if the prompt is only echoed."""

    prompt_ids: list[int]
    params: SamplingParams | None


class StreamQueue:
    """Items of a stream: (choice, Token, Completion or error).

    `full` is called once, if more than MAX_UNSENT items wait while one is being sent for long.
    """

    def __init__(self, full: Callable[[], object]) -> None:
        self._items: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._full = full
        self.sending_since: float | None = None
        self.overflowed = False
        self.end: End = "gone"
        self.ended_at = 0.0

    def put(self, index: int, item: Any) -> None:
        if self.overflowed:
            return
        since = self.sending_since
        slow = since is not None and time.monotonic() - since > SLOW_S
        if slow and self._items.qsize() >= MAX_UNSENT:
            self.overflowed = True
            self._items = asyncio.Queue()
            self._full()
            error = ApiError(408, "the client reads too slowly", kind="timeout", code="slow_client")
            index, item = -1, error
        if isinstance(item, Completion | ApiError):
            self.ended_at = time.monotonic()
        self._items.put_nowait((index, item))

    async def take(self) -> list[tuple[int, Any]]:
        """All waiting items, at least one."""
        items = [await self._items.get()]
        while not self._items.empty():
            items.append(self._items.get_nowait())
        return items


class TurnStream(StreamingResponse):
    """A stream that cancels its turns when it ends, and where it cannot start.

    `on_end` may be set before the stream starts; it is called once. So may `deadline`, the
    time.monotonic() at which the stream ends with an error if a turn is not over, and the error.
    """

    def __init__(
        self, events: AsyncIterator[str], turns: Sequence[asyncio.Task[None]], queue: StreamQueue
    ) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._turns, self._queue = turns, queue
        self.on_end: OnEnd = lambda end, at: None
        self.deadline: tuple[float, ApiError] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        late = None
        if self.deadline is not None:
            at, error = self.deadline
            late = asyncio.get_running_loop().call_later(at - time.monotonic(), self._end, error)
        try:
            await super().__call__(scope, receive, send)
        finally:
            if late is not None:
                late.cancel()
            for turn in self._turns:
                turn.cancel()
            self.on_end(self._queue.end, self._queue.ended_at)

    def _end(self, error: ApiError) -> None:
        if not all(turn.done() for turn in self._turns):  # else only the client is slow
            self._queue.put(-1, server_error(error))


class Turns:
    """Turns under way, at most `max_turns`, and their metrics; of one engine or several."""

    def __init__(self, max_turns: int, shares: Shares, registry: CollectorRegistry) -> None:
        self._max_turns, self._shares = max_turns, shares
        self.num_open = 0
        self.tokens = Counter("ludus_model_tokens", "Tokens", ["kind"], registry=registry)
        self.ends = Counter("ludus_model_turns", "Turns by end", ["end"], registry=registry)
        gauge = Gauge("ludus_model_turns_open", "Turns being sampled", registry=registry)
        gauge.set_function(lambda: self.num_open)

    def require(self, tenant: str, number: int) -> None:
        """Errors: ApiError 429 if the tenant cannot have so many more."""
        if self.num_open + number > self._max_turns:
            message = f"more than {self._max_turns} turns at a time"
        elif not self._shares.allows(tenant, number):
            message = f"more than {self._shares.limit} turns at a time, your share"
        else:
            return
        raise ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded")

    def add(self, tenant: str, number: int) -> None:
        """Count more turns; fewer, if negative."""
        self.num_open += number
        self._shares.add(tenant, number)


class Generator:
    """Generates the choices of requests."""

    def __init__(self, engine: EngineThread, turns: Turns) -> None:
        self._engine, self.turns = engine, turns

    async def respond(
        self,
        request: Request,
        body: CommonRequest,
        choices: Sequence[ChoiceRequest],
        builder: ResponseBuilder,
    ) -> Response:
        """Generate all choices and respond, as a stream if the request asks for one."""
        tenant = client_of(request.scope).tenant
        self.turns.require(tenant, len(choices))
        # No await from the check to the start: another request would pass the check too.
        if body.stream:
            queue = StreamQueue(lambda: [turn.cancel() for turn in turns])
            turns = [
                self._start(tenant, self._feed(queue, index, choice, builder))
                for index, choice in enumerate(choices)
            ]
            return TurnStream(self._events(request, choices, builder, queue), turns, queue)
        work = [self._start(tenant, self._generate(choice, builder)) for choice in choices]
        try:
            results = await unless_disconnected(request, asyncio.gather(*work))
        except Disconnected:
            return Response(status_code=499)
        except LudusError as error:
            raise server_error(error) from error
        finally:
            for task in work:
                task.cancel()
        return JSONResponse(builder.body(results))

    def _start(self, tenant: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a choice; it counts from now until its task ends, even if that never runs."""
        self.turns.add(tenant, 1)
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self.turns.add(tenant, -1))
        return task

    async def _generate(self, choice: ChoiceRequest, builder: ResponseBuilder) -> Choice:
        """Generate a choice, with alternatives and prompt scores as requested."""
        tokens: list[Token] = []
        scores: PromptScores | None = None
        number = builder.num_alternatives
        if builder.scores_prompt:
            scores = await self._engine.score(choice.prompt_ids, number)
        if choice.params is None:
            version = self._engine.policy_version
            return Choice(choice.prompt_ids, Completion([], [], "length", version), [], scores)
        completion = await self._counted(
            choice,
            self._engine.sample(
                choice.prompt_ids, choice.params, tokens.append if number else None, number
            ),
        )
        if not number:
            tokens = tokens_of(completion)
        return Choice(choice.prompt_ids, completion, tokens, scores)

    async def _feed(
        self, queue: StreamQueue, index: int, choice: ChoiceRequest, builder: ResponseBuilder
    ) -> None:
        """Put the tokens of a choice into the queue, then its Completion or error."""
        loop = asyncio.get_running_loop()

        def on_token(token: Token) -> None:
            loop.call_soon_threadsafe(queue.put, index, token)

        assert choice.params is not None
        try:
            result: Any = await self._counted(
                choice,
                self._engine.sample(
                    choice.prompt_ids, choice.params, on_token, builder.num_alternatives
                ),
            )
        except Exception as error:  # reported in the stream
            result = server_error(error)
        queue.put(index, result)

    async def _events(
        self,
        request: Request,
        choices: Sequence[ChoiceRequest],
        builder: ResponseBuilder,
        queue: StreamQueue,
    ) -> AsyncIterator[str]:
        """Server-sent events, up to the first error or the client's disconnect."""

        async def watch_connection() -> None:
            await wait_for_disconnect(request)
            queue.put(-1, Disconnected())

        watching = asyncio.create_task(watch_connection())
        try:
            version = self._engine.policy_version
            yield builder.first_events([choice.prompt_ids for choice in choices], version)
            num_running = len(choices)
            while num_running:
                lines: list[str] = []
                for index, item in await queue.take():
                    if isinstance(item, Disconnected):
                        return
                    if isinstance(item, ApiError):
                        queue.end = "failed" if item.status >= 500 else "gone"
                        yield "".join(lines) + event(item.body)
                        return
                    num_running -= isinstance(item, Completion)
                    lines.append(builder.event_of(index, item))
                queue.sending_since = time.monotonic()
                yield "".join(lines)
                queue.sending_since = None
            queue.end = "ok"
            yield builder.last_events()
        finally:
            watching.cancel()

    async def _counted(self, choice: ChoiceRequest, sampling: Awaitable[Completion]) -> Completion:
        end = "gone"
        try:
            completion = await sampling
            end = completion.finish_reason
        except Exception:
            end = "failed"
            raise
        finally:
            self.turns.ends.labels(end).inc()
        self.turns.tokens.labels("prompt").inc(len(choice.prompt_ids))
        self.turns.tokens.labels("sampled").inc(len(completion.token_ids))
        return completion


def server_error(error: Exception) -> ApiError:
    """The response to a failure behind the service. Details go to the log only."""
    log.error("generation failed", error=f"{type(error).__name__}: {error}")
    if isinstance(error, ApiError):
        return error
    message = "generation failed; see the service's log"
    if isinstance(error, TrainingError):
        message = str(error)
    status = 503 if isinstance(error, SamplerError) else 500
    return ApiError(status, message, kind="server_error")
