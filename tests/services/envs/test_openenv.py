"""OpenEnv's protocol, with raw messages and with its own client if installed."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import httpx
import pytest
from service_world import OBEYS, service, until
from websockets.sync.client import ClientConnection, connect

from ludus.data.expert import run_expert
from ludus.envs.textcraft.env import TextCraft


def at(url: str, env: str) -> ClientConnection:
    return connect(f"{url.replace('http', 'ws')}/openenv/{env}/ws", proxy=None)


def ask(socket: ClientConnection, type: str, data: Any = None) -> tuple[str, Any]:
    socket.send(json.dumps({"type": type, "data": {} if data is None else data}))
    told = json.loads(socket.recv())
    return told["type"], told["data"]


def test_an_episode(url: str, client: httpx.Client) -> None:
    before = client.get("/health").json()["sessions"]
    with at(url, OBEYS) as socket:
        kind, told = ask(socket, "reset", {"seed": 3, "episode_id": "mine"})
        assert (kind, told["done"], told["reward"]) == ("observation", False, None)
        assert told["observation"]["text"] == "order 3"
        assert ask(socket, "step", {"text": "hello"})[1]["observation"]["text"] == "you said hello"
        assert ask(socket, "state")[1] == {"episode_id": "mine", "seed": 3, "step_count": 1}
        _, told = ask(socket, "step", {"name": "act", "arguments": {"action": "win"}})
        assert (told["done"], told["reward"]) == (True, 1.0)
        assert client.get("/health").json()["sessions"] == before + 1
    until(lambda: client.get("/health").json()["sessions"] == before)


def test_a_reset_without_a_seed_plays_another_task_each_time(url: str) -> None:
    with at(url, OBEYS) as socket:
        seeds = []
        for _ in range(4):
            told = ask(socket, "reset")[1]["observation"]
            seeds.append(told["info"]["seed"])
            assert told["text"] == f"order {seeds[-1]}"
            assert ask(socket, "state")[1]["seed"] == seeds[-1]
        assert len(set(seeds)) == 4
        assert ask(socket, "reset", {"seed": 0})[1]["observation"]["text"] == "order 0"


def test_errors_have_openenv_codes(url: str) -> None:
    with at(url, OBEYS) as socket:
        assert ask(socket, "step", {"text": "x"})[1]["code"] == "EXECUTION_ERROR"
        assert ask(socket, "fly")[1]["code"] == "UNKNOWN_TYPE"
        assert ask(socket, "step", {})[1]["code"] == "VALIDATION_ERROR"
        assert ask(socket, "step", 3)[1]["code"] == "VALIDATION_ERROR"
        assert ask(socket, "reset", {"seed": -1})[1]["code"] == "VALIDATION_ERROR"
        socket.send("{")
        assert json.loads(socket.recv())["data"]["code"] == "INVALID_JSON"
        assert ask(socket, "reset", {"seed": 1})[0] == "observation"
        assert ask(socket, "step", {"text": "raise"})[1]["code"] == "EXECUTION_ERROR"
        assert ask(socket, "step", {"text": "x"})[1]["code"] == "SESSION_ERROR"
        assert ask(socket, "reset", {"seed": 1})[0] == "observation"


def test_full_service_reports_capacity() -> None:
    with service(OBEYS, max_sessions=1) as url, at(url, OBEYS), at(url, OBEYS) as second:
        assert json.loads(second.recv())["data"]["code"] == "CAPACITY_REACHED"


def test_schemas(client: httpx.Client) -> None:
    told = client.get(f"/openenv/{OBEYS}/schema").json()
    assert told.keys() == {"action", "observation", "state"}
    assert told["action"]["properties"].keys() == {"text", "name", "arguments"}
    assert client.get(f"/openenv/{OBEYS}/health").json() == {"status": "healthy"}


def test_the_real_client(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "openenv is not installed: pip install --no-deps openenv (scripts/setup.sh does)"
    pytest.importorskip("openenv", reason=reason)
    if find_spec("fastmcp") is None:
        # The package's front door imports its servers too, and they need what is not installed; the
        # client does not.
        servers = ModuleType("openenv.core.env_server")
        servers.__dict__["__all__"] = []
        monkeypatch.setitem(sys.modules, servers.__name__, servers)
    core = import_module("openenv.core")
    with core.GenericEnvClient(base_url=f"{url}/openenv/textcraft").sync() as env:
        result = env.reset(seed=3, tier="depth-1")
        assert "goal: craft" in result.observation["text"]
        result = env.step({"text": "get 1 oak log"})
        assert result.observation["text"] == "got 1 oak log."
        assert (result.reward, result.done) == (0.0, False)
        assert env.state()["step_count"] == 1
        result = env.reset(seed=3, tier="depth-1")
        expert = asyncio.run(run_expert(TextCraft(), TextCraft.task("depth-1", 3)))
        actions = [m.content for m in expert.messages if m.role == "assistant"]
        for action in actions:
            assert not result.done
            result = env.step({"text": action})
        assert (result.reward, result.done) == (1.0, True)
