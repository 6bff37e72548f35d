"""Valid and invalid requests, generated from the OpenAPI description, to a running service."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from chat_server import ChatServer, text
from fuzzing import fuzz
from service_world import OBEYS, service, until

from ludus.services.envs.agentjet import PATHS

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

ENV = "textcraft"
NAMES = ("id", "env", "base_url", "env_type", "instance_id")
"""Fields that name what exists."""


class Existing:
    """Opens what the ids of requests name."""

    def __init__(self, client: httpx.Client, model_url: str) -> None:
        self._client, self._model_url = client, model_url

    def session(self) -> str:
        """A session whose episode is running."""
        id: str = self._post("/sessions", {"env": ENV})["session"]
        self._post(f"/sessions/{id}/reset", {"seed": 1})
        return id

    def agentgym(self) -> int:
        """A session of AgentGym's routes, in its first episode."""
        number: int = self._post(f"/agentgym/{ENV}/create", {})["id"]
        return number

    def instance(self) -> str:
        """An instance of AgentJet's routes, in its episode."""
        fields = {"env_type": ENV, "task_id": "depth-1/0"}
        id: str = self._post("/create", fields)["data"]["info"]["instance_id"]
        return id

    def agentjet(self, path: str) -> dict[str, Any]:
        """A valid request of AgentJet's routes."""
        if path in ("/create", "/get_env_profile"):
            return {"env_type": ENV, "task_id": "depth-1/0"}
        action = {"role": "assistant", "content": "inventory"}
        return {"instance_id": self.instance(), "messages": action}

    def rollouts(self, model: str) -> dict[str, Any]:
        """A valid request of a job."""
        return {"env": ENV, "model": model, "base_url": self._model_url, "ids": [1], "max_round": 1}

    def job(self) -> str:
        """A running job, whose model does not answer."""
        if not self._job_ids():
            request = self.rollouts("hangs")
            threading.Thread(target=self._post, args=("/rollouts", request), daemon=True).start()
            until(self._job_ids)
        return next(iter(self._job_ids()), "ended since")

    def body(self, path: str) -> Any:
        """A valid body of a route; None if it needs none."""
        if path in PATHS:
            return self.agentjet(path)
        if path.startswith("/agentgym/"):
            step = {"action": "inventory"} if path.endswith("/step") else {}
            return {"id": self.agentgym(), **step}
        session = self.session()
        call = {"op": "step", "session": session, "action": "inventory"}
        return {
            "/envs/{env}/call": {"action": "inventory"},
            "/sessions": {"env": ENV},
            "/sessions/{session}/reset": {"seed": 1},
            "/sessions/{session}/step": {"action": "inventory"},
            "/batch": {"calls": [call]},
            "/rollouts": self.rollouts("m"),
        }.get(path)

    def link(self, case: Any, valid: bool) -> None:
        makes: dict[str, Any] = {"env": lambda: ENV, "session": self.session, "job": self.job}
        for name in case.path_parameters:
            case.path_parameters[name] = makes[name]()
        if valid and "id" in case.query:
            case.query["id"] = self.agentgym()
        elif "id" in case.query or "seed" in case.query:
            case.query |= {name: 1 for name in case.query if name == "seed"}
        if case.method == "POST" and (body := self.body(case.path)) is not None:
            generated = case.body if isinstance(case.body, dict) else {}
            ids = {name: body[name] for name in NAMES if name in body}
            case.body = body if valid else {**generated, **ids}

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._client.post(path, json=body).raise_for_status().json()

    def _job_ids(self) -> list[str]:
        return [job["job"] for job in self._client.get("/rollouts").json()]


@pytest.fixture(scope="module")
def existing() -> Iterator[tuple[Any, Existing]]:
    over = threading.Event()

    async def say(body: dict[str, Any]) -> Any:
        while body["model"] == "hangs" and not over.is_set():
            await asyncio.sleep(0.05)
        return text("Action: inventory")

    with (
        ChatServer(say) as model,
        service(ENV, OBEYS, max_sessions=100_000, step_deadline_s=5) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        yield schema, Existing(client, model.url)
        over.set()


@pytest.mark.parametrize("examples", [6, pytest.param(100, marks=pytest.mark.long)])
def test_no_request_causes_a_server_error(examples: int, existing: tuple[Any, Existing]) -> None:
    """Every route answers 2xx to some, and every refusal has the form of errors."""
    schema, opened = existing

    def check(case: Any, answer: Any) -> None:
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"type", "message"}

    statuses = fuzz(schema, examples, opened.link, check)
    assert statuses.never_succeeded() == [], str(statuses)
    for route in ("POST /sessions/{session}/step", "POST /batch", "GET /rollouts/{job}"):
        assert any(status >= 400 for status in statuses[route]), str(statuses)
