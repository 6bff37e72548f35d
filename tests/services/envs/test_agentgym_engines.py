"""AgentGym's wire format for ALFWorld and ScienceWorld, as its own clients speak it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from service_world import command

pytest.importorskip("textworld", reason="needs the extra alfworld")
pytest.importorskip("alfworld", reason="needs the extra alfworld")
pytest.importorskip("scienceworld", reason="needs the extra scienceworld")

from ludus.core.errors import ConfigError
from ludus.envs.java.machine import find_java

try:
    find_java("scienceworld")
except ConfigError as missing:
    pytest.skip(str(missing), allow_module_level=True)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("alfworld")
    env = {"XDG_CACHE_HOME": str(folder / "cache"), "ALFWORLD_DATA": str(folder / "data")}
    with (
        command("alfworld", "scienceworld", env=env) as served,
        httpx.Client(base_url=served.url, timeout=120) as made,
    ):
        yield made


def told(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def advice(client: httpx.Client, id: int) -> str:
    return str(told(client.post(f"/sessions/{id:024x}/expert"))["action"])


def test_alfworld(client: httpx.Client) -> None:
    base = "/agentgym/alfworld"
    id = told(client.post(f"{base}/create"))["id"]
    for game in (0, 2420):
        opening = told(
            client.post(f"{base}/reset", json={"game": game, "world_type": "Text", "id": id})
        )
        assert opening.keys() == {"id", "observation", "available_actions", "task_type"}
        assert opening["observation"].startswith("You are in the middle of a room.")
        assert "Your task is to: " in opening["observation"].splitlines()[-1]
        assert opening["task_type"]
        detail = told(client.get(f"{base}/detail?id={id}"))
        assert detail == {
            **{name: opening[name] for name in ("observation", "available_actions")},
            "world_type": "Text",
            "game": game,
            "done": False,
            "reward": 0.0,
            "deleted": False,
        }
        available, done = opening["available_actions"], False
        for _ in range(30):
            action = advice(client, id)
            assert action in available
            step = told(client.post(f"{base}/step", json={"action": action, "id": id}))
            assert step.keys() == {"observation", "reward", "available_actions", "done"}
            available, done = step["available_actions"], step["done"]
            assert "help" not in available
            assert not any(text.startswith("move ") for text in available)
            assert not step["observation"].startswith("You arrive at")
            if action.startswith("put "):
                assert step["observation"] == f"You {action}.".replace(
                    "put ", "put the ", 1
                ).replace("in/on ", "in/on the ", 1)
            if done:
                break
        assert (step["reward"], done) == (1.0, True)
    wrong = client.post(f"{base}/reset", json={"game": 0, "world_type": "Flat", "id": id})
    assert wrong.status_code == 422
    assert told(client.post(f"{base}/close", json={"id": id})) is True


@pytest.mark.slow
def test_scienceworld(client: httpx.Client) -> None:
    base = "/agentgym/scienceworld"
    id = told(client.post(f"{base}/create"))["id"]
    opening = told(client.post(f"{base}/reset", json={"data_idx": 4638, "id": id}))
    assert opening["task_description"].startswith("Your task is to ")
    assert opening["observation"].startswith("This room is called ")
    assert told(client.get(f"{base}/observation?id={id}")) == opening["observation"]
    assert told(client.get(f"{base}/detail?id={id}")) == opening
    hint = told(client.get(f"{base}/action_hint?id={id}"))
    assert hint.keys() == {"possible_actions", "possible_objects"}
    assert "look around" in hint["possible_actions"]
    assert all(isinstance(text, str) for texts in hint.values() for text in texts)
    goals = told(client.get(f"{base}/goals?id={id}"))
    assert goals.keys() == {"goals"}
    assert goals["goals"]
    rewards, done = [], False
    while not done:
        action = advice(client, id)
        step = told(client.post(f"{base}/step", json={"action": action, "id": id}))
        assert step.keys() == {"observation", "reward", "score", "done"}
        rewards.append(step["reward"])
        assert "The task is completed" not in step["observation"]
        assert told(client.get(f"{base}/detail?id={id}")) == {**opening, **step}
        assert sum(rewards) == pytest.approx(step["score"])
        done = step["done"]
    assert step["score"] == 100.0
    over = client.get(f"{base}/goals?id={id}")
    assert (over.status_code, over.json()["error"]["type"]) == (409, "not_reset")
    assert told(client.post(f"{base}/close", json={"id": id})) is True
