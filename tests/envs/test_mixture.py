"""An environment among others plays as it does alone; only its rewards are brought to [0, 1]."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from served_envs import Engine

from ludus.core.errors import ConfigError, EnvError
from ludus.core.types import Message, Spec, Task, ToolCall
from ludus.data.demonstrations import generate_demonstrations, load_demonstrations
from ludus.data.expert import run_expert
from ludus.envs.babyai.env import BabyAI
from ludus.envs.base import NoExpert
from ludus.envs.checks.check import check_env
from ludus.envs.mixture import Mixture
from ludus.envs.textcraft.env import TextCraft
from ludus.tasks.mixture import PART
from ludus.tasks.readers import read_tasks

RANGED = f"{Path(__file__).parents[1] / 'support' / 'ranged_envs.py'}:Ranged"
SPEC = Spec(
    name="mixture",
    args={
        "envs": {
            "grid": "babyai",
            "crafting": {"name": "textcraft", "args": {"num_distractors": 1}},
            "ranged": RANGED,
        }
    },
)


def mixture() -> Mixture:
    return Mixture(envs={n: Spec.model_validate(s) for n, s in SPEC.args["envs"].items()})


def labelled(task: Task, part: str) -> Task:
    return task.model_copy(update={"data": {**task.data, PART: part}})


def say(text: str) -> Message:
    return Message(role="assistant", content=text)


TASKS = [
    labelled(BabyAI.task("GoToObj", 3), "grid"),
    labelled(TextCraft.task("depth-2", 5), "crafting"),
    labelled(Task(id="ranged/4", data={"seed": 4}), "ranged"),
]


async def test_it_conforms() -> None:
    assert await check_env(SPEC, tasks=TASKS) == []


@pytest.mark.parametrize("format", ["plain", "react", "tools"])
async def test_an_expert_plays_as_it_does_alone(format: Any) -> None:
    alone = {"grid": BabyAI(), "crafting": TextCraft(num_distractors=1)}
    for part, env in alone.items():
        task = next(task for task in TASKS if task.data[PART] == part)
        assert await run_expert(mixture(), task, format) == await run_expert(env, task, format)


@pytest.mark.parametrize(("action", "raw", "reward"), [("up", 30, 1.0), ("down", -10, 0.0)])
async def test_rewards_are_brought_to_0_and_1_and_the_sum_is_kept(
    action: str, raw: float, reward: float
) -> None:
    env = mixture()
    await env.reset(TASKS[2])
    earned = [(await env.step(say(action))).reward for _ in range(4)]
    assert sum(r for r in earned if r is not None) == pytest.approx(reward)
    assert env.scores() == {"raw_reward": pytest.approx(raw), "height": raw}
    assert (reward >= env.success_at) == (action == "up")


async def test_what_was_earned_half_way_is_in_proportion() -> None:
    env = mixture()
    await env.reset(TASKS[2])
    first = await env.step(say("wait"))
    assert first.reward == pytest.approx(0.25), "0 of -10 to 30"
    second = await env.step(say("up"))
    assert second.reward == pytest.approx(7.5 / 40)
    assert env.success_of(TASKS[2]) == pytest.approx(0.75, abs=1e-6)


async def test_each_episode_has_the_turns_tools_and_mark_of_its_environment() -> None:
    env = mixture()
    seen = {}
    for task in TASKS[:2]:
        await env.reset(task)
        seen[task.data[PART]] = (env.max_turns, [tool.name for tool in env.tools()], env.success_at)
    crafting = [tool.name for tool in TextCraft().tools()]
    assert seen == {"grid": (20, ["act"], 1e-6), "crafting": (30, crafting, 1.0)}
    with pytest.raises(ValueError, match="no such tool"):
        env.text_of(ToolCall(name="act", arguments={"action": "drop"}))
    assert mixture().success_of(TASKS[0]) == 1e-6
    blocks = [Mixture.blocks(task, envs=mixture().envs) for task in TASKS]
    assert blocks == [False, False, True]


async def test_the_environment_sees_its_task_without_the_label_and_is_closed() -> None:
    env = mixture()
    await env.reset(TASKS[2])
    inner = env._env
    assert inner is not None
    assert vars(inner)["data"] == {"seed": 4}
    await env.reset(TASKS[0])
    assert vars(inner)["closed"]
    await env.close()
    await env.close()
    with pytest.raises(EnvError, match="call reset first"):
        await env.step(say("drop"))
    with pytest.raises(NoExpert):
        env.expert_action()


async def test_an_engine_of_one_of_them_is_prepared() -> None:
    Engine.prepared.clear()
    envs = {"one": Spec(name="served_envs:Engine"), "two": Spec(name="served_envs:Obeys")}
    env = Mixture(envs)
    await env.prepare(Task(id="t", data={"part": "two"}))
    assert Engine.prepared == {}
    await env.prepare(Task(id="t", data={"part": "one"}))
    assert Engine.prepared == {os.getpid(): "t"}


def test_demonstrations_are_by_each_ones_expert(tmp_path: Path) -> None:
    spec = {
        "parts": {
            "grid": {"ratio": 2, "tasks": {"name": "env", "args": _args(4, "GoToObjS6")}},
            "crafting": {"tasks": {"name": "env", "args": _args(2, "depth-1")}},
        }
    }
    tasks = read_tasks(Spec(name="mixture", args=spec), "tasks.train", maker=mixture())
    summary = generate_demonstrations(SPEC, tasks, tmp_path / "d.jsonl", num_workers=1)
    shown = list(load_demonstrations(summary.path))
    assert [one.task_id for one in shown] == [task.id for task in tasks]
    assert {one.tier for one in shown} == {"grid/GoToObjS6", "crafting/depth-1"}
    assert all(one.success for one in shown)


def _args(num_tasks: int, tier: str) -> dict[str, Any]:
    return {"num_tasks": num_tasks, "tiers": [tier]}


async def test_a_task_of_no_environment_breaks_the_episode_by_name() -> None:
    with pytest.raises(EnvError, match=r"names no environment in data\.part"):
        await mixture().reset(Task(id="x"))
    with pytest.raises(EnvError, match=r"unknown part 'gird' \(did you mean grid\?\)"):
        await mixture().reset(labelled(Task(id="x"), "gird"))


def test_what_it_holds_is_checked_when_it_is_built() -> None:
    inner = Spec(name="mixture", args={"envs": {"a": "babyai"}})
    with pytest.raises(ConfigError, match=r"envs\.a: a mixture holds no other mixture"):
        Mixture(envs={"a": inner})
    with pytest.raises(ConfigError, match=r"env\.args\.envs\.a\.name: 'babyay' is not a known env"):
        Mixture(envs={"a": Spec(name="babyay")}).members()
    with pytest.raises(ConfigError, match=r"env\.args\.envs\.a\.args\.levle is not an argument"):
        Mixture(envs={"a": Spec(name="babyai", args={"levle": "GoTo"})}).members()
    with pytest.raises(ConfigError, match="come from the reader `mixture`"):
        Mixture.task("GoToObj", 0)
