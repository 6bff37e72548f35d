"""Tools of a recipe in `POST /rollouts` and `ludus rollout`, over real HTTP."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import played_tools
import pytest
from chat_server import ChatServer, call, text
from played_envs import Say
from service_world import service

from ludus.cli import main
from ludus.config.load import load_config
from ludus.core.types import Task

TOOLS = 'tools: ["played_tools:double", "played_tools:wordy", "played_tools:Recorder"]'
RECIPE = f"""
model: {{architecture: qwen3, tokenizer: {{name: words}}}}
env: textcraft
tasks: {{train: {{name: env, args: {{num_tasks: 1}}}}}}
{TOOLS}
limits: {{double: {{rate_per_s: 1000}}}}
rollout: {{tool_calls: {{max_per_episode: 2, max_result_tokens: 16}}}}
rl: {{}}
"""
SAY = "rollout_said:Said"


class Said(Say):
    """`Say`, with tasks from seeds."""

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        return Task(id=f"say/{seed}", data={"seed": seed})


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    sys.modules["rollout_said"] = sys.modules[__name__]
    yield
    del sys.modules["rollout_said"]


@pytest.fixture(autouse=True)
def fresh_tools() -> Iterator[None]:
    yield
    played_tools.ENDED.clear()
    played_tools.CLOSED.clear()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """Notes once, then asks for many words, then says the colour in time."""
    notes = sum(message["role"] == "tool" for message in body["messages"])
    wanted = [m["content"] for m in body["messages"] if m["role"] == "user"][-1].split()[1]
    if notes == 0:
        return call("note", '{"word": "a"}')
    return call("wordy", '{"size": 400}') if notes == 1 else text(wanted)


def test_jobs_have_the_tools_and_limits_of_the_recipe(recipe: Path) -> None:
    config = load_config(recipe, [])
    with (
        ChatServer(answer) as model,
        service(SAY, recipe=config) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        offered = client.get("/tools").json()
        assert [function["name"] for function in offered] == ["double", "wordy", "note"]
        asked = {"env": SAY, "model": "m", "base_url": model.url, "ids": [0, 0], "format": "plain"}
        told = client.post("/rollouts", json=asked).json()
        assert [(e["status"], e["success"]) for e in told["results"]] == [("completed", True)] * 2
        for entry in told["results"]:
            results = [m["content"] for m in entry["conversation"] if m["role"] == "tool"]
            assert results[0] == "a 1"  # no other episode has its state, though the ids are equal
            assert "characters left out" in results[1]
            assert len(results[1]) < 120  # 16 tokens of four characters, and the note
        assert len(set(played_tools.ENDED)) == 2
        names = [f["function"]["name"] for f in model.bodies[0]["tools"]]
        assert names == ["double", "wordy", "note"]

        model.bodies.clear()
        client.post("/rollouts", json={**asked, "ids": [0], "tools": ["note"]})
        assert [f["function"]["name"] for f in model.bodies[0]["tools"]] == ["note"]
        last = model.bodies[-1]["messages"]
        assert "There is no tool 'wordy'" in [m["content"] for m in last if m["role"] == "tool"][1]

        wrong = client.post("/rollouts", json={**asked, "tools": ["nota"]})
        assert wrong.status_code == 422
        told = wrong.json()["error"]["message"]
        assert told == "tools: 'nota' is no function on offer (did you mean note?)"
        code = client.post("/rollouts", json={**asked, "format": "code"})
        assert code.status_code == 422
        assert "cannot continue a turn after a result: choose plain, react or tools" in code.text
    assert played_tools.CLOSED == ["closed", "closed"]  # of the list of functions, of the service


def test_a_call_over_the_limit_of_the_recipe_is_not_run(recipe: Path) -> None:
    def always(body: dict[str, Any]) -> dict[str, Any]:
        return call("double", '{"number": 4}')

    with (
        ChatServer(always) as model,
        service(SAY, recipe=load_config(recipe, [])) as address,
    ):
        asked = {"env": SAY, "model": "m", "base_url": model.url, "ids": [0], "format": "plain"}
        (entry,) = httpx.post(f"{address}/rollouts", json=asked, timeout=60).json()["results"]
    assert entry["status"] == "truncated_turns"
    results = [m["content"] for m in entry["conversation"] if m["role"] == "tool"]
    assert results[:2] == ["8", "8"]
    assert results[2].startswith("Not run: the 2 calls of this episode are used")


def test_a_function_of_the_environment_and_a_tool_have_not_one_name(recipe: Path) -> None:
    recipe.write_text(
        RECIPE.replace(TOOLS, 'tools: [{name: "played_tools:double", args: {name: say}}]')
    )
    config = load_config(recipe, ["limits={}"])
    with service(SAY, recipe=config) as address:
        asked = {"env": SAY, "model": "m", "base_url": "http://127.0.0.1:1/v1", "ids": [0]}
        told = httpx.post(f"{address}/rollouts", json={**asked, "format": "tools"})
        assert told.status_code == 422
        assert "the environment has a function 'say' too" in told.text


LITTLE = "rate_per_s: 0.001, burst: 1, max_wait_s: 0.1"


def test_a_limit_of_the_endpoint_holds_for_rollouts(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request passes; an episode has two."""
    out = tmp_path / "episodes.json"
    for folder in ("command", "service"):
        (tmp_path / folder).mkdir()
    with ChatServer(answer) as model:
        limit = f'limits: {{"{model.url}/": {{store: "file://{tmp_path}/%s", {LITTLE}}}}}\n'
        text = RECIPE.replace("limits: {double: {rate_per_s: 1000}}\n", limit)
        recipe.write_text(text % "command")
        options = ["--model", "m", "--base-url", model.url, "--ids", "0", "--format", "plain"]
        words = ["rollout", SAY, *options, "--out", str(out), "--tools", str(recipe)]
        monkeypatch.setattr(sys, "argv", ["ludus", *words])
        with pytest.raises(SystemExit):
            main()
        (entry,) = json.loads(out.read_text())["results"]
        assert f"limits.{model.url}" in entry["error"]
        recipe.write_text(text % "service")
        with service(SAY, recipe=load_config(recipe, [])) as address:
            asked = {"env": SAY, "model": "m", "base_url": model.url, "ids": [0]}
            told = httpx.post(f"{address}/rollouts", json={**asked, "format": "plain"}, timeout=60)
        assert f"limits.{model.url}" in told.json()["results"][0]["error"]


def test_the_command_plays_with_the_tools_of_a_recipe(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "episodes.json"
    with ChatServer(answer) as model:
        options = ["--model", "m", "--base-url", model.url, "--ids", "0-1", "--format", "plain"]
        words = ["rollout", SAY, *options, "--out", str(out), "--tools", str(recipe)]
        monkeypatch.setattr(sys, "argv", ["ludus", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code, capsys.readouterr().err
    entries = json.loads(out.read_text())["results"]
    for entry in entries:
        results = [m["content"] for m in entry["conversation"] if m["role"] == "tool"]
        assert results[0] == "a 1"
        assert (entry["status"], entry["success"]) == ("completed", True)
