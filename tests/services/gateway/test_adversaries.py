"""Clients that misbehave, over real sockets: no call is lost, and the others' go on."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from gateway_world import ASKED, play
from played_envs import task_of
from rollout_world import Scripted, World

from ludus.core.types import Group, Status
from ludus.rollout.workflow import Agent
from ludus.services.gateway.gateway import HttpGateway
from ludus.train.batches.samples import rows

CHAT = {"model": "policy", "messages": ASKED}
PATHS = ("/chat/completions", "/completions", "/responses", "/messages", "/messages/count_tokens")


async def play_many(world: World, agent: Any, num: int, sampler: Any, **how: Any) -> list[Group]:
    """Play `num` episodes at once."""
    how = {"format": "plain", "system_prompt": None, "max_retries": 0, **how}
    collector = world.collector(None, sampler=sampler, concurrency=num, **how)
    agent = Agent(agent, frozenset({"task", "model"}))
    collector = replace(collector, agent=agent, gateway=HttpGateway())
    try:
        return await collector.collect([task_of(n) for n in range(num)], 0, 1)
    finally:
        await collector.close()


class Waiting(Scripted):
    """Answers when `go` is called; its running turns end as its sessions close."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.running: dict[str, asyncio.Future[None]] = {}
        self.at_work = 0

    async def sample(self, prompt_ids: Any, params: Any, *, session: str) -> Any:
        self.running[session] = asyncio.get_running_loop().create_future()
        self.at_work += 1
        try:
            await self.running[session]
        finally:
            del self.running[session]
        return await super().sample(prompt_ids, params, session=session)

    def go(self) -> None:
        for future in list(self.running.values()):
            future.get_loop().call_soon_threadsafe(future.set_result, None)

    def close(self, session: str) -> None:
        if session in self.running:
            self.running[session].cancel()
        super().close(session)


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.01)


def opened(model: Any) -> socket.socket:
    address = urlsplit(model.base_url)
    connection = socket.create_connection((address.hostname, address.port), timeout=20)
    # An abrupt end, without the rest of an orderly one.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return connection


def request(model: Any, body: dict[str, Any], path: str = "/chat/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1{path} HTTP/1.1\r\nhost: x\r\nx-api-key: {model.api_key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def client_of(model: Any, **options: Any) -> httpx.AsyncClient:
    headers = {"x-api-key": model.api_key}
    return httpx.AsyncClient(base_url=model.base_url, headers=headers, timeout=60, **options)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", CHAT),
        ("/responses", {"model": "policy", "input": "red ?"}),
        ("/messages", {**CHAT, "max_tokens": 40}),
    ],
)
async def test_a_stream_whose_client_leaves(world: World, path: str, body: dict[str, Any]):
    """In mid-answer: the turn stays. Before it: the call ends."""
    sampler = Waiting(world.renderer(), "blue")

    async def run(task, model):
        sent = request(model, {**body, "stream": True}, path)
        with opened(model) as before:
            before.sendall(sent)
            await until(lambda: sampler.running)
        await until(lambda: not sampler.running)
        with opened(model) as within:
            within.sendall(sent)
            await until(lambda: sampler.running)
            sampler.go()
            assert (await asyncio.to_thread(within.recv, 40)).startswith(b"HTTP/1.1 200")
        calling = asyncio.create_task(model.chat(ASKED))
        await until(lambda: sampler.running)
        sampler.go()
        return float((await calling).content == "blue")

    played = await play(world, run, sampler=sampler)
    assert (played.error, played.reward, played.num_turns) == (None, 1.0, 2)
    assert sampler.at_work == 3


async def test_two_calls_of_a_session_at_once(world: World):
    sampler = Waiting(world.renderer(), "blue")

    async def run(task, model):
        async with client_of(model) as client:
            bodies = (CHAT, CHAT, {**CHAT, "messages": [{"role": "user", "content": "grey"}]})
            calls = [asyncio.create_task(client.post("/chat/completions", json=b)) for b in bodies]
            await until(lambda: len(sampler.running) == 3)
            sampler.go()
            return float(all([(await call).is_success for call in calls]))

    played = await play(world, run, sampler=sampler)
    assert (played.error, played.reward, played.num_turns) == (None, 1.0, 3)
    assert len(rows(played, 1.0)) == 3


async def test_a_call_while_its_episode_ends_is_told(world: World):
    sampler = Waiting(world.renderer(), "blue")
    late: list[asyncio.Task[httpx.Response]] = []
    clients: list[httpx.AsyncClient] = []

    async def outside(model: Any) -> httpx.Response:
        clients.append(client_of(model))
        return await clients[0].post("/chat/completions", json=CHAT)

    home = asyncio.get_running_loop()

    async def run(task, model):
        calling = asyncio.create_task(model.chat(ASKED))
        await until(lambda: sampler.running)
        sampler.go()
        await calling
        home.call_soon_threadsafe(lambda: late.append(home.create_task(outside(model))))
        await until(lambda: sampler.running)
        return 1

    gateway = HttpGateway()
    collector = world.collector(
        None, sampler=sampler, format="plain", system_prompt=None, max_retries=0
    )
    agent = Agent(run, frozenset({"task", "model"}))
    collector = replace(collector, agent=agent, gateway=gateway)
    try:
        (group,) = await collector.collect([task_of(0)], 0, 1)
        async with asyncio.timeout(20):
            answer = await late[0]
    finally:
        await collector.close()
    await clients[0].aclose()
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "call_refused")
    (played,) = group.trajectories
    assert (played.status, played.num_turns) == (Status.COMPLETED, 1)
    assert sampler.sessions == set()


async def test_the_key_of_another_session(world: World):
    """It plays in the other's episode: a key is all that a call has. Responses are not shared."""
    keys: dict[str, Any] = {}
    wait = asyncio.Event()
    home = asyncio.get_running_loop()

    async def run(task, model):
        keys[task.id] = model
        await until(lambda: len(keys) == 2)
        async with client_of(model) as client:
            body = {"model": "policy", "input": "red ?"}
            answer = (await client.post("/responses", json=body)).json()
            if task.id == task_of(0).id:
                other = {"x-api-key": keys[task_of(1).id].api_key}
                body["previous_response_id"] = answer["id"]
                url = model.base_url.partition("/s/")[0] + "/v1/responses"  # the header's key
                refused = await client.post(url, json=body, headers=other)
                assert refused.status_code == 404
                home.call_soon_threadsafe(wait.set)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(wait.wait(), home))
        return 1

    groups = await play_many(world, run, 2, Scripted(world.renderer(), "blue"))
    played = [group.trajectories[0] for group in groups]
    assert [(p.error, p.num_turns) for p in played] == [(None, 1), (None, 1)]


@pytest.mark.parametrize("declared", [True, False])
async def test_ten_megabytes(world: World, declared: bool):
    async def body():
        for _ in range(100):
            yield b"x" * 100_000

    async def run(task, model):
        async with client_of(model) as client:
            for path in PATHS:
                content: Any = b"x" * 10_000_000 if declared else body()
                with suppress(httpx.WriteError):  # the server has answered and closed
                    answer = await client.post(path, content=content)
                    assert answer.status_code == 413, answer.text
            return float((await client.post("/chat/completions", json=CHAT)).is_success)

    played = await play(world, run, "blue")
    assert (played.error, played.reward, played.num_turns) == (None, 1.0, 1)


HEADS = [
    b"".join(b"x-%d: y\r\n" % n for n in range(5000)),
    b"x-long: " + b"y" * 100_000 + b"\r\n",
    b"x-key-of-many: " + b"\r\nx-api-key: k" * 90 + b"\r\n",
]


@pytest.mark.parametrize("head", HEADS, ids=["many", "long", "keys"])
async def test_floods_of_headers(world: World, head: bytes):
    async def run(task, model):
        flood = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + head
        unfinished = []
        for _ in range(50):
            connection = opened(model)
            unfinished.append(connection)
            with suppress(OSError):  # refused already
                connection.sendall(flood)  # without its end
        with opened(model) as whole, suppress(OSError):
            whole.sendall(flood + b"content-length: 0\r\n\r\n")
            answered = await asyncio.to_thread(whole.recv, 40)
            assert answered.startswith(b"HTTP/1.1 4")
        async with client_of(model) as client:
            fine = (await client.post("/chat/completions", json=CHAT)).is_success
        for connection in unfinished:
            connection.close()
        return float(fine)

    played = await play(world, run, "blue")
    assert (played.error, played.reward, played.num_turns) == (None, 1.0, 1)


@pytest.mark.slow
async def test_512_sessions_of_two_calls(world: World):
    """All at the same time, each over a connection of its own: none is lost."""
    num = 512

    async def run(task, model):
        messages = [{"role": "user", "content": "red ?"}]
        address = urlsplit(model.base_url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            for _ in range(2):
                writer.write(request(model, {"model": "policy", "messages": messages}))
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200"), head
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                answer = json.loads(await reader.readexactly(int(length)))
                messages.append(answer["choices"][0]["message"])
                messages.append({"role": "user", "content": "and now ?"})
        finally:
            writer.close()
        return 1

    sampler = Scripted(world.renderer(), "blue")
    groups = await play_many(world, run, num, sampler, episode_deadline_s=240.0)
    played = [group.trajectories[0] for group in groups]
    assert {(p.error, p.status, p.num_turns) for p in played} == {(None, Status.COMPLETED, 2)}
    assert {len(rows(p, 1.0)) for p in played} == {1}
    assert sampler.sessions == set()
