"""AgentGym's wire format: requests of its client, and the response keys that it reads."""

from __future__ import annotations

import asyncio
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest
from service_world import service

from ludus.core.types import Message, Task
from ludus.envs.babyai.env import BabyAI
from ludus.envs.babyai.world import LEVELS
from ludus.envs.textcraft.env import TextCraft
from ludus.envs.webshop.env import WebShop
from ludus.services.envs.agentgym_rows import ROWS
from ludus.tasks.agentgym import BABYAI_LEVELS


class Gym:
    """The requests of AgentGym's clients, for one environment."""

    def __init__(self, client: httpx.Client, name: str, **body: Any) -> None:
        self.client, self.base = client, f"/agentgym/{name}"
        self.key = ROWS[name].id_key
        answer = client.post(f"{self.base}/create", **({"json": body} if body else {}))
        assert answer.status_code == 200, answer.text
        self.created = answer.json()
        self.id = self.created if isinstance(self.created, int) else self.created["id"]

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(f"{self.base}/{path}", json={self.key: self.id, **body})

    def get(self, path: str) -> httpx.Response:
        return self.client.get(f"{self.base}/{path}?{self.key}={self.id}")


def kind(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["type"]


def test_all_forty_levels_exist() -> None:
    assert len(BABYAI_LEVELS) == 40
    assert set(BABYAI_LEVELS) <= set(LEVELS)


async def played(env: Any, task: Any) -> tuple[list[str], list[str]]:
    """The expert's actions and the environment's texts."""
    said = [(await env.reset(task)).messages[0].content]
    actions, done = [], False
    while not done:
        actions.append(env.expert_action())
        result = await env.step(Message(role="assistant", content=actions[-1]))
        said.append(result.messages[0].content)
        done = result.done
    return actions, said


@pytest.mark.parametrize("index", [1, 2 + 40 * 3])
def test_babyai(client: httpx.Client, index: int) -> None:
    gym = Gym(client, "babyai")
    assert gym.created.keys() == {"id"}
    task = BabyAI.task(BABYAI_LEVELS[index % 40], index // 40)
    actions, said = asyncio.run(played(BabyAI(texts="agentgym"), task))
    told = gym.post("reset", data_idx=index).json()
    assert told.keys() == {"observation", "reward", "score", "deleted", "done"}
    assert told == gym.get("observation").json()
    assert told["observation"] == said[0]
    goal = said[0].partition("\n")[0] + "\n"
    assert goal.startswith("Your goal: ")
    assert gym.post("render").json().startswith("data:image/png;base64,iVBOR")
    hint = gym.post("step", action="check available actions").json()["observation"]
    assert hint.startswith("You can take the following actions: turn left, turn right")
    for action, text in zip(actions, said[1:], strict=True):
        told = gym.post("step", action=action).json()
        assert told.keys() == {"observation", "reward", "score", "done"}
        assert told["observation"] == text
        seen = gym.get("observation").json()
        assert seen == {**told, "observation": goal + text, "deleted": False}
    assert told["done"]
    assert kind(gym.post("render")) == (409, "not_reset")
    assert told["reward"] == told["score"] > 0.5
    assert kind(gym.post("step", action="turn left")) == (409, "episode_over")
    assert gym.post("close").json() is True
    assert kind(gym.post("step", action="turn left")) == (410, "session_closed")


def test_textcraft(client: httpx.Client) -> None:
    gym = Gym(client, "textcraft", minecraft_dir="agentenv_textcraft/", commands=None, goal=None)
    assert gym.created.keys() == {"id", "observation", "done", "reward"}
    env = TextCraft(texts="agentgym")
    actions, said = asyncio.run(played(env, TextCraft.task(None, 150)))
    told = gym.post("reset", data_idx=150).json()
    assert told == {"id": gym.id, "observation": said[0], "done": False, "reward": 0.0}
    assert said[0].startswith("Crafting commands:\ncraft ")
    for action, text in zip(actions, said[1:], strict=True):
        told = gym.post("step", action=action).json()
        assert told["observation"] == text
        assert gym.get("detail").json() == {**told, "deleted": False}
    assert (told["reward"], told["done"]) == (1.0, True)
    assert (
        "\n\nGoal: craft " in gym.post("reset").json()["observation"]
    )  # data_idx is 0 if left out


def test_textcraft_with_a_client_goal(client: httpx.Client) -> None:
    gym = Gym(client, "textcraft", goal="oak slab")
    assert gym.created["observation"].endswith("\n\nGoal: craft oak slab.")
    assert gym.get("goal").json() == "oak slab"
    before = client.get("/health").json()["sessions"]
    answer = client.post("/agentgym/textcraft/create", json={"goal": "the moon"})
    assert kind(answer) == (422, "bad_task")
    assert client.get("/health").json()["sessions"] == before
    answer = client.post("/agentgym/textcraft/create", json={"commands": "craft 1 x using 1 y"})
    assert kind(answer) == (422, "invalid")


def test_webshop(client: httpx.Client) -> None:
    gym = Gym(client, "webshop")
    assert gym.created == gym.id
    assert kind(gym.get("available_actions")) == (409, "not_reset")
    env = WebShop(texts="agentgym")
    actions, said = asyncio.run(played(env, Task(id="x", data={"goal": 7})))
    assert gym.post("reset", session_id=7).json() == [said[0], None]
    told = gym.get("available_actions").json()
    assert told == {"has_search_bar": True, "clickables": ["search"]}
    instruction = gym.get("instruction_text").json()
    assert instruction.replace("Instruction: ", "Instruction: [SEP] ") in said[0]
    state = gym.get("state").json()
    assert state.keys() == {"url", "html", "instruction_text"}
    assert (state["url"], state["instruction_text"]) == ("http://127.0.0.1:3000/7", instruction)
    assert 'id="search_input"' in state["html"]
    for action, text in zip(actions, said[1:], strict=True):
        assert action.startswith("search[") or action[6:-1].lower() in told["clickables"]
        answer = gym.post("step", action=action).json()
        assert answer.keys() == {"state", "reward", "done", "info"}
        assert answer["state"] == gym.get("observation").json() == text
        told = gym.get("available_actions").json()
        assert told["has_search_bar"] is False
        assert all(f" {c} " in f" {text.lower()} " for c in told["clickables"])
        assert bool(told["clickables"]) is not answer["done"]
    assert (answer["reward"], answer["done"], answer["info"]) == (1.0, True, None)
    assert kind(gym.get("state")) == (409, "not_reset")
    for body in ({"session_id": None}, {}):
        opening, nothing = gym.post("reset", **body).json()
        assert opening.startswith("WebShop [SEP] Instruction: [SEP] ")
        assert nothing is None


def test_webshops_pages_are_html_with_the_same_texts(client: httpx.Client) -> None:
    gym = Gym(client, "webshop")
    gym.post("reset", session_id=3)

    class Texts(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[str] = []

        def handle_data(self, data: str) -> None:
            self.found += [data.strip()] if data.strip() else []

    pages = set()
    for _ in range(4):
        state, actions = gym.get("state").json(), gym.get("available_actions").json()["clickables"]
        parser = Texts()
        parser.feed(state["html"])
        assert " [SEP] ".join(parser.found) == gym.get("observation").json()
        pages.add(state["url"].removeprefix("http://127.0.0.1:3000/").partition("/")[0])
        click = "description" if "description" in actions else actions[-1]
        found = [text for text in actions if text.startswith("b0")]
        action = f"click[{found[0] if found else click}]"
        gym.post("step", action="search[red shoes]" if "search" in actions else action)
    assert pages == {"3", "search_results", "item_page", "item_sub_page"}


@pytest.mark.parametrize(
    ("path", "body", "status", "type"),
    [
        ("reset", {"data_idx": 549}, 422, "bad_task"),
        ("reset", {"data_idx": -1}, 422, "invalid"),
        ("reset", {"data_idx": "first"}, 422, "invalid"),
        ("reset", {"data_idx": None}, 422, "invalid"),
        ("reset", {"id": 3, "data_idx": 1}, 404, "unknown_session"),
        ("step", {"id": 10**40, "action": "x"}, 422, "invalid"),
        ("step", {"id": None, "action": "x"}, 422, "invalid"),
        ("step", {"action": 7}, 422, "invalid"),
        ("step", {"action": "x" * 1_000_000}, 413, "too_large"),
        ("fly", {}, 404, "unknown_path"),
    ],
)
def test_errors_have_error_statuses(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, type: str
) -> None:
    assert kind(Gym(client, "textcraft").post(path, **body)) == (status, type)


def test_sessions_of_other_environments_are_unknown(client: httpx.Client) -> None:
    gym, other = Gym(client, "textcraft"), Gym(client, "babyai")
    other.id = gym.id
    assert kind(other.post("reset", data_idx=0)) == (404, "unknown_session")
    assert kind(Gym(client, "babyai").get("observation")) == (409, "not_reset")


def test_unserved_environments_have_no_routes(client: httpx.Client) -> None:
    with service("textcraft") as url:
        assert kind(httpx.post(f"{url}/agentgym/babyai/create")) == (404, "unknown_path")
    assert "textcraft" in client.get("/agentgym/textcraft/").text
