"""TextCraft in AgentGym's words: its replies, recorded from its own code with ludus' recipes.

Episodes in `agentgym_texts.json` follow the expert, with changed and wrong actions among its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from turns import act

from ludus.core.types import Task
from ludus.envs.textcraft.env import TextCraft

EPISODES = json.loads(Path(__file__).with_name("agentgym_texts.json").read_text("utf-8"))


def task(goal: str, seed: int = 0) -> Task:
    return Task(id="x", data={"goal": goal, "seed": seed})


@pytest.mark.parametrize("episode", EPISODES, ids=lambda e: e["goal"])
async def test_replies_are_agentgyms(episode: dict[str, Any]) -> None:
    env = TextCraft(texts="agentgym")
    await env.reset(task(episode["goal"], episode["seed"]))
    for action, reply in zip(episode["actions"], episode["replies"], strict=True):
        result = await act(env, action)
        assert result.messages[0].content == reply, action
    assert result.done is (reply.endswith("minecraft:" + episode["goal"].replace(" ", "_")))


async def test_the_opening_is_agentgyms() -> None:
    env, own = TextCraft(texts="agentgym", num_distractors=2), TextCraft(num_distractors=2)
    commands = (await own.reset(task("oak slab"))).messages[0].content.splitlines()[1:-1]
    opening = (await env.reset(task("oak slab"))).messages[0].content
    listed = "\n".join(commands)
    assert opening == f"Crafting commands:\n{listed}\n\nGoal: craft oak slab."


async def test_the_inventory_and_what_is_wrong_in_agentgyms_words() -> None:
    env = TextCraft(texts="agentgym")
    await env.reset(task("oak slab"))
    for action, reply in (
        ("inventory", "Inventory: You are not carrying anything."),
        ("get 1 oak log", "Got 1 oak log"),
        ("inventory", "Inventory: [oak log] (1) "),
        ("get oak log", "Could not execute get oak log"),
        ("get 2 oak planks", "Could not find oak planks"),
        ("craft oak planks using oak log", "Wrong item format: oak log"),
        (
            "craft 4 oak planks using 2 oak log",
            "Could not find enough items to craft minecraft:oak_planks",
        ),
        (
            "craft 3 oak slab using 1 oak log",
            "Could not find a valid recipe for ItemTagWithCount(item_tag=ItemTag(tag=None, "
            "item_id='minecraft:oak_slab'), count=3)",
        ),
        ("craft oak planks using 1 oak log", "Crafted 4 minecraft:oak_planks"),
        ("inventory", "Inventory: [oak planks] (4) "),
        ("craft 1 oak slab using 3 oak planks", "Crafted 6 minecraft:oak_slab"),
    ):
        result = await act(env, action)
        assert result.messages[0].content == reply
    assert (result.reward, result.terminated) == (1.0, True)
