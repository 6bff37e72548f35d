"""ScienceWorld behind the service: slow experts and frozen JVMs, with the real engine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_world import Command, command, until

pytest.importorskip("scienceworld", reason="needs the extra scienceworld")

from ludus.core.errors import ConfigError
from ludus.envs.java.machine import find_java

try:
    find_java("scienceworld")
except ConfigError as missing:
    pytest.skip(str(missing), allow_module_level=True)

SLOW = ("grow-fruit", "mendelian-genetics-known-plant")
"""Tasks whose gold paths take long to find: 4 and 17 s on an idle machine."""


class World:
    """A session of ScienceWorld."""

    def __init__(self, client: httpx.Client, task: str = "find-plant") -> None:
        made = client.post("/sessions", json={"env": "scienceworld"}).json()
        self.client, self.path = client, f"/sessions/{made['session']}"
        data = {"id": "x", "data": {"task": task, "variation": 0}}
        self.opening = client.post(f"{self.path}/reset", json={"task": data})

    def step(self) -> httpx.Response:
        return self.client.post(f"{self.path}/step", json={"action": "look around"})

    def expert(self) -> httpx.Response:
        return self.client.post(f"{self.path}/expert")


@contextmanager
def science(*words: str) -> Iterator[tuple[Command, httpx.Client]]:
    limits = httpx.Limits(max_connections=None)
    with (
        command("scienceworld", *words) as served,
        httpx.Client(base_url=served.url, timeout=180, limits=limits) as client,
    ):
        yield served, client


def concurrently(calls: list[Any]) -> list[httpx.Response]:
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda call=call: answers.append(call())) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def jvms_of(pid: int) -> list[int]:
    """The JVMs of a service, oldest first."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return sorted(pid for pid in children if b"java" in Path(f"/proc/{pid}/comm").read_bytes())


@pytest.mark.slow
def test_experts_search_in_a_jvm_of_their_own() -> None:
    """A step has 8 seconds, the experts' searches together take a multiple of that."""
    with science("num_jvms=1", "--step-deadline", "8") as (served, client):
        until(lambda: World(client).opening.status_code == 200)  # loads the engine's classes
        bystanders = [World(client) for _ in range(4)]
        callers = [World(client, task) for task in SLOW]
        assert {world.opening.status_code for world in (*bystanders, *callers)} == {200}
        done = threading.Event()
        steps: list[httpx.Response] = []

        def play(world: World) -> None:
            while not done.is_set():
                steps.append(world.step())

        players = [threading.Thread(target=play, args=(world,)) for world in bystanders]
        for player in players:
            player.start()
        advice = concurrently([caller.expert for caller in callers])
        done.set()
        for player in players:
            player.join()
        assert {answer.status_code for answer in steps} == {200}
        assert [answer.json().keys() for answer in advice] == [{"action", "steps"}] * 2
        assert [world.step().status_code for world in callers] == [200] * 2
        assert [World(client).opening.status_code for _ in range(4)] == [200] * 4
        assert len(jvms_of(served.process.pid)) == 2


@pytest.mark.slow
def test_a_frozen_jvm_loses_only_its_sessions() -> None:
    with science("num_jvms=2") as (served, client):
        World(client)
        until(lambda: World(client) and len(jvms_of(served.process.pid)) == 2)
        worlds = [World(client) for _ in range(12)]
        frozen = jvms_of(served.process.pid)[0]
        os.kill(frozen, signal.SIGSTOP)
        answers = concurrently([world.step for world in worlds])
        lost = [answer for answer in answers if answer.status_code != 200]
        assert 1 <= len(lost) <= 8, "the sessions are spread over the JVMs"
        assert {answer.json()["error"]["type"] for answer in lost} == {"env_error"}
        assert {answer.status_code for answer in lost} == {502}
        again = [World(client) for _ in range(12)]
        assert [world.opening.status_code for world in again] == [200] * 12
        left = [world.step().status_code for world in worlds]
        assert sorted(left) == [200] * (12 - len(lost)) + [410] * len(lost)
        assert frozen not in jvms_of(served.process.pid)


@pytest.mark.slow
def test_new_sessions_avoid_a_jvm_that_hangs() -> None:
    """Even before the hanging JVM is killed, and where it is the only one allowed."""
    with science("num_jvms=1") as (served, client):
        world = World(client)
        (frozen,) = jvms_of(served.process.pid)
        os.kill(frozen, signal.SIGSTOP)
        answers = concurrently([world.step, *([lambda: World(client).opening] * 4)])
        codes = sorted(answer.status_code for answer in answers)
        assert codes[:4] == [200] * 4
        assert codes[4] == 502
