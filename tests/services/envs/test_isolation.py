"""Sessions in their own processes: crashes and hangs stay contained."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import served_envs
from service_world import OBEYS, alive, command, service, until


@pytest.fixture(scope="module")
def isolated() -> Iterator[httpx.Client]:
    with (
        service(OBEYS, isolate=True, step_deadline_s=4.0) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


class Played:
    """A session that was reset."""

    def __init__(self, client: httpx.Client, seed: int = 0) -> None:
        self.client = client
        id = client.post("/sessions", json={"env": OBEYS}).json()["session"]
        self.path = f"/sessions/{id}"
        client.post(f"{self.path}/reset", json={"seed": seed}).raise_for_status()

    def do(self, action: str) -> httpx.Response:
        return self.client.post(f"{self.path}/step", json={"action": action})

    def said(self, action: str) -> str:
        told: dict[str, Any] = self.do(action).json()
        return str(told["messages"][0]["content"])


def test_each_session_has_its_own_process(isolated: httpx.Client) -> None:
    sessions = [Played(isolated) for _ in range(3)]
    pids = [int(session.said("pid")) for session in sessions]
    assert len({*pids, os.getpid()}) == 4
    for session in sessions:
        isolated.delete(session.path)
    until(lambda: not any(map(alive, pids)))


def test_dead_process_ends_only_its_session(isolated: httpx.Client) -> None:
    dies, lives = Played(isolated), Played(isolated)
    answer = dies.do("exit")
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "env_error")
    assert "process died" in answer.json()["error"]["message"]
    assert dies.do("x").status_code == 410
    assert lives.do("win").json()["reward"] == 1.0


@pytest.mark.slow
def test_hanging_process_is_killed_with_its_children(isolated: httpx.Client) -> None:
    hangs, lives = Played(isolated), Played(isolated)
    pids = [int(hangs.said("pid")), int(hangs.said("child"))]
    assert all(map(alive, pids))
    assert hangs.do("hang").json()["error"]["type"] == "env_timeout"
    until(lambda: not any(map(alive, pids)))
    assert lives.do("win").json()["reward"] == 1.0


def test_output_of_environments_is_discarded(isolated: httpx.Client, capfd: Any) -> None:
    assert Played(isolated).do("print").status_code == 200
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("isolate", [False, True])
def test_an_engine_is_prepared_before_the_first_session(isolate: bool) -> None:
    """In the service's process before it answers; with `isolate`, in each session's."""
    name = "served_envs:Engine"
    served_envs.Engine.prepared.clear()
    with service(name, isolate=isolate) as url, httpx.Client(base_url=url, timeout=60) as client:
        id = client.post("/sessions", json={"env": name}).json()["session"]
        told = client.post(f"/sessions/{id}/reset", json={"seed": 3}).json()
    task, _, pid = told["messages"][0]["content"].partition(" in ")
    assert task == ("None-3" if isolate else "easy-0")
    assert (int(pid) == os.getpid()) is not isolate


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_terminated_service_removes_what_its_engines_made(workers: int, tmp_path: Path) -> None:
    told = {"TEST_ENGINE_FOLDER": str(tmp_path)}
    with command("served_envs:Engine", "--workers", str(workers), env=told):
        until(lambda: len(list(tmp_path.iterdir())) == workers)
    assert list(tmp_path.iterdir()) == []


def test_processes_end_with_a_killed_service() -> None:
    with command(OBEYS, "--isolate") as served, httpx.Client(base_url=served.url) as client:
        session = Played(client)
        pids = [int(session.said("pid")), int(session.said("child"))]
        served.kill()
        until(lambda: not any(map(alive, pids)))
