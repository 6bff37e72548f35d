"""BabyAI in AgentGym's words: its observations, recorded from its own code on the same levels.

`agentgym_texts.json` has two episodes in full, and for indices 0 to 79 (all 40 levels, twice) up to
12 actions with the hash of all observations and the last reward. The actions were drawn from
AgentGym's own lists, with a few impossible and unknown ones among them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from turns import act

from ludus.core.types import Task
from ludus.envs.babyai.env import BabyAI
from ludus.tasks.agentgym import BABYAI_LEVELS

RECORDED = json.loads(Path(__file__).with_name("agentgym_texts.json").read_text("utf-8"))


def task(index: int) -> Task:
    return BabyAI.task(BABYAI_LEVELS[index % 40], index // 40)


async def play(index: int, actions: list[str]) -> tuple[list[str], float | None, bool]:
    """The observations, the last reward, and whether the episode is over."""
    env = BabyAI(texts="agentgym")
    texts = [(await env.reset(task(index))).messages[0].content]
    for action in actions:
        result = await act(env, action)
        texts.append(result.messages[0].content)
    return texts, result.reward, result.done


@pytest.mark.parametrize("episode", RECORDED["episodes"], ids=lambda e: str(e["index"]))
async def test_observations_are_agentgyms(episode: dict[str, Any]) -> None:
    texts, *_ = await play(episode["index"], episode["actions"])
    assert texts == episode["texts"]


async def test_observations_of_all_levels_are_agentgyms() -> None:
    for row in RECORDED["hashed"]:
        texts, reward, done = await play(row["index"], row["actions"])
        assert reward == pytest.approx(row["reward"]), row["index"]
        assert done is (row["reward"] > 0), row["index"]
        found = hashlib.sha256("\x00".join(texts).encode()).hexdigest()[:16]
        assert found == row["sha"], (row["index"], texts)


async def test_impossible_and_unknown_actions_take_no_step() -> None:
    env = BabyAI(texts="agentgym")
    await env.reset(task(4))
    for action in ("check available actions", "", "fly", "drop", "pickup green key 9"):
        result = await act(env, action)
        assert result.info["num_steps"] == 0
        assert '\nAvailable actions: ["turn left", "turn right"' in result.messages[0].content


async def test_the_expert_wins_in_agentgyms_actions() -> None:
    for index in (0, 4, 9, 16, 21, 41):
        env, done = BabyAI(texts="agentgym"), False
        await env.reset(task(index))
        for _ in range(100):
            result = await act(env, env.expert_action())
            if done := result.terminated:
                break
        assert done, BABYAI_LEVELS[index % 40]
        assert (result.reward or 0) > 0
        assert "\n The task is completed.\nAvailable" in result.messages[0].content


async def test_the_level_is_rendered_as_a_png() -> None:
    env = BabyAI()
    await env.reset(task(4))
    head, _, body = env.inspect("render").partition(",")
    assert head == "data:image/png;base64"
    png = base64.b64decode(body)
    width, height, *format = struct.unpack(">IIBBBBB", png[16:29])
    assert (png[:8], format) == (b"\x89PNG\r\n\x1a\n", [8, 2, 0, 0, 0])
    start = png.index(b"IDAT")
    (size,) = struct.unpack(">I", png[start - 4 : start])
    rows = zlib.decompress(png[start + 4 : start + 4 + size])
    assert len(rows) == height * (3 * width + 1)
    assert len(set(rows)) > 10, "it is not of one color"
    with pytest.raises(LookupError, match="has no 'goals'"):
        env.inspect("goals")
