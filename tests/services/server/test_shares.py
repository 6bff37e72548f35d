"""Shares of tenants: one token cannot take all sessions, jobs or turns."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from service_world import OBEYS, command, service

from ludus.services.server.peers import SharedCounter
from ludus.services.server.shares import Client, Shares, client_of

TOKENS = ("first-token-of-sixteen", "other-token-of-sixteen")


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def open_until_refused(client: httpx.Client, most: int = 20) -> int:
    """The number of sessions that a client could open."""
    for number in range(most):
        answer = client.post("/sessions", json={"env": OBEYS})
        if answer.status_code == 429:
            assert answer.json()["error"]["type"] == "too_many_sessions"
            return number
        assert answer.status_code == 200, answer.text
    return most


def test_each_token_has_an_equal_share() -> None:
    with (
        service(OBEYS, tokens=TOKENS, max_sessions=6) as url,
        httpx.Client(base_url=url, headers=bearer(TOKENS[0])) as first,
        httpx.Client(base_url=url, headers=bearer(TOKENS[1])) as other,
    ):
        path = f"/sessions/{first.post('/sessions', json={'env': OBEYS}).json()['session']}"
        assert open_until_refused(first) == 2
        assert open_until_refused(other) == 3
        first.delete(path).raise_for_status()
        assert open_until_refused(other) == 0
        assert open_until_refused(first) == 1


def test_share_by_client_address_without_tokens() -> None:
    with service(OBEYS, max_sessions=6, max_sessions_per_token=2) as url:
        for source in ("127.0.0.2", "127.0.0.3"):
            transport = httpx.HTTPTransport(local_address=source)
            with httpx.Client(base_url=url, transport=transport) as client:
                assert open_until_refused(client) == 2
                # Nor do headers of the client's own making help.
                claim = {"X-Forwarded-For": "10.0.0.1"}
                answer = client.post("/sessions", json={"env": OBEYS}, headers=claim)
                assert answer.status_code == 429


@pytest.mark.skipif(not Path("/proc").exists(), reason="as the tests of workers")
def test_shares_are_for_all_workers() -> None:
    env = {"LUDUS_TOKENS": ",".join(TOKENS)}
    words = ("--workers", "2", "--max-sessions", "8")
    with command(OBEYS, *words, env=env) as served:
        for token in TOKENS:
            for _ in range(4):  # a connection each: any worker may accept it
                answer = httpx.post(
                    f"{served.url}/sessions", json={"env": OBEYS}, headers=bearer(token)
                )
                assert answer.status_code == 200, answer.text
            for _ in range(4):
                answer = httpx.post(
                    f"{served.url}/sessions", json={"env": OBEYS}, headers=bearer(token)
                )
                assert answer.status_code == 429


def test_counts(tmp_path: Path) -> None:
    counters = [SharedCounter(tmp_path, worker, 2, 3) for worker in range(2)]
    here, there = (Shares(10, 0, TOKENS, counter) for counter in counters)
    here.add(TOKENS[0], 3)
    assert there.allows(TOKENS[0], 2)
    assert not there.allows(TOKENS[0], 3)
    assert there.allows(TOKENS[1], 5)
    here.add(TOKENS[0], -3)
    assert there.allows(TOKENS[0], 5)
    assert Shares(10, 7, TOKENS).limit == 7
    assert Shares(1, 0, TOKENS).limit == 1
    assert Shares(10, 0, ()).limit == 10


def test_tenants() -> None:
    scope = {"client": ("10.0.0.1", 3), "state": {"owner": "a"}}
    assert client_of(scope) == Client("a", "10.0.0.1")
    assert client_of(scope).tenant == "a"
    assert client_of({"client": ("10.0.0.1", 3)}).tenant == "10.0.0.1"
    assert client_of({"client": None}).tenant == ""
