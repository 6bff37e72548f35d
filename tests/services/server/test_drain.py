"""A service that drains: no new sessions, open ones finish, then it stops."""

from __future__ import annotations

import os
import signal

import httpx
import pytest
from service_world import OBEYS, command, until

from ludus.services.envs.manager import SessionLimits
from ludus.services.envs.service import environment_service
from ludus.services.server.app import Settings

ADMIN = "an-administrators-token"
TOKEN = "a-token-of-sixteen-letters"


def client_of(admin: str) -> httpx.AsyncClient:
    app = environment_service([], Settings((TOKEN,)), SessionLimits(), admin=admin)
    transport = httpx.ASGITransport(app=app)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers)


async def test_only_the_administrator_drains() -> None:
    async with client_of("") as client:
        assert (await client.post("/drain")).status_code == 404
    async with client_of(ADMIN) as client:
        assert (await client.post("/drain")).status_code == 403
        assert (await client.get("/health")).json()["status"] == "ok"
        admin = {"Authorization": f"Bearer {ADMIN}"}
        assert (await client.post("/drain", headers=admin)).json() == {"draining": True}
        assert (await client.get("/health")).json()["status"] == "draining"
        assert (await client.delete("/drain", headers=admin)).json() == {"draining": False}
        assert (await client.get("/health")).json()["status"] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_open_sessions_finish_after_sigterm(workers: str) -> None:
    words = (OBEYS, "--drain", "60", "--workers", workers)
    with command(*words) as served, httpx.Client(base_url=served.url, timeout=20) as client:
        path = f"/sessions/{client.post('/sessions', json={'env': OBEYS}).json()['session']}"
        client.post(f"{path}/reset", json={"seed": 0}).raise_for_status()
        os.kill(served.process.pid, signal.SIGTERM)
        until(lambda: client.get("/health").json()["status"] == "draining")
        refused = client.post("/sessions", json={"env": OBEYS})
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert refused.json()["error"]["type"] == "draining"
        won = client.post(f"{path}/step", json={"action": "win"}).json()
        assert won["reward"] == 1.0
        assert served.process.poll() is None
        client.delete(path).raise_for_status()
        assert served.process.wait(30) in (0, -signal.SIGTERM)


@pytest.mark.slow
def test_the_second_sigterm_stops_at_once() -> None:
    with command(OBEYS, "--drain", "600") as served, httpx.Client(base_url=served.url) as client:
        client.post("/sessions", json={"env": OBEYS}).raise_for_status()
        os.kill(served.process.pid, signal.SIGTERM)
        until(lambda: client.get("/health").json()["status"] == "draining")
        os.kill(served.process.pid, signal.SIGTERM)
        assert served.process.wait(30) in (0, -signal.SIGTERM)
