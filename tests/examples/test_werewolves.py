"""The tutorial docs/werewolves.md: its files are the examples, and they run and train."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from agent_frameworks import WARNINGS
from harness import SMALLEST, Ludus

import ludus

ROOT = Path(ludus.__file__).parents[1]
FOLDER = ROOT / "examples" / "agents"
PAGE = (ROOT / "docs" / "werewolves.md").read_text(encoding="utf-8")

pytestmark = [pytest.mark.usefixtures("unclosed_clients"), pytest.mark.filterwarnings(*WARNINGS)]


@pytest.fixture
def game(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import werewolves

    yield werewolves
    sys.modules.pop("werewolves", None)


def test_the_page_shows_the_files_that_run() -> None:
    shown = re.findall(r"^```(?:python|yaml)\n(.*?)^```", PAGE, re.M | re.S)
    agentscope = (FOLDER / "werewolves_agentscope.py").read_text(encoding="utf-8")
    recipe = (ROOT / "recipes" / "werewolves-tiny.yaml").read_text(encoding="utf-8")
    assert agentscope in shown
    assert recipe in shown


async def test_the_rules(game: Any) -> None:
    """Everybody names the first player alive that may be named; wolves never name each other."""
    (task,) = game.games(1)
    wolves, asked = task.data["players"][:2], []

    async def ask(name: str, text: str) -> str:
        asked.append((name, text))
        alive = text.split(" alive ")[-1].split()
        if text.endswith("say a line ."):
            return "I am no wolf"
        without = wolves if name in wolves else [name]
        return next((n for n in alive if n in game.NAMES and n not in without), "nobody")

    played = game.Game(task.data["players"], ask, Random(0))
    winner = await played.play()
    assert winner in ("wolf", "villager")
    assert not played.unclear
    for _, text in asked:
        told, _, alive = text.rpartition(" alive ")
        gone = re.findall(r"(\w+) leaves (?:at|by)", told)
        assert not {*gone} & {*alive.split()}
    outcome = played.outcome(winner)
    assert sorted(outcome.rewards.values()) == [0.0, 1.0]
    assert outcome.success == (winner == "wolf")
    first = {name: next(text for n, text in asked if n == name) for name, _ in asked}
    assert all("a wolf with" in first[wolf] for wolf in wolves)
    assert all("wolf with" not in text for name, text in first.items() if name not in wolves)


async def test_answers_that_name_nobody_cost(game: Any) -> None:
    (task,) = game.games(1)

    async def ask(name: str, text: str) -> str:
        return "..."

    played = game.Game(task.data["players"], ask, Random(0))
    winner = await played.play()
    loser = {"wolf": "villager", "villager": "wolf"}[winner]
    assert played.outcome(winner).rewards == {winner: 0.5, loser: -0.5}


LEAGUE = {
    "roles": {"wolf": {"policy": 0.7, "old": 0.3}, "villager": {"policy": 0.7, "old": 0.3}},
    "policies": {"old": {"past": {"every": 1, "most": 2}}, "first": {"weights": "start"}},
    "evaluate": {"roles": {"wolf": "policy", "villager": "first"}},
}


@pytest.mark.parametrize(
    "agent",
    ["werewolves.py:run", pytest.param("werewolves_agentscope.py:run", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("kind", ["fixed villagers", "league"])
def test_it_trains(ludus: Ludus, agent: str, kind: str) -> None:
    if "agentscope" in agent:
        pytest.importorskip("agentscope", reason="needs the extra agents")
    for name in ("werewolves.py", "werewolves_agentscope.py"):
        shutil.copy(FOLDER / name, ludus.cwd)
    recipe = yaml.safe_load((ROOT / "recipes" / "werewolves-tiny.yaml").read_text())
    recipe["model"]["architecture"]["args"] = SMALLEST
    recipe |= {"name": "tiny", "agent": agent} | (LEAGUE if kind == "league" else {})
    for split in ("train", "heldout"):
        recipe["tasks"][split]["name"] = "werewolves.py:games"
    (ludus.cwd / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    small = ["rl.steps=2", "rl.groups_per_step=4", "rl.group_size=2", "evaluate.num_tasks=2"]
    ludus("train", "tiny.yaml", *small).ok()
    last = [line for line in ludus.metrics() if line["stage"] == "rl"][-1]
    assert last["role/wolf/turns"] > 1
    with ludus.store() as store:
        groups = [group for step in (0, 1) for group in store.groups("tiny-1", "rl", step)]
        final = store.groups("tiny-1", "evaluate/after", 0)
    told = {(t.status.value, t.error) for group in groups for t in group.trajectories}
    assert {status for status, _ in told} <= {"completed", "truncated_length"}, told
    trained = {
        (t.role, t.policy)
        for group in groups
        for t in group.trajectories
        if any(segment.advantages for segment in t.segments)
    }
    allowed = {("wolf", "policy")} | ({("villager", "policy")} if kind == "league" else set())
    assert trained
    assert trained <= allowed
    assert {t.policy for g in final for t in g.trajectories} == {"policy", "first"}
