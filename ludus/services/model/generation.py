"""The turns of requests under way: sampled, streamed, given up when the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge

from ludus.core.errors import LudusError, SamplerError, TrainingError
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.services.model.engine import EngineThread, Scored, Token
from ludus.services.model.requests import ApiError, Common
from ludus.services.model.responses import Answer, Done, event
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn:
    """One choice to sample; None: nothing is sampled, the prompt is echoed."""

    prompt_ids: list[int]
    params: SamplingParams | None


class Gone(Exception):
    """The client has closed its connection."""


class Turns:
    """Samples the turns of requests, at most `max_turns` at a time."""

    def __init__(self, engine: EngineThread, max_turns: int, registry: CollectorRegistry) -> None:
        self._engine, self._max_turns = engine, max_turns
        self.num_open = 0
        self._tokens = Counter("ludus_model_tokens", "Tokens", ["kind"], registry=registry)
        self._ends = Counter("ludus_model_turns", "Turns by end", ["end"], registry=registry)
        for name, text, value in (
            ("turns_open", "Turns that are sampled now", lambda: self.num_open),
            ("policy_version", "Version of the weights", lambda: engine.policy_version),
        ):
            Gauge(f"ludus_model_{name}", text, registry=registry).set_function(value)

    async def answer(
        self, request: Request, body: Common, turns: list[Turn], answer: Answer
    ) -> Response:
        if self.num_open + len(turns) > self._max_turns:
            message = f"more than {self._max_turns} turns at a time"
            raise ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded")
        if body.stream:
            events = self._stream(request, turns, answer)
            return StreamingResponse(events, media_type="text/event-stream")
        work = [self._sample(turn, answer) for turn in turns]
        try:
            done = await _unless_gone(request, _together(work))
        except Gone:
            return Response(status_code=499)
        except LudusError as error:
            raise api_error(error) from error
        return JSONResponse(answer.whole(done))

    async def _sample(self, turn: Turn, answer: Answer) -> Done:
        """A turn, and what else was asked for: alternatives, the prompt's own log-probabilities."""
        tokens: list[Token] = []
        scored: Scored | None = None
        number = answer.num_alternatives
        if answer.scores_prompt:
            scored = await self._engine.score(turn.prompt_ids, number)
        if turn.params is None:
            version = self._engine.policy_version
            return Done(turn.prompt_ids, Completion([], [], "length", version), [], scored)
        told = tokens.append if number else None
        done = await self._counted(self._engine.sample(turn.prompt_ids, turn.params, told, number))
        self._count(turn, done)
        if not number:
            pairs = zip(done.token_ids, done.logprobs, strict=True)
            tokens = [Token(id, logprob, done.policy_version, []) for id, logprob in pairs]
        return Done(turn.prompt_ids, done, tokens, scored)

    async def _stream(
        self, request: Request, turns: list[Turn], answer: Answer
    ) -> AsyncIterator[str]:
        """Server-sent events. Whatever ends it, no turn is left behind."""
        arrived: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        async def play(index: int, turn: Turn) -> None:
            def told(token: Token) -> None:
                loop.call_soon_threadsafe(arrived.put_nowait, (index, token))

            assert turn.params is not None
            try:
                sampling = self._engine.sample(
                    turn.prompt_ids, turn.params, told, answer.num_alternatives
                )
                done: Any = await self._counted(sampling)
                self._count(turn, done)
            except Exception as error:  # the client waits: it is told of any end
                done = api_error(error)
            arrived.put_nowait((index, done))

        async def watch() -> None:
            await _disconnected(request)
            arrived.put_nowait((-1, Gone()))

        tasks = [asyncio.create_task(play(i, turn)) for i, turn in enumerate(turns)]
        tasks.append(asyncio.create_task(watch()))
        try:
            version = self._engine.policy_version
            yield answer.opening([turn.prompt_ids for turn in turns], version)
            left = len(turns)
            while left:
                news = [await arrived.get()]
                while not arrived.empty():
                    news.append(arrived.get_nowait())
                lines: list[str] = []
                for index, what in news:
                    if isinstance(what, Gone):
                        return
                    if isinstance(what, ApiError):
                        yield "".join(lines) + event(what.body)
                        return
                    left -= isinstance(what, Completion)
                    lines.append(answer.part(index, what))
                yield "".join(lines)
            yield answer.closing()
        finally:
            for task in tasks:
                task.cancel()

    async def _counted(self, sampling: Awaitable[Completion]) -> Completion:
        self.num_open += 1
        end = "gone"
        try:
            done = await sampling
            end = done.finish_reason
            return done
        except Exception:
            end = "failed"
            raise
        finally:
            self.num_open -= 1
            self._ends.labels(end).inc()

    def _count(self, turn: Turn, done: Completion) -> None:
        self._tokens.labels("prompt").inc(len(turn.prompt_ids))
        self._tokens.labels("sampled").inc(len(done.token_ids))


async def _together(work: list[Any]) -> list[Any]:
    """All results, or the first error, with the others ended."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result. Errors: Gone where the client left before; the work is then ended."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await working


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def api_error(error: Exception) -> ApiError:
    """What went wrong behind the service, which the client cannot mend.

    A server's last words, and the paths in them, are for the log alone.
    """
    log.error("a turn failed", error=f"{type(error).__name__}: {error}")
    message = "what samples broke down; the service's log says how"
    if isinstance(error, TrainingError):
        message = str(error)
    status = 503 if isinstance(error, SamplerError) else 500
    return ApiError(status, message, kind="server_error")
