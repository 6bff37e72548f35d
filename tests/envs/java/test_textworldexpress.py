"""TextWorldExpress on its real engine: all games, won by their gold paths."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from turns import act, win

pytest.importorskip("textworld_express", reason="needs the extra textworldexpress")

from ludus.core.errors import ConfigError, EnvError
from ludus.core.types import Spec, StepResult, Task, ToolCall
from ludus.envs.base import NoExpert
from ludus.envs.checks.check import check_env
from ludus.envs.java.machine import find_java

try:
    find_java("textworldexpress")
except ConfigError as missing:
    pytest.skip(str(missing), allow_module_level=True)

from ludus.envs.java.textworldexpress import FIRST_SEEDS, GAMES, NUM_SEEDS, TextWorldExpress


@pytest.fixture(scope="module", autouse=True)
def _no_jvm_is_left() -> Iterator[None]:
    yield
    TextWorldExpress()._pool.shutdown()


@pytest.mark.parametrize("game", GAMES)
async def test_the_expert_wins_every_game(game: str) -> None:
    for fold in FIRST_SEEDS:
        env = TextWorldExpress()
        await env.reset(TextWorldExpress.task(f"{game}/{fold}", 7))
        total, result = await win(env)
        assert total == pytest.approx(1.0)
        assert result.terminated
        assert result.info["success"]


async def expert_path(env: TextWorldExpress, task: Task) -> list[str]:
    """The expert's actions in an episode of the task."""
    await env.reset(task)
    actions: list[str] = []
    done = False
    while not done:
        actions.append(env.expert_action())
        done = (await act(env, actions[-1])).done
    return actions


@pytest.mark.parametrize("game", GAMES)
async def test_a_task_has_one_path_of_the_expert(game: str) -> None:
    """Also after other tasks, in the other order, and in another JVM."""
    tasks = [TextWorldExpress.task(game, seed) for seed in range(5)]
    env, other_jvm = TextWorldExpress(num_jvms=1), TextWorldExpress()
    first = [await expert_path(env, task) for task in tasks]
    await expert_path(env, TextWorldExpress.task("arithmetic", 8))
    assert [await expert_path(env, task) for task in reversed(tasks)] == first[::-1]
    assert [await expert_path(other_jvm, task) for task in tasks[2:]] == first[2:]


async def test_the_expert_walks_straight_to_the_coin() -> None:
    """It wins, with no room twice and no door opened that it does not go through."""
    steps = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
    env = TextWorldExpress()
    lengths = []
    for seed in range(20):
        await env.reset(TextWorldExpress.task("coin", seed))
        place, rooms, opened, total, done = (0, 0), {(0, 0)}, "", 0.0, False
        while not done:
            action = env.expert_action()
            *what, way = action.split()
            if what == ["move"]:
                assert opened in ("", way)
                place, opened = (place[0] + steps[way][0], place[1] + steps[way][1]), ""
                assert place not in rooms, seed
                rooms.add(place)
            elif action != "take coin":
                assert what == ["open", "door", "to"]
                opened = way
            result = await act(env, action)
            total, done = total + (result.reward or 0.0), result.done
        assert (action, opened) == ("take coin", "")
        assert total == pytest.approx(1.0)
        lengths.append(result.info["num_steps"])
    assert sum(lengths) / len(lengths) < 6, "the engine's random walks take 15"


async def test_a_capital_in_an_action_s_name_is_found() -> None:
    """The engine has T-shirts, and actions come in lower case."""
    env = TextWorldExpress()
    await env.reset(Task(id="x", data={"game": "twc", "fold": "dev", "seed": 10_004}))
    total, _ = await win(env)
    assert total == pytest.approx(1.0)


async def test_the_seeds_are_the_engine_s() -> None:
    env = TextWorldExpress()
    await env.reset(TextWorldExpress.task("coin", 0))
    assert env._session is not None
    folds = env._session.run(
        lambda engine: [
            list(seeds())
            for seeds in (engine.getSeedsTrain, engine.getSeedsDev, engine.getSeedsTest)
        ]
    )
    ours = [list(range(first, first + NUM_SEEDS)) for first in FIRST_SEEDS.values()]
    assert [sorted(seeds) for seeds in folds] == ours
    await env.close()


async def test_it_conforms() -> None:
    tasks = [TextWorldExpress.task(tier, 3) for tier in ("coin", "twc/dev", "arithmetic")]
    assert await check_env(Spec(name="textworldexpress"), tasks=tasks, timeout_s=60) == []


async def test_the_actions_are_listed_on_request_and_mistakes_told() -> None:
    task = TextWorldExpress.task("coin", 3)
    shown, hidden = TextWorldExpress(), TextWorldExpress(list_actions=False, max_steps=1)
    with_actions = (await shown.reset(task)).messages[0].content
    without = (await hidden.reset(task)).messages[0].content
    assert with_actions.startswith(without)
    assert "take coin" in with_actions.splitlines()[-1]
    reply = (await act(shown, "dance")).messages[0].content
    assert reply.startswith("Unknown action")
    result = await act(hidden, "dance")
    assert (result.terminated, result.truncated, result.reward) == (False, True, 0)
    await shown.close()


@pytest.mark.parametrize("game", sorted(set(GAMES) - {"coin"}))
async def test_off_its_path_there_is_no_expert(game: str) -> None:
    env = TextWorldExpress()
    await env.reset(TextWorldExpress.task(game, 3))
    env.expert_action()
    await act(env, "dance")
    with pytest.raises(NoExpert):
        env.expert_action()
    await env.close()


async def test_the_expert_of_coin_goes_on_from_where_the_policy_stands() -> None:
    """After a mistake, after the first door of another way, and after turning back."""
    back = {"north": "south", "south": "north", "east": "west", "west": "east"}
    for seed in range(10):
        env = TextWorldExpress()
        first = (await env.reset(TextWorldExpress.task("coin", seed))).messages[0].content
        straight = env.expert_action()
        await act(env, "dance")
        assert env.expert_action() == straight
        listed = [action.strip() for action in first.splitlines()[-1].split(",")]
        doors = [a for a in listed if "open door" in a and a != straight]
        for door in doors[:1]:
            way = door.split()[-1]
            await act(env, f"open door to {way}")
            await act(env, f"move {way}")
            assert env.expert_action() == f"move {back[way]}"
        total, result = await win(env)
        assert total == pytest.approx(1.0)
        assert result.info["success"]
        await env.close()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"game": "coins", "fold": "train", "seed": 0}, "did you mean coin"),
        ({"game": "coin", "fold": "tests", "seed": 0}, "did you mean test"),
        ({"game": "coin", "fold": "test", "seed": 0}, "data.seed 0 is not 20000 to 20999"),
    ],
)
async def test_tasks_that_do_not_exist(data: dict[str, object], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        await TextWorldExpress().reset(Task(id="x", data=data))


def test_tiers() -> None:
    assert len(TextWorldExpress.tiers()) == 24
    assert TextWorldExpress.task("coin/dev", 1001).data["seed"] == 10_001
    assert {TextWorldExpress.task(None, seed).data["game"] for seed in range(8)} == set(GAMES)
    for tier, near in {"coins": "coin", "coin/tests": "test"}.items():
        with pytest.raises(ConfigError, match=rf"not a tier of textworldexpress.*mean {near}"):
            TextWorldExpress.task(tier, 0)
    with pytest.raises(ValueError, match="there is act"):
        TextWorldExpress().text_of(ToolCall(name="go"))


@pytest.mark.parametrize("game", GAMES)
async def test_episodes_of_one_task_do_not_disturb_each_other(game: str) -> None:
    """As in a group: several at a time, in one JVM, each at another step."""
    task = TextWorldExpress.task(game, 3)
    alone = TextWorldExpress(num_jvms=1)
    opening = (await alone.reset(task)).messages
    turns: list[tuple[str, StepResult]] = []
    while not turns or not turns[-1][1].done:
        action = alone.expert_action()
        turns.append((action, await act(alone, action)))
    envs = [TextWorldExpress(num_jvms=1) for _ in range(3)]
    for step in range(len(turns) + len(envs)):
        for lag, env in enumerate(envs):
            if step == lag:
                assert (await env.reset(task)).messages == opening
            elif lag < step <= lag + len(turns):
                action, result = turns[step - lag - 1]
                assert await act(env, action) == result, (lag, step)


def test_nor_do_those_that_begin_at_the_same_time() -> None:
    """Each begins in a thread of its own, as in a service."""
    task = TextWorldExpress.task("sorting", 5)

    async def play(_: int) -> list[StepResult]:
        env = TextWorldExpress(num_jvms=1)
        await env.reset(task)
        begun.wait(60)
        results = [await act(env, env.expert_action())]
        while not results[-1].done:
            results.append(await act(env, env.expert_action()))
        return results

    begun = threading.Barrier(24)
    with ThreadPoolExecutor(24) as pool:
        played = list(pool.map(lambda number: asyncio.run(play(number)), range(24)))
    assert all(results == played[0] for results in played)
    assert played[0][-1].info["success"]
