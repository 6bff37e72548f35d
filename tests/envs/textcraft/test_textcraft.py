"""TextCraft: the table, the rules, the expert."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from turns import act, say

from ludus.core.errors import ConfigError, EnvError
from ludus.core.types import Message, Task, ToolCall
from ludus.envs.babyai.env import BabyAI
from ludus.envs.textcraft.env import TextCraft
from ludus.envs.textcraft.recipes import load_table
from ludus.tasks.readers import read_env


async def crafting(goal: str, **args: int) -> TextCraft:
    env = TextCraft(**args)
    await env.reset(Task(id="x", data={"goal": goal, "seed": 0}))
    return env


def test_the_table_has_the_scale_of_the_original() -> None:
    goals = load_table().goals
    assert {depth: len(items) for depth, items in goals.items()} == {1: 144, 2: 278, 3: 116, 4: 11}
    assert len(load_table().tags) == 15


def test_the_table_is_sound() -> None:
    table = load_table()
    assert not table.items & set(table.tags)
    for ways in table.recipes.values():
        for recipe in ways:
            choices = [set(table.choices(name)) for name, _ in recipe.ingredients]
            assert sum(map(len, choices)) == len(set().union(*choices)), "ingredients overlap"
            assert recipe.count > 0
            assert all(count > 0 for _, count in recipe.ingredients)


async def test_the_expert_crafts_every_goal() -> None:
    turns = []
    env = TextCraft()
    for tier in TextCraft.tiers():
        for seed in range(TextCraft.num_goals(tier)):
            await env.reset(TextCraft.task(tier, seed))
            for turn in range(env.max_turns):
                action = env.expert_action()
                assert env.text_of(env.call_of(action)) == action
                result = await act(env, action)
                if result.done:
                    turns.append(turn + 1)
                    break
            assert result.info["success"], TextCraft.task(tier, seed).data
    assert len(turns) == 549
    assert 15 < max(turns) <= TextCraft.max_turns


async def test_the_opening_lists_commands_and_the_goal() -> None:
    env = TextCraft(num_distractors=7)
    task = TextCraft.task("depth-3", 1)
    lines = (await env.reset(task)).messages[0].content.splitlines()
    assert lines[0] == "commands:"
    assert lines[-1] == f"goal: craft {task.data['goal']}"
    assert all(line.startswith("craft ") and " using " in line for line in lines[1:-1])
    bare = TextCraft(num_distractors=0)
    needed = (await bare.reset(task)).messages[0].content.splitlines()
    assert set(needed[1:-1]) < set(lines[1:-1])
    assert len(lines) - len(needed) == 7


async def test_an_episode_by_hand() -> None:
    env = await crafting("crafting table")
    assert await say(env, "inventory") == "inventory: nothing."
    assert await say(env, "Get 1  oak log.") == "got 1 oak log."
    assert await say(env, "craft 4 oak planks using 1 oak log") == "crafted 4 oak planks."
    assert await say(env, "inventory") == "inventory: 4 oak planks."
    result = await act(env, "craft 1 crafting table using 4 oak planks")
    assert result.terminated
    assert result.reward == 1.0
    assert result.messages[0].content == "crafted 1 crafting table. goal reached."
    with pytest.raises(EnvError, match="call reset first"):
        await act(env, "inventory")


async def test_items_of_a_tag_may_be_mixed() -> None:
    env = await crafting("crafting table")
    for text in ("get 1 oak log", "get 1 birch log", "craft 4 oak planks using 1 oak log"):
        await act(env, text)
    await act(env, "craft 4 birch planks using 1 birch log")
    assert (await act(env, "craft 1 crafting table using 3 oak planks, 1 birch planks")).terminated


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        ("get 4 oak planks", "oak planks has to be crafted."),
        ("get 1 oak logs", "oak logs is one of acacia log"),
        ("get 1 unicorn", "there is no unicorn."),
        ("get 0 oak log", "get 1 to 999."),
        ("get oak log", "no such action."),
        ("craft 1 oak log using 1 stick", "oak log cannot be crafted. get it."),
        ("craft 3 oak planks using 1 oak log", "there is no such recipe for oak planks."),
        ("craft 4 oak planks using 2 oak log", "there is no such recipe for oak planks."),
        ("craft 4 oak planks using 1 oak log, 1 stick", "there is no such recipe for oak planks."),
        ("craft 4 oak planks using 1 oak log", "not enough. you have 0 oak log."),
        ("craft 1 crafting table using 4 planks", "planks is one of acacia planks"),
        ("craft 1 crafting table", "no such action."),
        ("dance", "no such action."),
    ],
)
async def test_a_wrong_action_is_answered(action: str, answer: str) -> None:
    if "oak logs" in action:
        answer = "oak logs is one of oak log"
    assert (await say(await crafting("crafting table"), action)).startswith(answer)


async def test_tool_calls_are_checked_and_answered_as_tools() -> None:
    env = await crafting("crafting table")
    call = ToolCall(name="get", arguments={"item": "oak log", "count": 1}, id="c1")
    result = await env.step(Message(role="assistant", tool_calls=[call]))
    assert result.messages[0].role == "tool"
    assert result.messages[0].tool_call_id == "c1"
    assert result.messages[0].content == "got 1 oak log."
    for arguments, problem in (
        ({"item": "oak log"}, "count is missing"),
        ({"item": "oak log", "count": "1"}, "count has to be of type integer"),
        ({"item": "oak log", "count": 1, "now": True}, "no argument now"),
    ):
        with pytest.raises(ValueError, match=problem):
            env.text_of(ToolCall(name="get", arguments=arguments))
    assert {spec.name for spec in env.tools()} == {"get", "craft", "inventory"}


async def test_an_episode_can_be_cut() -> None:
    env = await crafting("crafting table", max_steps=2)
    assert not (await act(env, "inventory")).done
    result = await act(env, "inventory")
    assert result.truncated
    assert not result.terminated
    assert result.reward == 0.0


async def test_wrong_goals_and_tiers_are_named() -> None:
    with pytest.raises(EnvError, match="did you mean chest"):
        await TextCraft().reset(Task(id="x", data={"goal": "chestt"}))
    with pytest.raises(ConfigError, match=r"depth-5.*did you mean depth-"):
        TextCraft.task("depth-5", 0)


def test_seeds_below_the_number_of_goals_have_a_goal_each() -> None:
    for tier in TextCraft.tiers():
        number = TextCraft.num_goals(tier)
        goals = {TextCraft.task(tier, seed).data["goal"] for seed in range(number)}
        assert len(goals) == number
        assert TextCraft.task(tier, number).data["goal"] in goals


PROBE = """
import asyncio, hashlib
from ludus.envs.textcraft.env import TextCraft
async def main():
    digest = hashlib.sha256()
    for seed in range(200):
        opening = await TextCraft().reset(TextCraft.task("depth-2", seed))
        digest.update(opening.messages[0].content.encode())
    print(digest.hexdigest())
asyncio.run(main())
"""


def test_openings_do_not_depend_on_the_hash_seed() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", PROBE],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1


def test_a_tier_can_be_its_first_goals():
    goals = {TextCraft.task("depth-1:3", seed).data["goal"] for seed in range(50)}
    assert goals == {TextCraft.task("depth-1", seed).data["goal"] for seed in range(3)}
    assert TextCraft.num_goals("depth-1:3") == 3
    assert TextCraft.task("depth-1:3", 7).tier == "depth-1"
    for wrong in ("depth-1:0", "depth-1:x", "depth-1:", "depth-1:9999"):
        with pytest.raises(ConfigError, match="1 to 144"):
            TextCraft.task(wrong, 0)
    with pytest.raises(ConfigError, match="did you mean depth-"):
        TextCraft.task("depth-l:3", 0)
    assert len(read_env(4, ["depth-1:3"], maker=TextCraft())) == 4
    with pytest.raises(ConfigError, match="is not a tier"):
        read_env(4, ["GoToObj:3"], maker=BabyAI())
