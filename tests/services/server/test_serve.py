"""`ludus serve env`: start, several workers, clean shutdown."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from service_world import OBEYS, alive, command, until

from ludus.cli import main
from ludus.cli.options import env_specs
from ludus.core.errors import ConfigError
from ludus.core.types import Spec
from ludus.services.envs.manager import SessionLimits
from ludus.services.envs.service import environment_service
from ludus.services.server.app import Settings
from ludus.services.server.auth import client_tokens
from ludus.services.server.connections import ConnectionLimits
from ludus.services.server.serve import listen, server_config


def ludus(*words: str) -> tuple[int, str]:
    """Exit code and stderr of a command that fails before it serves."""
    said = io.StringIO()
    with (
        pytest.raises(SystemExit) as end,
        contextlib.redirect_stderr(said),
        mock.patch.object(sys, "argv", ["ludus", "serve", "env", *words]),
    ):
        main()
    return int(str(end.value.code)), said.getvalue()


def test_environments_and_their_arguments() -> None:
    words = ["babyai", "actions=macro", "max_steps=3", "textcraft"]
    assert env_specs(words) == [
        Spec(name="babyai", args={"actions": "macro", "max_steps": 3}),
        Spec(name="textcraft"),
    ]
    with pytest.raises(ConfigError, match="name an environment"):
        env_specs(["actions=macro"])
    with pytest.raises(ConfigError, match="twice"):
        env_specs(["babyai", "babyai"])


def test_weak_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_TOKENS", "short")
    with pytest.raises(ConfigError, match="16"):
        client_tokens()
    monkeypatch.setenv("LUDUS_TOKENS", " a-token-of-16-chars, another-of-16-chars ,")
    assert client_tokens() == ("a-token-of-16-chars", "another-of-16-chars")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("chess",), "'chess' is not a known env"),
        (("textcraft", "size=3"), "size is not an argument"),
        (("textcraft", "--host", "0.0.0.0"), "set a token in LUDUS_TOKENS"),
        (("textcraft", "--port", "{taken}"), "cannot listen on"),
    ],
)
def test_errors_are_one_line(words: tuple[str, ...], said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, told = ludus(*[port if word == "{taken}" else word for word in words])
    assert code == 2, told
    assert said in told
    assert len(told.strip().splitlines()) == 1


def opened(client: httpx.Client, env: str = OBEYS) -> str:
    path = f"/sessions/{client.post('/sessions', json={'env': env}).json()['session']}"
    client.post(f"{path}/reset", json={"seed": 0}).raise_for_status()
    return path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_the_service_cleanly(number: int) -> None:
    with command(OBEYS) as served, httpx.Client(base_url=served.url) as client:
        opened(client)
        os.kill(served.process.pid, number)
        assert served.process.wait(30) in (0, -number, 130)
        assert served.process.stdout is not None
        assert served.process.stdout.read().strip() == ""  # the address was said before


def workers_of(pid: int) -> list[int]:
    """Its worker processes, without the resource tracker."""
    found = []
    for path in Path(f"/proc/{pid}/task/{pid}").glob("children"):
        for child in path.read_text().split():
            line = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"spawn_main" in line:
                found.append(int(child))
    return found


def test_connections_are_kept_longer_than_uvicorn_does() -> None:
    app = environment_service([Spec(name="textcraft")], Settings(), SessionLimits())
    assert server_config(app, ConnectionLimits()).timeout_keep_alive >= 60


@pytest.mark.slow
def test_idle_connection_stays_open() -> None:
    patient = httpx.Limits(keepalive_expiry=60)
    with (
        command("textcraft") as started,
        httpx.Client(base_url=started.url, limits=patient) as client,
    ):
        client.get("/health").raise_for_status()
        time.sleep(6)  # uvicorn's own limit is 5
        reused: list[str] = []
        opened = {"trace": lambda name, info: reused.append(name)}
        client.get("/health", extensions=opened).raise_for_status()
        assert not any(name.startswith("connection.connect_tcp") for name in reused), reused


def test_answers_in_two_parts_are_sent_at_once() -> None:
    """The loop of asyncio leaves Nagle's algorithm on: 40 ms an answer."""
    with listen("127.0.0.1", 0, ()) as (listening, _), socket.socket() as client:
        client.connect(listening.getsockname())
        listening.setblocking(True)
        with listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are read from /proc")
def test_workers_share_a_port_and_sessions_are_sticky() -> None:
    token = "a-token-of-sixteen-letters"
    env = {"LUDUS_TOKENS": token}
    headers = {"Authorization": f"Bearer {token}"}
    with command(OBEYS, "textcraft", "--workers", "2", env=env) as served:
        pids = workers_of(served.process.pid)
        assert len(pids) == 2
        paths, owners = [], set()
        for number in range(100):  # a connection each: any worker may accept it
            if number >= 12 and owners == {0, 1}:
                break
            time.sleep(0.2 if number > 12 else 0)  # one of them may be late
            with httpx.Client(base_url=served.url, headers=headers, timeout=30) as client:
                paths.append(opened(client))
                owners.add(int(paths[-1].rpartition("/")[2], 16) % 2)
        assert owners == {0, 1}
        with httpx.Client(base_url=served.url, headers=headers, timeout=30) as client:
            seen = {
                path: int(_said(client.post(f"{path}/step", json={"action": "pid"})))
                for path in paths
            }
            assert set(seen.values()) == set(pids)
            by_owner = {int(path.rpartition("/")[2], 16) % 2: pid for path, pid in seen.items()}
            assert all(
                pid == by_owner[int(path.rpartition("/")[2], 16) % 2] for path, pid in seen.items()
            )
            ids = [path.rpartition("/")[2] for path in paths]
            calls = [{"op": "step", "session": id, "action": "win"} for id in ids]
            told = client.post("/batch", json={"calls": calls}).json()["results"]
            assert [entry["result"]["reward"] for entry in told] == [1.0] * len(ids)
            assert client.get(paths[0], headers={"Authorization": ""}).status_code == 401
            _agentgym_is_sticky(served.url, headers)
            _a_dead_worker_is_replaced(served.url, headers, seen)
        everything = workers_of(served.process.pid)
        served.kill()
        until(lambda: not any(map(alive, everything)))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are read from /proc")
def test_session_limit_is_for_all_workers() -> None:
    with (
        command(OBEYS, "--workers", "2", "--max-sessions", "5") as served,
        httpx.Client(base_url=served.url, timeout=30) as client,
    ):
        paths = [opened(client) for _ in range(5)]  # one connection, so all in one worker
        lost = workers_of(served.process.pid)[int(paths[0].rpartition("/")[2], 16) % 2]
        for _ in range(6):  # a connection each: any worker may accept it
            answer = httpx.post(f"{served.url}/sessions", json={"env": OBEYS})
            assert (answer.status_code, answer.json()["error"]["type"]) == (
                429,
                "too_many_sessions",
            )
        client.delete(paths.pop()).raise_for_status()
        paths.append(opened(client))
        os.kill(lost, signal.SIGKILL)
        until(lambda: not alive(lost))
        with httpx.Client(base_url=served.url, timeout=30) as other:
            until(lambda: _opens(other))  # what the dead one had is free again


def _opens(client: httpx.Client) -> bool:
    try:
        return client.post("/sessions", json={"env": OBEYS}).status_code == 200
    except httpx.HTTPError:
        return False


def _said(answer: httpx.Response) -> str:
    return str(answer.json()["messages"][0]["content"])


def _agentgym_is_sticky(url: str, headers: dict[str, str]) -> None:
    base = f"{url}/agentgym/textcraft"
    for _ in range(6):
        id = httpx.post(f"{base}/create", json={}, headers=headers).json()["id"]
        for _ in range(2):  # each a connection of its own
            body: dict[str, Any] = {"id": id, "data_idx": 3}
            assert httpx.post(f"{base}/reset", json=body, headers=headers).status_code == 200
            answer = httpx.get(f"{base}/observation?id={id}", headers=headers)
            assert "Goal: craft" in answer.json()


def _a_dead_worker_is_replaced(url: str, headers: dict[str, str], seen: dict[str, int]) -> None:
    lost = next(iter(seen.values()))
    os.kill(lost, signal.SIGKILL)
    until(lambda: not alive(lost))

    def all_answer() -> bool:
        codes = {
            path: httpx.get(url + path, headers=headers, timeout=10).status_code for path in seen
        }
        return all(code == (404 if seen[path] == lost else 200) for path, code in codes.items())

    until(all_answer)
