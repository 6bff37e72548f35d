"""The client of remote tools: retries, deadline, circuit breaker, limits, rubbish."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from typing import Any

import pytest
from raw_server import CLOSE, FLOOD, HANG, RawServer, answer

from ludus.core import remote
from ludus.core.errors import ConfigError, ToolError
from ludus.core.remote import Blamed, Breaker, RemoteClient

OK = answer({"fine": True})


@pytest.fixture
async def server() -> AsyncIterator[RawServer]:
    async with RawServer() as made:
        yield made


async def post(server: RawServer, **options: Any) -> Any:
    client = RemoteClient(server.url, **options)
    try:
        return await client.post({"a": 1})
    finally:
        await client.close()


@pytest.mark.parametrize("status", [425, 429, 503])
async def test_a_call_that_was_not_run_is_sent_again(server: RawServer, status: int) -> None:
    server.script = [answer({}, status), answer({}, status), OK]
    assert await post(server) == {"fine": True}
    assert len(server.bodies) == 3


@pytest.mark.parametrize("lost", [CLOSE, answer({}, 500), answer({}, 502), answer({}, 408)])
async def test_a_lost_call_is_sent_again_only_if_idempotent(server: RawServer, lost: bytes) -> None:
    server.script = [lost, OK]
    with pytest.raises(ToolError):
        await post(server)
    assert len(server.bodies) == 1
    server.script = [lost, OK]
    assert await post(server, idempotent=True) == {"fine": True}


async def test_the_pause_that_a_server_asks_for(server: RawServer) -> None:
    server.script = [answer({}, 429, "retry-after: 1"), OK]
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await post(server) == {"fine": True}
    assert loop.time() - began >= 1
    server.script = [answer({"error": "busy"}, 429, "retry-after: 36000"), OK]
    with pytest.raises(ToolError, match="answered 429: busy"):
        await post(server)


async def test_attempts_end() -> None:
    async with RawServer() as server:
        server.script = [answer({"error": {"message": "busy"}}, 503)]
        with pytest.raises(ToolError, match="answered 503: busy"):
            await post(server, attempts=3)
        assert len(server.bodies) == 3


async def test_a_server_that_is_not_there_is_a_tool_error() -> None:
    client = RemoteClient("http://127.0.0.1:9", attempts=2)
    with pytest.raises(ToolError, match="no answer"):
        await client.post({})
    await client.close()


@pytest.mark.parametrize("status", [400, 413, 422])
@pytest.mark.parametrize(
    "body", [{"error": {"message": "b is wrong"}}, {"detail": "b is wrong"}, b"b is \n wrong"]
)
async def test_a_status_that_blames_the_arguments(
    server: RawServer, status: int, body: Any
) -> None:
    server.script = [answer(body, status)]
    with pytest.raises(Blamed, match=r"^b is wrong$"):
        await post(server)
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("response", "told"),
    [
        (answer({}, 401), "answered 401"),
        (answer({}, 404), "answered 404"),
        (answer(b"", 302, "location: http://other/"), "redirects to 'http://other/'"),
        (answer(b"\xff\xfe{}"), "the answer is not UTF-8"),
        (answer(b"<html>"), "the answer is not JSON"),
        (answer(b""), "the answer is not JSON"),
        (answer(b"[" * 200_000), "the answer is not JSON"),
        (answer(gzip.compress(b"0" * 10**8), 200, "content-encoding: gzip"), "compresses"),
        (b"rubbish\r\n\r\n", "no answer"),
        (FLOOD, "more than 16,000,000 bytes"),
    ],
)
async def test_rubbish_is_a_tool_error(server: RawServer, response: bytes, told: str) -> None:
    server.script = [response]
    with pytest.raises(ToolError, match=told):
        await post(server)
    assert len(server.bodies) == 1


async def test_the_deadline_holds_for_all_attempts(server: RawServer) -> None:
    server.script = [HANG]
    with pytest.raises(ToolError, match=r"gave no answer within 0.2 s"):
        await post(server, deadline_s=0.2)


async def test_calls_in_flight_are_bounded(server: RawServer) -> None:
    server.script, server.delay_s = [OK], 0.02
    client = RemoteClient(server.url, max_in_flight=3)
    await asyncio.gather(*(client.post({}) for _ in range(20)))
    await client.close()
    assert server.most_in_flight == 3
    assert len(server.bodies) == 20


async def test_the_breaker_keeps_calls_away_until_the_server_is_back(server: RawServer) -> None:
    server.script = [CLOSE]
    client = RemoteClient(server.url, attempts=1, deadline_s=30)
    client._breaker = breaker = Breaker(threshold=3, pause_s=0.3)
    for _ in range(3):
        with pytest.raises(ToolError):
            await client.post({})
    assert breaker.is_open
    waiting = [asyncio.create_task(client.post({})) for _ in range(20)]
    await asyncio.sleep(0.05)
    assert len(server.bodies) == 3  # nothing is sent while it is open
    server.script = [CLOSE, OK]
    done = await asyncio.gather(*waiting, return_exceptions=True)
    await client.close()
    failed = [result for result in done if isinstance(result, ToolError)]
    assert len(failed) == 1  # the probe that met the server still down
    assert len(server.bodies) == 3 + 20


async def test_a_probe_that_is_cancelled_lets_the_next_call_try(server: RawServer) -> None:
    server.script = [CLOSE]
    client = RemoteClient(server.url, attempts=1)
    client._breaker = Breaker(threshold=1, pause_s=0.01)
    with pytest.raises(ToolError):
        await client.post({})
    server.script = [HANG, OK]
    probe = asyncio.create_task(client.post({}))
    while len(server.bodies) < 2:
        await asyncio.sleep(0.01)
    probe.cancel()
    assert await client.post({}) == {"fine": True}
    await client.close()


async def test_an_open_breaker_does_not_outlast_the_deadline(server: RawServer) -> None:
    server.script = [CLOSE]
    client = RemoteClient(server.url, attempts=1, deadline_s=0.2)
    client._breaker = Breaker(threshold=1, pause_s=60)
    with pytest.raises(ToolError):
        await client.post({})
    with pytest.raises(ToolError, match=r"after failures in a row \(no answer \(.*disconnected"):
        await client.post({})
    await client.close()
    assert len(server.bodies) == 1


async def test_pauses_are_random_and_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[tuple[float, float]] = []

    def uniform(least: float, most: float) -> float:
        spans.append((least, most))
        return 0.0

    monkeypatch.setattr(remote.random, "uniform", uniform)
    async with RawServer() as server:
        server.script = [answer({}, 503)]
        client = RemoteClient(server.url, attempts=9)
        client._breaker = Breaker(threshold=100)
        with pytest.raises(ToolError):
            await client.post({})
        await client.close()
    assert spans == [(0, min(10.0, 0.2 * 2**i)) for i in range(8)]


async def test_the_token(server: RawServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    await post(server, token_env="MY_TOKEN")
    assert "authorization: Bearer s3cret" in server.heads[0]
    monkeypatch.setenv("LUDUS_TOKEN", "other")
    await post(server)
    assert "uthorization" not in server.heads[1]


@pytest.mark.parametrize(
    ("url", "options", "told"),
    [
        ("localhost:80", {}, "must have the form"),
        ("ftp://a/b", {}, "must have the form"),
        ("http://u:p@a/b", {}, "a URL with a password"),
        ("http://a:port", {}, "is not a URL"),
        ("http://a", {"token_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE is not set"),
    ],
)
def test_wrong_addresses_are_refused(url: str, options: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        RemoteClient(url, **options)
