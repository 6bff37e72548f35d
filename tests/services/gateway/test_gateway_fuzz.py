"""Valid and invalid requests, generated from the gateway's OpenAPI description."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fuzzing import fuzz
from gateway_world import ASKED
from rollout_world import Scripted, World

from ludus.config.schema import RolloutConfig
from ludus.core.types import Trajectory
from ludus.rollout.sessions.agent_session import AgentSession
from ludus.rollout.sessions.call_options import AgentRenderers
from ludus.services.gateway.api import gateway_app
from ludus.services.gateway.sessions import Sessions

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASKED},
    "/v1/completions": {"prompt": "red ?", "max_tokens": 2},
    "/v1/responses": {"input": "red ?"},
    "/v1/messages": {"messages": ASKED, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": ASKED},
}


@pytest.fixture
def live(world: World) -> Iterator[tuple[Any, str]]:
    """The description, and the key of an episode that goes on."""
    session = AgentSession(
        Trajectory("e", "g", "t"),
        Scripted(world.renderer(), "blue"),
        AgentRenderers(world.renderer()),
        RolloutConfig(format="plain"),
        seed=0,
        max_calls=10**9,
    )
    sessions = Sessions()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> None:
        session.start()

    asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield (
        schemathesis.openapi.from_asgi("/openapi.json", gateway_app(sessions)),
        sessions.add(session),
    )
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize("examples", [15, pytest.param(150, marks=pytest.mark.long)])
def test_no_request_causes_a_server_error(examples: int, live: tuple[Any, str]) -> None:
    """Every route answers 2xx to some, and every refusal has the form of its API's errors."""
    schema, key = live

    def link(case: Any, valid: bool) -> None:
        if "model" in case.path_parameters:
            case.path_parameters["model"] = "policy"
        elif case.path in BODIES:
            generated = case.body if isinstance(case.body, dict) and not valid else {}
            case.body = {**BODIES[case.path], **generated, "model": "policy"}

    def check(case: Any, answer: Any) -> None:
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert {"type", "message"} <= set(answer.json()["error"])
            assert (answer.json().get("type") == "error") == ("/v1/messages" in case.path)

    statuses = fuzz(schema, examples, link, check, headers={"authorization": f"Bearer {key}"})
    assert statuses.never_succeeded() == [], str(statuses)
    for path in BODIES:
        assert statuses[f"POST {path}"][400], str(statuses)
