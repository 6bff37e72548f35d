"""The guide's environment: plays, is deterministic, and its recipe is a valid configuration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ludus
from ludus import Message, Task
from ludus.config.load import load_config
from ludus.core.types import Spec
from ludus.data.expert import run_expert
from ludus.envs import ENVS
from ludus.envs.base import Env
from ludus.envs.checks.check import check_env
from ludus.tasks.readers import read_tasks
from ludus.tasks.splits import check_disjoint

ROOT = Path(ludus.__file__).parents[1]
NAME = f"{ROOT}/examples/own_environment.py:HigherOrLower"


async def play(env: Env, task: Task) -> tuple[list[str], float]:
    """The environment's words and the episode's reward, played by its expert."""
    heard = [m.content for m in (await env.reset(task)).messages]
    reward = 0.0
    for _ in range(env.max_turns):
        result = await env.step(Message(role="assistant", content=env.expert_action()))
        heard += [m.content for m in result.messages]
        reward += result.reward or 0.0
        if result.done:
            break
    await env.close()
    return heard, reward


@pytest.mark.parametrize("tier", ["small", "medium", "large"])
async def test_the_expert_wins_every_episode(tier: str):
    env = ENVS.build(NAME)
    for seed in range(200):
        heard, reward = await play(env, type(env).task(tier, seed))
        assert reward == 1.0, heard


async def test_the_same_task_gives_the_same_episode():
    task = type(ENVS.build(NAME)).task("large", 5)
    assert await play(ENVS.build(NAME), task) == await play(ENVS.build(NAME), task)


@pytest.mark.parametrize("nonsense", ["", "a number", "-1", "9" * 5000, "٣", "3.5", "1\n2"])
async def test_nonsense_is_told_to_the_model(nonsense: str):
    env = ENVS.build(NAME)
    await env.reset(type(env).task("small", 0))
    result = await env.step(Message(role="assistant", content=nonsense))
    assert [m.content for m in result.messages] == ["answer with a number ."]
    assert not result.done


async def test_a_guess_out_of_range_leaves_the_expert_sane():
    env = ENVS.build(NAME)
    task = type(env).task("small", 1)
    await env.reset(task)
    for guess in ("0", "9999"):
        await env.step(Message(role="assistant", content=guess))
    assert 1 <= int(env.expert_action()) <= 7


async def test_it_conforms():
    assert [finding for finding in await check_env(NAME) if finding.severity == "error"] == []


def test_the_recipe_is_valid(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    config = load_config("examples/own_environment.yaml")
    assert config.env is not None
    env = ENVS.build(config.env)
    train = read_tasks(config.tasks.train, "tasks.train", maker=env)
    assert config.tasks.heldout is not None
    heldout = read_tasks(config.tasks.heldout, "tasks.heldout", maker=env)
    check_disjoint(train, heldout)
    assert (len(train), len(heldout)) == (1200, 60)


def test_it_has_no_more_than_sixty_lines_of_code():
    text = (ROOT / "examples" / "own_environment.py").read_text(encoding="utf-8")
    body = text.split('"""', 2)[2]
    assert len([line for line in body.splitlines() if line.strip()]) <= 60


def test_the_guide_shows_the_example():
    guide = (ROOT / "docs" / "your-own-environment.md").read_text(encoding="utf-8")
    example = (ROOT / "examples" / "own_environment.py").read_text(encoding="utf-8")
    shown = "\n".join(re.findall(r"^```python\n(.*?)^```", guide, re.M | re.S)[:2])
    known = {line.strip() for line in example.splitlines()}
    new = [line for line in shown.splitlines() if line.strip() and line.strip() not in known]
    assert new == [
        "class WithTasks(HigherOrLower):",
        "    def tiers(cls) -> tuple[str, ...]:",
    ]


async def test_what_the_guide_shows_conforms(tmp_path: Path):
    page = (ROOT / "docs" / "your-own-environment.md").read_text(encoding="utf-8")
    file = tmp_path / "guide.py"
    file.write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    for name in ("WithTasks", "WithSteps"):
        assert await check_env(f"{file}:{name}") == []
    shown = await run_expert(ENVS.build(f"{file}:WithSteps"), Task(id="y", data={"seed": 3}))
    assert shown.messages[1].content == "1 to 7\n4"
    assert shown.success
    guessing = Spec(name=f"{file}:Guessing", args={"highest": 15})
    assert await check_env(guessing) == []
    heard, reward = await play(ENVS.build(guessing), Task(id="x", data={"seed": 3}))
    assert (heard[0], reward) == ("guess a number from 1 to 15 .", 1.0)
