"""Limits of concurrent turns, with requests that arrive at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import ClientDisconnect, Request

from ludus.models.samplers.base import Completion, SamplingParams
from ludus.services.model.engine import PromptScores
from ludus.services.model.generation import ChoiceRequest, Generator, Turns
from ludus.services.model.requests import ApiError, CompletionRequest
from ludus.services.server.shares import Shares

CHOICE = ChoiceRequest([1, 2], SamplingParams(4))


class Engine:
    """An engine whose turns and scores wait for `go`."""

    policy_version = 0

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.most = self.running = 0

    async def sample(self, *_: Any) -> Completion:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.go.wait()
        finally:
            self.running -= 1
        return Completion([3], [-0.5], "length", 0)

    async def score(self, token_ids: list[int], *_: Any) -> PromptScores:
        await self.go.wait()
        return PromptScores([None, -1.0], [[], []])


class Builder:
    """Responses without content."""

    def __init__(self, scores_prompt: bool = False) -> None:
        self.scores_prompt, self.num_alternatives = scores_prompt, 0

    def body(self, results: list[Any]) -> dict[str, Any]:
        return {"choices": len(results)}

    def first_events(self, *_: Any) -> str:
        return "data: {}\n\n"

    event_of = last_events = first_events


async def never() -> Any:
    await asyncio.Event().wait()


def asked(address: str, stream: bool = False) -> tuple[Request, Any]:
    scope = {"type": "http", "client": (address, 1), "state": {}}
    body = CompletionRequest(model="tiny", prompt="go", stream=stream)
    return Request(scope, receive=never), body


def generator(engine: Engine, max_turns: int, per_tenant: int = 0) -> Generator:
    shares = Shares(max_turns, per_tenant, ())
    return Generator(engine, Turns(max_turns, shares, CollectorRegistry()))  # type: ignore[arg-type]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("scores_prompt", [False, True], ids=["turns", "scores first"])
@pytest.mark.parametrize("per_tenant", [0, 3], ids=["all turns", "a share"])
async def test_requests_at_once_pass_no_limit(scores_prompt: bool, per_tenant: int) -> None:
    engine = Engine()
    made = generator(engine, 3 if not per_tenant else 100, per_tenant)
    builder: Any = Builder(scores_prompt)
    requests = [
        asyncio.create_task(made.respond(*asked("here"), [CHOICE] * 2, builder)) for _ in range(3)
    ]
    await settle()
    engine.go.set()
    results = await asyncio.gather(*requests, return_exceptions=True)
    refused = [r for r in results if isinstance(r, ApiError)]
    assert [error.status for error in refused] == [429, 429]
    assert engine.most <= 2
    assert made.turns.num_open == 0
    await made.respond(*asked("here"), [CHOICE] * 3, builder)  # all were given back


async def test_a_stream_counts_before_its_first_event() -> None:
    made = generator(Engine(), 3)
    builder: Any = Builder()
    await made.respond(*asked("here", stream=True), [CHOICE] * 2, builder)
    with pytest.raises(ApiError, match="more than 3 turns"):
        await made.respond(*asked("there", stream=True), [CHOICE] * 2, builder)


async def test_a_stream_that_cannot_start_gives_its_turns_back() -> None:
    engine = Engine()
    made = generator(engine, 2)
    builder: Any = Builder()

    async def send(message: Any) -> None:
        raise ClientDisconnect

    for _ in range(3):
        request, body = asked("here", stream=True)
        response = await made.respond(request, body, [CHOICE] * 2, builder)
        with pytest.raises(ClientDisconnect):
            await response(request.scope, never, send)
        await settle()
        assert (engine.running, made.turns.num_open) == (0, 0)


async def test_a_cancelled_request_gives_its_turns_back() -> None:
    engine = Engine()
    made = generator(engine, 2)
    builder: Any = Builder(scores_prompt=True)
    for pause in (0, 1, 10):
        request = asyncio.create_task(made.respond(*asked("here"), [CHOICE] * 2, builder))
        for _ in range(pause):
            await asyncio.sleep(0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await settle()
        assert made.turns.num_open == 0
