"""ScienceWorld on its real engine: tasks, splits, rewards, the expert, faults."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from turns import act, say, win

pytest.importorskip("scienceworld", reason="needs the extra scienceworld")

from ludus.core.errors import ConfigError, EnvError
from ludus.core.types import Spec, Task, ToolCall
from ludus.envs.base import NoExpert
from ludus.envs.checks.check import check_env
from ludus.envs.java.machine import find_java

try:
    find_java("scienceworld")
except ConfigError as missing:
    pytest.skip(str(missing), allow_module_level=True)

from scienceworld.constants import ID2TASK

from ludus.envs.java.scienceworld import ScienceWorld
from ludus.envs.java.scienceworld_commands import COMMANDS, read_command, write_command
from ludus.envs.java.scienceworld_tasks import KINDS, SPLITS, agentgym_task, num_agentgym_tasks


@pytest.fixture(scope="module", autouse=True)
def _no_jvm_is_left() -> Iterator[None]:
    yield
    ScienceWorld(num_jvms=1)._pool.shutdown()


async def playing(kind: str, variation: int = 0, **args: object) -> ScienceWorld:
    env = ScienceWorld(num_jvms=1, **args)  # type: ignore[arg-type]
    await env.reset(Task(id="x", data={"task": kind, "variation": variation}))
    return env


async def test_the_table_is_the_engine_s() -> None:
    assert [(kind.number, kind.name) for kind in KINDS.values()] == list(ID2TASK.items())
    env = await playing("find-non-living-thing")
    assert env._session is not None
    java = env._session.jvm._gateway.jvm

    def sizes(engine: Any) -> dict[str, list[int]]:
        getattr(engine, "taskMaker_$eq")(java.scienceworld.tasks.TaskMaker1())
        found = {}
        for name in KINDS:
            getattr(engine, "taskStr_$eq")(name)
            splits = engine.getVariationsTrain(), engine.getVariationsDev()
            found[name] = [
                x for split in (*splits, engine.getVariationsTest()) for x in ends(split)
            ]
        return found

    def ends(split: Any) -> tuple[int, int, int]:
        return split[0], split[-1], len(split)

    ours = {
        name: [x for split in SPLITS for x in ends(kind.variations(split))]
        for name, kind in KINDS.items()
    }
    assert env._session.run(sizes) == ours
    await env.close()
    totals = [sum(len(kind.variations(split)) for kind in KINDS.values()) for split in SPLITS]
    assert totals == [3592, 1796, 1819]


def test_agentgym_s_numbers() -> None:
    assert num_agentgym_tasks() == 4639
    assert agentgym_task(0) == ("boil", 0)
    assert agentgym_task(30) == ("melt", 0)
    assert agentgym_task(4638) == ("identify-life-stages-2", 9)
    assert len({agentgym_task(index) for index in range(4639)}) == 4639
    for index in (-1, 4639):
        with pytest.raises(IndexError, match="AgentGym has 0 to 4638"):
            agentgym_task(index)
    assert ScienceWorld.agentgym_task(31).data == {"task": "melt", "variation": 1}


@pytest.mark.slow
async def test_it_conforms() -> None:
    tasks = [
        ScienceWorld.task(tier, seed)
        for seed, tier in enumerate(["lifespan-longest-lived", "lifespan-shortest-lived/test"])
    ]
    assert (
        await check_env(Spec(name="scienceworld", args={"num_jvms": 1}), tasks=tasks, timeout_s=60)
        == []
    )


async def test_success_alone_may_be_the_reward() -> None:
    env = await playing("lifespan-longest-lived", reward="success")
    result = await act(env, env.expert_action())
    rewards = [result.reward]
    while not result.done:
        result = await act(env, env.expert_action())
        rewards.append(result.reward)
    assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
    assert result.info["score"] == 100


@pytest.mark.slow
async def test_the_expert_teleports_where_that_is_allowed_and_wins() -> None:
    walked, _ = await win(await playing("find-non-living-thing"))
    env = await playing("find-non-living-thing", simplifications=["easy"])
    assert env.expert_action() == "teleport to kitchen"
    teleported, _ = await win(env)
    assert walked == teleported == pytest.approx(1.0)
    # Nothing has grown yet when it teleports: here it has to walk.
    env = await playing("identify-life-stages-2", simplifications=["easy"])
    assert not env.expert_action().startswith("teleport")
    assert (await win(env))[0] == pytest.approx(1.0)


async def test_the_expert_wins_and_the_score_is_the_reward() -> None:
    env = await playing("lifespan-longest-lived", 3)
    total, result = await win(env)
    assert total == pytest.approx(1.0)
    assert result.terminated
    assert result.info["success"]
    assert result.info["score"] == 100
    assert result.messages[0].content.endswith("The task is completed.")
    with pytest.raises(EnvError, match="call reset first"):
        await act(env, "look around")
    with pytest.raises(NoExpert):
        env.expert_action()


async def test_the_wrong_focus_takes_back_what_was_earned() -> None:
    env = await playing("lifespan-longest-lived", 0)
    earned = sum([(await act(env, env.expert_action())).reward or 0.0 for _ in range(4)])
    assert earned == pytest.approx(0.5)
    result = await act(env, "focus on air")
    assert result.reward == pytest.approx(-0.5)
    assert (result.terminated, result.info["score"], result.info["success"]) == (True, -100, False)
    assert "wrong thing to focus on" in result.messages[0].content


async def test_off_the_gold_path_there_is_no_expert() -> None:
    env = await playing("find-non-living-thing")
    assert await say(env, "dance") == "No known action matches that input."
    with pytest.raises(NoExpert, match="has left the gold path"):
        env.expert_action()
    await env.close()


async def test_a_limit_of_steps_truncates() -> None:
    env = await playing("find-non-living-thing", max_steps=2)
    assert not (await act(env, "wait1")).done
    result = await act(env, "wait1")
    assert (result.terminated, result.truncated) == (False, True)
    assert result.messages[0].content.endswith("out of steps.")


async def test_a_killed_jvm_is_an_error_of_the_environment_and_the_next_reset_works() -> None:
    env = await playing("find-non-living-thing")
    assert env._session is not None
    os.kill(env._session.jvm.pid, signal.SIGKILL)
    with pytest.raises(EnvError, match=r"JVM .* died"):
        await act(env, "look around")
    observation = await env.reset(ScienceWorld.task("find-non-living-thing", 0))
    assert observation.messages[0].content.startswith("Your task is to find a(n) non-living thing.")
    await env.close()


async def test_simplifications_are_the_engine_s() -> None:
    env = await playing("find-plant", simplifications=["teleportAction"])
    assert "teleport_to" in {tool.name for tool in env.tools()}
    assert "teleport" in (await say(env, "teleport to kitchen")).lower()
    await env.close()
    assert env._pool is not ScienceWorld(num_jvms=1)._pool
    env._pool.shutdown()
    with pytest.raises(ConfigError, match=r"'teleport' is not a simplification .*teleportAction"):
        ScienceWorld(simplifications=["teleport"])


def test_every_tool_s_call_is_read_back() -> None:
    env = ScienceWorld(simplifications=["easy"])
    assert [tool.name for tool in env.tools()] == list(COMMANDS)
    for tool in env.tools():
        arguments: dict[str, Any] = dict.fromkeys(tool.parameters["properties"], "red box")
        if tool.name == "choose":
            arguments = {"number": 0}
        call = ToolCall(name=tool.name, arguments=arguments)
        assert read_command(write_command(call)) == call
    for text in ("drop wire", "examine wire", "pour cup of a in b into red box in kitchen"):
        assert write_command(read_command(text)).split()[-1] == text.split()[-1]
    with pytest.raises(ValueError, match="there is no such tool"):
        env.text_of(ToolCall(name="opened", arguments={"thing": "x"}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "data.task None is not a task"),
        ({"task": "boild", "variation": 0}, "did you mean boil"),
        (
            {"task": "boil", "variation": 30},
            "data.variation 30 is not a variation of boil: 0 to 29",
        ),
        (
            {"task": "boil", "variation": "1"},
            "data.variation '1' is not a variation of boil: 0 to 29",
        ),
    ],
)
async def test_tasks_that_do_not_exist(data: dict[str, object], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        await ScienceWorld().reset(Task(id="x", data=data))


def test_tiers() -> None:
    assert len(ScienceWorld.tiers()) == 90
    assert ScienceWorld.num_variations("boil/dev") == 7
    assert ScienceWorld.task("boil/test", 0).data == {"task": "boil", "variation": 21}
    assert len({ScienceWorld.task(None, seed).data["task"] for seed in range(30)}) == 30
    for tier, near in {"boild": "boil", "boil/tets": "test"}.items():
        with pytest.raises(ConfigError, match=rf"is not a tier of scienceworld.*mean {near}"):
            ScienceWorld.task(tier, 0)
