"""BabyAI: every level plays, reads as it should, and its expert wins."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys

import pytest
from turns import act
from variants import variants

from ludus.core.errors import ConfigError, EnvError
from ludus.core.types import Message, StepResult, Task, ToolCall
from ludus.envs.babyai import world as babyai_world
from ludus.envs.babyai.env import PRIMITIVES, BabyAI
from ludus.envs.babyai.world import LEVELS, look, make_level
from ludus.envs.base import NoExpert

STRICT = ("OpenDoorsOrderN2Debug", "OpenDoorsOrderN4Debug")


async def start(level: str, seed: int, **args: object) -> tuple[BabyAI, str]:
    env = BabyAI(**args)  # type: ignore[arg-type]
    opening = await env.reset(BabyAI.task(level, seed))
    return env, opening.messages[0].content


async def expert_plays(env: BabyAI) -> tuple[StepResult, list[str]]:
    actions = []
    while True:
        actions.append(env.expert_action())
        result = await act(env, actions[-1])
        if result.done:
            return result, actions


def test_all_levels_are_there() -> None:
    assert len(LEVELS) == 96
    assert LEVELS["GoToObjS6"] == "BabyAI-GoToObjS6-v1"
    assert sorted(BabyAI.tiers()) == sorted(LEVELS)
    assert tuple(BabyAI.tiers()[-2:]) == STRICT


@pytest.mark.parametrize("seed", variants([0, 1], [0]))
@pytest.mark.parametrize("actions", variants(["primitive", "macro"], ["macro"]))
async def test_the_expert_wins_on_every_level(actions: str, seed: int) -> None:
    lost = []
    for level in BabyAI.tiers():
        env, text = await start(level, seed, actions=actions)
        assert text.startswith("mission: ")
        result, _ = await expert_plays(env)
        assert result.info["success"] == (result.reward is not None and result.reward > 0)
        if not result.info["success"]:
            lost.append(level)
    assert set(lost) <= set(STRICT)


async def test_reward_is_that_of_minigrid() -> None:
    env, _ = await start("GoToLocal", 3)
    result, actions = await expert_plays(env)
    assert result.terminated
    assert result.reward == pytest.approx(1 - 0.9 * len(actions) / 64)
    assert result.reward is not None
    assert result.reward >= BabyAI.success_at


async def test_macro_actions_count_their_steps() -> None:
    env, _ = await start("GoToLocal", 3, actions="macro")
    result, actions = await expert_plays(env)
    assert len(actions) < result.info["num_steps"]
    assert result.reward == pytest.approx(1 - 0.9 * result.info["num_steps"] / 64)


async def test_what_is_seen_is_told() -> None:
    env, text = await start("GoToLocal", 0)
    assert text == (
        "mission: go to the green ball.\n"
        "yellow key 1 forward 1 left, grey ball 1 forward 1 right, purple key 2 forward 1 left, "
        "green key 2 forward 1 right, green ball 3 forward, red box 2 forward 2 right, "
        "green key 4 forward 2 right, grey ball 5 forward 1 right. wall 6 forward, wall 2 left."
    )
    view = (await act(env, "go forward")).messages[0].content
    assert view.startswith("yellow key 1 left, grey ball 1 right, ")
    assert (await act(env, "go forward")).messages[0].content == "success."


def test_sight_is_that_of_minigrid() -> None:
    rng = random.Random(0)
    for level in ("GoToLocal", "KeyCorridor", "BossLevel", "GoToOpen"):
        world = make_level(level, 1)
        for _ in range(150):
            world.step(rng.choice([0, 1, 2, 2, 2, 3, 4, 5]))
            grid, mask = world.gen_obs_grid()
            theirs = {
                (6 - j, i - 3): grid.get(i, j)
                for i in range(7)
                for j in range(7)
                if mask[i, j] and (i, j) != (3, 6)
            }
            ours = {(c.forward, c.side): c.content for c in look(world)}
            outside = theirs.keys() - ours.keys()
            assert ours.keys() <= theirs.keys()
            assert all(theirs[place].type == "wall" for place in outside)
            assert all(ours[place] is theirs[place] for place in ours)


@pytest.mark.parametrize("actions", ["primitive", "macro"])
@pytest.mark.parametrize(
    "text", ["fly", "", "go to unicorn 1", "go through red ball 1", "x" * 10**6]
)
async def test_an_unknown_action_is_told_and_costs_a_step(text: str, actions: str) -> None:
    env, _ = await start("GoToLocal", 0, actions=actions)
    result = await act(env, text)
    assert "no such" in result.messages[0].content
    assert len(result.messages[0].content) < 1000
    assert result.info["num_steps"] == 1
    assert result.reward == 0.0


async def test_an_action_without_effect_is_told() -> None:
    env, _ = await start("GoToLocal", 0)
    assert (await act(env, "drop")).messages[0].content.startswith("nothing changed. ")
    result = await act(env, "Turn Left.")
    assert not result.messages[0].content.startswith("nothing changed")


async def test_macros_open_doors_and_go_through() -> None:
    env, text = await start("OpenDoor", 4, actions="macro")
    while "toggle and go through" not in text:
        text = (await act(env, "turn left")).messages[0].content
    action = next(a for a in text.split("actions: ")[1].rstrip(".").split(", ") if "through" in a)
    result = await act(env, action)
    assert result.info["num_steps"] > 3
    assert result.done or "nothing changed" not in result.messages[0].content


@pytest.mark.parametrize("verb", ["pick up", "pickup"])
async def test_what_agentgyms_prompt_teaches_is_understood(verb: str) -> None:
    """`pick up <obj> <id>` from afar, and doors named as they are shown."""
    env, text = await start("PickupLoc", 0, actions="macro")
    thing = next(a.removeprefix("go to ") for a in text.split(", ") if a.startswith("go to "))
    assert f"{thing}: 1 forward." not in text
    result = await act(env, f"{verb} {thing}")
    assert result.info["num_steps"] > 1
    assert result.done or f"carrying {thing}" in result.messages[0].content
    env, text = await start("OpenDoor", 4, actions="macro")
    while "closed" not in text:
        text = (await act(env, "turn left")).messages[0].content
    door = next(part for part in re.split(r"\n|, ", text) if part.startswith("closed "))
    result = await act(env, f"{verb} {door.partition(':')[0]}")
    assert result.messages[0].content.startswith("that cannot be picked up. ")
    before = result.info["num_steps"]
    result = await act(env, f"toggle and go through {door.partition(':')[0]}")
    assert result.info["num_steps"] > before + 3  # there, opened, and through


async def test_full_hands_pick_nothing_up() -> None:
    env, text = await start("PutNextLocal", 1, actions="macro")
    one, other = [a[6:] for a in text.rstrip(".").split(", ") if a.startswith("go to ")][:2]
    text = (await act(env, f"pick up {one}")).messages[0].content
    assert f"carrying {one}" in text
    said = (await act(env, f"pick up {other}")).messages[0].content
    assert said.startswith(("your hands are full. ", "you see no such object. "))
    assert f"carrying {one}" in said


async def test_every_macro_that_is_offered_has_an_effect() -> None:
    rng = random.Random(1)
    for level in ("GoTo", "UnlockPickupDist", "Open"):
        env, text = await start(level, 2, actions="macro")
        for _ in range(40):
            offered = text.split("actions: ")[1].rstrip(".").split(", ")
            result = await act(env, rng.choice(offered))
            text = result.messages[0].content
            assert "nothing changed" not in text
            if result.done:
                break


async def test_the_expert_can_join_at_any_turn() -> None:
    for seed in range(5):
        env, _ = await start("GoToSeqS5R2", seed)
        for action in random.Random(seed).choices(list(PRIMITIVES)[:3], k=6):
            if (await act(env, action)).done:
                break
        else:
            assert (await expert_plays(env))[0].info["success"]


async def test_an_expert_that_plans_for_ever_says_so() -> None:
    env, _ = await start("UnlockToUnlock", 4)
    with pytest.raises(NoExpert, match="UnlockToUnlock, seed 4: the bot plans without end"):
        await expert_plays(env)


async def test_endless_generation_takes_a_derived_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = make_level("GoToLocal", 7)
    draws = 10**6
    monkeypatch.setattr(babyai_world, "MAX_DRAWS", 60)
    seeds = [s for s in range(20) if make_level("GoToLocalS5N2", s) is not None]
    assert seeds == list(range(20))
    monkeypatch.setattr(babyai_world, "MAX_DRAWS", 3)
    with pytest.raises(EnvError, match="GoToLocal cannot be generated from seed 7"):
        make_level("GoToLocal", 7)
    monkeypatch.setattr(babyai_world, "MAX_DRAWS", draws)
    assert make_level("GoToLocal", 7).mission == ordinary.mission


async def test_the_task_names_the_level_and_the_config_the_actions() -> None:
    env = BabyAI(level="BabyAI-GoToObj-v0", actions="macro")
    opening = await env.reset(Task(id="x", data={"seed": 1}))
    assert opening.info["level"] == "GoToObj"
    assert "actions: " in opening.messages[0].content
    opening = await env.reset(BabyAI.task("OpenDoor", 1))
    assert opening.info["level"] == "OpenDoor"
    assert "actions: " in opening.messages[0].content


async def test_max_steps_cuts_the_episode() -> None:
    env, _ = await start("GoToLocal", 0, max_steps=2)
    assert not (await act(env, "turn left")).done
    result = await act(env, "nonsense")
    assert result.truncated
    assert not result.terminated
    assert not result.info["success"]
    with pytest.raises(EnvError, match="call reset first"):
        await act(env, "turn left")


async def test_tool_calls() -> None:
    env, _ = await start("GoToLocal", 0)
    call = env.call_of("turn left")
    assert call == ToolCall(name="act", arguments={"action": "turn left"})
    result = await env.step(Message(role="assistant", tool_calls=[call, call]))
    assert [m.role for m in result.messages] == ["tool", "tool"]
    assert "ignored" in result.messages[1].content
    assert result.info["num_steps"] == 1
    with pytest.raises(ValueError, match="there is act"):
        env.text_of(ToolCall(name="fly"))
    assert env.tools()[0].parameters["properties"]["action"]["enum"] == list(PRIMITIVES)


async def test_wrong_tasks_are_named() -> None:
    with pytest.raises(ConfigError, match="did you mean GoToLocal"):
        BabyAI(level="GoToLocl")
    with pytest.raises(EnvError, match=r"no data\.seed"):
        await BabyAI().reset(Task(id="x"))
    with pytest.raises(EnvError, match="natural number"):
        await BabyAI().reset(Task(id="x", data={"seed": -1}))


async def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    for seed in range(20):
        await start("PutNextLocalS5N3", seed)  # rejects many samples
    assert capfd.readouterr() == ("", "")


PROBE = """
import asyncio, hashlib, sys
from ludus.core.types import Message
from ludus.envs.babyai.env import BabyAI
async def main():
    digest = hashlib.sha256()
    for seed in range(6):
        env = BabyAI(actions="macro")
        opening = await env.reset(BabyAI.task("MiniBossLevel", seed))
        digest.update(opening.messages[0].content.encode())
        done = False
        while not done:
            result = await env.step(Message(role="assistant", content=env.expert_action()))
            digest.update(result.model_dump_json().encode())
            done = result.done
    print(digest.hexdigest())
asyncio.run(main())
"""


def test_episodes_do_not_depend_on_the_hash_seed() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-W", "error", "-c", PROBE],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1
    assert len(next(iter(digests))) == 65, "and nothing else was printed"
