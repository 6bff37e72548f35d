"""TextCraft's held-out goals, and tasks with other words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from turns import act

from ludus.config.load import load_config
from ludus.core.errors import ConfigError, EnvError
from ludus.envs.textcraft.env import TextCraft
from ludus.envs.textcraft.recipes import load_table
from ludus.tasks.readers import read_tasks

RECIPES = Path(__file__).parents[3] / "recipes"
CRAFTED = re.compile(r"crafted \d+ ([a-z ]+)\.")


async def episode(tier: str, seed: int) -> tuple[str, list[str]]:
    """The opening observation and the expert's replies."""
    env, replies = TextCraft(num_distractors=3), []
    opening = await env.reset(TextCraft.task(tier, seed))
    for _ in range(env.max_turns):
        result = await act(env, env.expert_action())
        replies.append(result.messages[0].content)
        if result.terminated:
            break
    assert result.info["success"], (tier, seed)
    return opening.messages[0].content, replies


def test_a_depths_goals_are_split() -> None:
    numbers = {}
    for depth, goals in load_table().goals.items():
        parts = []
        for split in ("train", "heldout", "renamed"):
            tier = f"depth-{depth}/{split}"
            number = TextCraft.num_goals(tier)
            parts.append({TextCraft.task(tier, seed).data["goal"] for seed in range(number)})
        train, heldout, renamed = parts
        assert train | heldout == set(goals)
        assert not train & heldout
        assert renamed == train
        numbers[depth] = (len(train), len(heldout))
    assert numbers == {1: (107, 37), 2: (171, 107), 3: (66, 50), 4: (5, 6)}
    assert TextCraft.task("depth-2/heldout", 0).tier == "depth-2"
    assert TextCraft.num_goals("depth-2/train:12") == 12
    with pytest.raises(ConfigError, match="did you mean depth-2/train"):
        TextCraft.task("depth-2/trian", 0)


@pytest.mark.parametrize("split", ["train", "renamed"])
async def test_no_training_episode_crafts_a_held_out_goal(split: str) -> None:
    heldout, crafted = load_table().heldout, set()
    for depth in load_table().goals:
        for seed in range(TextCraft.num_goals(f"depth-{depth}/{split}")):
            opening, replies = await episode(f"depth-{depth}/{split}", seed)
            assert opening.rpartition("goal: craft ")[2] not in heldout
            crafted |= {match[1] for reply in replies if (match := CRAFTED.match(reply))}
    assert len(crafted) > 300
    assert not crafted & heldout


async def test_a_renamed_task_has_the_recipes_in_other_words_and_counts() -> None:
    env = TextCraft(num_distractors=0)
    task = TextCraft.task("depth-2/renamed", 3)
    renamed = (await env.reset(task)).messages[0].content
    plain = TextCraft(num_distractors=0)
    await plain.reset(task.model_copy(update={"data": {**task.data, "renamed": False}}))
    assert re.findall(r"\d+", env.expert_action()) != re.findall(r"\d+", plain.expert_action())
    assert re.findall(r"[a-z]+", env.expert_action()) != re.findall(
        r"[a-z]+", plain.expert_action()
    )
    other = TextCraft(num_distractors=0)
    again = await other.reset(TextCraft.task("depth-2/renamed", 3 + 171))
    assert again.info["depth"] == 2
    assert again.messages[0].content != renamed
    with pytest.raises(EnvError, match="has no renamed tasks; use depth-N/train"):
        await TextCraft(texts="agentgym").reset(task)


async def test_renamed_tasks_are_as_long_as_the_real_ones_and_real_counts_are_refused() -> None:
    refused = 0
    for seed in range(60):
        task = TextCraft.task("depth-2/renamed", seed)
        real = task.model_copy(update={"data": {**task.data, "renamed": False}})
        lengths = []
        for each in (task, real):
            env = TextCraft(num_distractors=0)
            opening = (await env.reset(each)).messages[0].content
            commands = opening.partition("\ngoal")[0].splitlines()[1:]
            lengths.append(0)
            while not (reply := await act(env, env.expert_action())).done:
                lengths[-1] += 1
            assert reply.reward == 1
        assert lengths[0] <= lengths[1]
        await env.reset(task)
        names = env._names.shown  # the real counts in the task's words
        for command in commands:
            (reply, *_) = (await act(env, names(command))).messages
            refused += reply.content.startswith("there is no such recipe")
    assert refused > 60


@pytest.mark.parametrize("name", ["textcraft-qwen3-0.6b"])
def test_recipes_hold_out_goals_of_each_depth(name: str) -> None:
    tasks = load_config(str(RECIPES / f"{name}.yaml"), []).tasks
    assert tasks.heldout is not None
    train, heldout = [
        [task.data["goal"] for task in read_tasks(spec, maker=TextCraft())]
        for spec in (tasks.train, tasks.heldout)
    ]
    assert not set(heldout) & set(train)
    depths = load_table().depths
    assert {depths[goal] for goal in heldout} == {depths[goal] for goal in train} >= {1, 2}
