"""ALFWorld on its real engine: the texts, the games, the expert, faults."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from turns import act, say
from variants import variants

pytest.importorskip("textworld", reason="needs the extra alfworld")
pytest.importorskip("alfworld", reason="needs the extra alfworld")

from ludus.core.errors import ConfigError, EnvError
from ludus.core.types import Message, Task, ToolCall
from ludus.envs.alfworld import cache as cache_files
from ludus.envs.alfworld import engine as alfworld_engine
from ludus.envs.alfworld import games as alfworld_games
from ludus.envs.alfworld.env import COMMANDS, ALFWorld, command_of
from ludus.envs.alfworld.scenes import TASK_TYPES, TREATMENTS, floor_plans, generate
from ludus.envs.checks.check import check_env
from ludus.tasks.readers import read_env

SMALL = "pick_and_place_simple:bathroom"
"""A tier whose rooms are small, and so its games quick."""


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "data"))


async def play(env: ALFWorld, task: Task) -> tuple[bool, list[str]]:
    """The expert's episode: whether it won, and its actions."""
    await env.reset(task)
    actions: list[str] = []
    while len(actions) < env.max_turns:
        actions.append(env.expert_action())
        assert env.text_of(env.call_of(actions[-1])) == actions[-1]
        result = await act(env, actions[-1])
        if result.done:
            assert result.reward == 1.0
            return result.info["success"], actions
    return False, actions


@pytest.mark.parametrize("tier", ALFWorld.tiers())
async def test_the_expert_wins_every_type_on_both_splits(tier: str) -> None:
    env = ALFWorld()
    won, actions = await play(env, ALFWorld.task(tier, 4))
    assert won, actions
    assert len(actions) <= 12
    await env.close()


async def test_the_searching_expert_goes_only_by_what_it_has_seen() -> None:
    env, task = ALFWorld(expert="search"), ALFWorld.task(SMALL, 3)
    told = (await env.reset(task)).messages[0].content
    for _ in range(env.max_turns):
        action = env.expert_action()
        call = env.call_of(action)
        assert all(name in told for name in call.arguments.values()), action
        result = await act(env, action)
        told += result.messages[0].content
        if result.done:
            break
    assert result.info["success"]
    await env.close()


async def test_an_expert_joins_at_any_turn() -> None:
    """It rids the hands of what a random player took, and wins from there."""
    rng = random.Random(0)
    env = ALFWorld()
    for tier in ("pick_two_obj_and_place:bathroom", "look_at_obj_in_light"):
        reset = await env.reset(ALFWorld.task(tier, 1))
        result: Any = reset
        for _ in range(25):
            takes = [c for c in result.info["available_actions"] if c.startswith("take ")]
            result = await act(env, rng.choice(takes or result.info["available_actions"]))
            assert not result.done, "nobody wins by chance"
        for _ in range(20):
            result = await act(env, env.expert_action())
            if result.done:
                break
        assert result.info["success"]
    await env.close()


def stock_says(game: dict[str, str], commands: list[str]) -> list[tuple[str, list[str]]]:
    """The stock engine's answers, and its commands in the order that it looks for one in."""
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

    alfworld_engine.fast(False)
    try:
        infos = textworld.EnvInfos(admissible_commands=True, won=True)
        stock = AlfredDemangler(textworld.envs.PddlEnv(infos), shuffle=False)
        stock.load({key: game[key] for key in ("pddl_domain", "grammar", "pddl_problem")})
        state = stock.reset()
        said = [(state.feedback, list(dict.fromkeys(state["_valid_commands"])))]
        for command in commands:
            state, _, _ = stock.step(command)
            said.append((state.feedback, list(dict.fromkeys(state["_valid_commands"]))))
        return said
    finally:
        alfworld_engine.fast()


def aimless(engine: alfworld_engine.Engine, num: int) -> tuple[list[str], list[Any]]:
    """Commands drawn from what is possible and what is not, and what is said to them."""
    rng, commands, said = random.Random(1), [], []
    for _ in range(num):
        choices = [*engine.commands, "open sesame 1", "examine sinkbasin 1"]
        commands.append(rng.choice(choices))
        said.append((engine.step(commands[-1]), list(engine._operators)))
    return commands, said


STOCK = ["pick_clean_then_place_in_recep:bathroom", "look_at_obj_in_light:bedroom"]


@pytest.mark.parametrize("tier", variants(STOCK, STOCK[:1]))
async def test_the_texts_are_those_of_the_stock_engine(tier: str) -> None:
    """Openings, answers and possible commands, through won and aimless episodes."""
    task = ALFWorld.task(tier, 1)
    env, game = ALFWorld(), alfworld_games.game_of(task)
    _, actions = await play(env, task)
    await env.close()
    engine = alfworld_engine.Engine()
    ours: list[Any] = [(engine.reset(game), list(engine._operators))]
    ours += [(engine.step(action), list(engine._operators)) for action in actions]
    assert engine.won
    assert engine.commands == sorted(engine._operators)
    commands, said = aimless(engine, 12)
    assert ours + said == stock_says(game, [*actions, *commands])


def test_commands_that_depend_on_the_state_are_not_remembered() -> None:
    game = alfworld_games.game_of(ALFWorld.task(SMALL, 1))
    asking = "go to {r} with [{o.name | holds(a:agent, o:object)}]"
    place = "go to [{r.name | receptacleatlocation(r:receptacle, lend:location)}]"
    assert place in game["grammar"]
    game["grammar"] = game["grammar"].replace(place, asking)
    engine = alfworld_engine.Engine()
    opening = (engine.reset(game), list(engine._operators))
    thing, where = next(iter(engine.facts("inreceptacle")["inreceptacle"]))
    commands = [
        f"go to {where} with nothing",
        f"open {where}",
        f"take {thing} from {where}",
        "look",
    ]
    said = [(engine.step(command), list(engine._operators)) for command in commands]
    assert any(command.endswith(f"with {thing}") for command in engine.commands)
    assert [opening, *said] == stock_says(game, commands)


async def test_what_a_model_may_say() -> None:
    env = ALFWorld(guide=True)
    opening = (await env.reset(ALFWorld.task(SMALL, 0))).messages[0].content
    assert opening.startswith("You are in a room and have a task.")
    assert "TextWorld" not in opening
    assert opening.splitlines()[-1].startswith("Your task is to: ")
    for action in ("", "fly away", "put", "take 1 from 2", "go to", "help me"):
        assert await say(env, action) == "Nothing happens."
    assert await say(env, "Inventory.") == "You are not carrying anything."
    for action in ("go to toilet 1", "look"):
        call = env.call_of(action)
        result = await env.step(Message(role="assistant", tool_calls=[call]))
        assert "toilet 1" in result.messages[0].content
        assert result.messages[0].role == "tool"
    with pytest.raises(ValueError, match="there are go_to, open"):
        env.text_of(ToolCall(name="fly"))
    with pytest.raises(ValueError, match="place is missing"):
        env.text_of(ToolCall(name="go_to"))
    await env.close()


async def test_tools_cover_the_commands_of_an_episode() -> None:
    env = ALFWorld()
    reset = await env.reset(ALFWorld.task("pick_clean_then_place_in_recep:bathroom", 0))
    commands = set(reset.info["available_actions"])
    while True:
        result = await act(env, env.expert_action())
        commands |= set(result.info["available_actions"])
        if result.done:
            break
    assert {env.call_of(command).name for command in commands} >= {"go_to", "take", "move", "clean"}
    assert all(env.text_of(env.call_of(command)) == command for command in commands)
    assert {tool.name for tool in env.tools()} == set(COMMANDS)
    await env.close()


def test_old_words_for_putting_down() -> None:
    for word in ("in/on", "in", "on", "into"):
        assert command_of(f"put mug 1 {word} desk 2") == "move mug 1 to desk 2"
    assert command_of("move mug 1 to desk 2") == "move mug 1 to desk 2"


async def test_old_words_win() -> None:
    env = ALFWorld()
    await env.reset(ALFWorld.task(SMALL, 2))
    result = None
    for _ in range(12):
        action = env.expert_action()
        if action.startswith("move "):
            action = action.replace("move ", "put ").replace(" to ", " in/on ")
        result = await act(env, action)
        if result.done:
            break
    assert result is not None
    assert result.info["success"]
    await env.close()


async def test_the_task_may_be_said_again() -> None:
    env = ALFWorld(expert="search", repeat_task=True)
    opening = (await env.reset(ALFWorld.task(SMALL, 0))).messages[0].content
    said = opening.rpartition("\n")[2]
    assert said.startswith("Your task is to: ")
    while True:
        result = await act(env, env.expert_action())
        assert result.messages[0].content.endswith(f"\n{said}") is not result.done
        if result.done:
            break
    assert result.info["success"]
    await env.close()


async def test_limits_and_life_cycle() -> None:
    env = ALFWorld(max_steps=2)
    with pytest.raises(EnvError, match="call reset first"):
        await act(env, "look")
    await env.reset(ALFWorld.task(SMALL, 0))
    assert not (await act(env, "look")).done
    result = await act(env, "look")
    assert (result.truncated, result.terminated, result.reward) == (True, False, 0.0)
    with pytest.raises(EnvError, match="the episode is over"):
        await act(env, "look")
    await env.close()
    await env.close()


def test_the_splits_share_no_floor_plan() -> None:
    for task_type in TASK_TYPES:
        train, unseen = floor_plans(task_type, "train"), floor_plans(task_type, "unseen")
        assert train
        assert unseen
        assert not set(train) & set(unseen)


def test_generated_games_pose_their_task() -> None:
    sentences = set()
    for task_type in TASK_TYPES:
        for seed in range(12):
            game = generate(task_type, "train", seed)
            parameters = game["traj_data"]["pddl_params"]
            target = parameters["object_target"]
            assert (
                f"({'toggleable' if target.endswith('Lamp') else 'pickupable'} {target}_bar"
                in (game["pddl_problem"])
            )
            assert not target.endswith("Lamp")
            if task_type in TREATMENTS:
                assert f"{TREATMENTS[task_type][1]}Type)" in game["pddl_problem"]
            sentences.add(game["grammar"].partition("Your task is to: ")[2].partition(".")[0])
    assert len(sentences) > 60, "the tasks have to be varied"


def test_games_depend_on_the_seed_alone() -> None:
    code = (
        "import hashlib, json\n"
        "from ludus.envs.alfworld.scenes import TASK_TYPES, generate\n"
        "games = [generate(t, s, 7) for t in TASK_TYPES for s in ('train', 'unseen')]\n"
        "print(hashlib.sha256(json.dumps(games).encode()).hexdigest())\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(found) == 1


def test_a_recipe_may_name_the_room() -> None:
    tiers = ["look_at_obj_in_light:bedroom", "unseen/pick_and_place_simple:bathroom"]
    assert [task.tier for task in read_env(2, tiers, maker=ALFWorld())] == tiers
    with pytest.raises(ConfigError, match="not 'bathrom'"):
        read_env(2, ["pick_and_place_simple:bathrom"], maker=ALFWorld())


def test_unknown_tiers_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean pick_two_obj_and_place"):
        ALFWorld.task("pick_two_object_and_place", 0)
    with pytest.raises(ConfigError, match="is for kitchen, not 'bathroom'"):
        ALFWorld.task("pick_heat_then_place_in_recep:bathroom", 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "names no game"),
        ({"type": "fly", "seed": 1}, "names no game"),
        ({"type": TASK_TYPES[0], "seed": "1"}, "names no game"),
        ({"type": TASK_TYPES[0], "seed": -1}, "names no game"),
        ({"type": TASK_TYPES[0], "seed": True}, "names no game"),
        ({"type": TASK_TYPES[0], "seed": 10**400}, "names no game"),
        ({"type": TASK_TYPES[0], "seed": 1, "room": "attic"}, "attic"),
        ({"type": TASK_TYPES[0], "seed": 1, "room": ["kitchen"]}, "is not a room"),
        ({"type": TASK_TYPES[0], "seed": 1, "room": ""}, "is not a room"),
        ({"index": 2620}, "is not 0 to 2619"),
        ({"index": True}, "is not 0 to 2619"),
        ({"game": "train/x/y"}, "alfworld-download"),
    ],
)
async def test_tasks_without_a_game(data: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        await ALFWorld().reset(Task(id="t", data=data))


def test_a_room_does_not_lead_out_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    good = alfworld_games.game_of(ALFWorld.task(SMALL, 1))  # makes the folders
    cache_files.write(tmp_path / "secret-1.json.gz", good)
    for room in ("../" * 6 + "secret", str(tmp_path / "secret")):
        data = {"type": TASK_TYPES[0], "seed": 1, "room": room}
        with pytest.raises(EnvError, match="is not a room"):
            alfworld_games.game_of(Task(id="t", data=data))


async def test_a_game_that_the_engine_cannot_load_leaves_it_usable() -> None:
    task = ALFWorld.task(SMALL, 0)
    good = alfworld_games.game_of(task)
    engine = alfworld_engine.Engine()
    for key, text in (("pddl_problem", "(define"), ("grammar", "nonsense"), ("pddl_domain", "()")):
        with pytest.raises(EnvError, match="alfworld: load raised"):
            engine.reset(good | {key: text})
    unsolvable = good["pddl_problem"].partition("(:goal")[0] + "(:goal (isHot agent1)))"
    with pytest.raises(EnvError, match="alfworld: load raised"):
        engine.reset(good | {"pddl_problem": unsolvable})
    undeclared = good["pddl_problem"].partition("(:goal")[0] + "(:goal (sings agent1)))"
    with pytest.raises(EnvError, match="Undeclared predicate"):  # not the process's end
        engine.reset(good | {"pddl_problem": undeclared})
    assert "Your task is to: " in engine.reset(good)


def test_games_are_not_kept_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither they, nor what they are made of, nor what is played on them."""
    from textworld.logic import Proposition

    from ludus.envs.alfworld.planning import Problem

    def num_kept() -> tuple[int, int]:
        gc.collect()
        num_problems = sum(type(found) is Problem for found in gc.get_objects())
        kept = core._memento_cache.values()
        return num_problems, sum(isinstance(found, Proposition) for found in kept)

    core = importlib.import_module("mementos.core")  # TextWorld's, of no types
    alfworld_engine.forget()
    monkeypatch.setattr(alfworld_engine, "NUM_GAMES", 2)
    engine = alfworld_engine.Engine()
    num_problems, num_propositions = num_kept()
    for seed in range(4):
        engine.reset(alfworld_games.game_of(ALFWorld.task(SMALL, seed)))
        engine.step(engine.commands[0])
    kept = num_kept()
    assert kept[0] <= num_problems + 2  # what earlier tests left may be gone by now
    assert kept[1] == num_propositions
    alfworld_engine.forget()
    del engine
    kept = num_kept()
    assert kept[0] <= num_problems
    assert kept[1] == num_propositions


def test_a_game_is_read_once_however_many_ask() -> None:
    game = alfworld_games.game_of(ALFWorld.task(SMALL, 1))
    alfworld_engine.forget()
    engines = [alfworld_engine.Engine() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda engine: engine.reset(game), engines))) == 1
    assert len({id(engine._game) for engine in engines}) == 1


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_the_planners_native_library_is_not_loaded() -> None:
    """Its faults would end the process."""
    code = (
        "import asyncio\nfrom pathlib import Path\nfrom ludus.envs.alfworld.env import ALFWorld\n"
        f"asyncio.run(ALFWorld().reset(ALFWorld.task({SMALL!r}, 0)))\n"
        "assert 'libdownward' not in Path('/proc/self/maps').read_text()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_generated_games_are_kept_and_mended(tmp_path: Path) -> None:
    task = ALFWorld.task(SMALL, 5)
    game = alfworld_games.game_of(task)
    (file,) = (tmp_path / "cache").rglob("*.gz")
    assert file.relative_to(tmp_path).parts[:4] == ("cache", "ludus", "alfworld", "games-v1")
    file.write_bytes(file.read_bytes()[:100])
    assert alfworld_games.game_of(task) == game
    assert alfworld_games.game_of(task) == game
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert alfworld_games.game_of(ALFWorld.task(SMALL, 5))["solvable"]


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """Games where alfworld-download puts them, among some that ALFWorld leaves out."""
    folder = tmp_path / "data" / "json_2.1.1"
    for split, name, solvable in (
        ("train", "pick_and_place_simple-Mug-None-Desk-308/trial_1", True),
        ("train", "pick_and_place_simple-Mug-None-Desk-309/trial_2", False),
        ("train", "pick_and_place_simple-AppleSliced-None-Desk-310/trial_3", True),
        ("valid_train", "pick_and_place_simple-Pen-None-Desk-311/trial_4", True),
        ("valid_unseen", "pick_and_place_simple-Cup-None-Desk-10/trial_5", True),
    ):
        game = generate("pick_and_place_simple", "train", len(name), "bathroom")
        traj_data = game.pop("traj_data")
        path = folder / split / name
        path.mkdir(parents=True)
        (path / "game.tw-pddl").write_text(json.dumps(game | {"solvable": solvable}))
        (path / "traj_data.json").write_text(json.dumps(traj_data))
    return folder


async def test_downloaded_games_come_first(downloaded: Path) -> None:
    task = ALFWorld.task("pick_and_place_simple", 3)
    mug = "train/pick_and_place_simple-Mug-None-Desk-308/trial_1"
    assert task.data == {"game": mug}
    assert task.id == f"alfworld/{mug}/3"
    unseen = ALFWorld.task("unseen/pick_and_place_simple", 0)
    assert unseen.data["game"].startswith("valid_unseen/")
    env = ALFWorld()
    assert (await play(env, task))[0]
    await env.close()
    with pytest.raises(EnvError, match="no playable game of look_at_obj_in_light"):
        ALFWorld.task("look_at_obj_in_light", 0)
    with pytest.raises(EnvError, match="not within the data's folder"):
        await ALFWorld().reset(Task(id="t", data={"game": "../../x"}))
    (downloaded / mug / "game.tw-pddl").write_text("{")
    with pytest.raises(EnvError, match="cannot read the game"):
        await ALFWorld().reset(task)


async def test_agentgyms_numbers(downloaded: Path) -> None:
    """Its mapping files name a game for each; training games first."""
    with pytest.raises(EnvError, match=r"mappings_train\.json .* beside json_2\.1\.1"):
        alfworld_games.game_of(Task(id="t", data={"index": 0}))
    for part, numbers, kind in (("train", (0, 2420), "Mug"), ("test", (2420, 2620), "Pen")):
        name = f"pick_and_place_simple-{kind}-None-Desk-{308 if kind == 'Mug' else 311}"
        trial = "trial_1" if kind == "Mug" else "trial_4"
        rows = [
            {"item_id": number, "task_type": name, "task_id": trial} for number in range(*numbers)
        ]
        (downloaded.parent / f"mappings_{part}.json").write_text(json.dumps(rows))
    games = [alfworld_games.game_of(Task(id="t", data={"index": i})) for i in (2419, 2420)]
    for game, path in zip(games, ("train/*Mug*308/*", "valid_train/*/*"), strict=True):
        (file,) = downloaded.glob(f"{path}/game.tw-pddl")
        assert game["pddl_problem"] == json.loads(file.read_text())["pddl_problem"]


def test_agentgyms_numbers_without_the_data() -> None:
    games = [alfworld_games.game_of(Task(id="t", data={"index": i})) for i in (0, 2419, 2420)]
    plans = [int(game["traj_data"]["scene"]["floor_plan"][9:]) % 100 for game in games]
    assert [plan <= 6 for plan in plans] == [False, False, True]


def test_episodes_in_threads_do_not_touch_each_other() -> None:
    def episode(seed: int) -> list[str]:
        async def turns() -> list[str]:
            env = ALFWorld()
            said = [(await env.reset(ALFWorld.task(SMALL, seed))).messages[0].content]
            for _ in range(env.max_turns):
                result = await act(env, env.expert_action())
                said.append(result.messages[0].content)
                if result.done:
                    break
            await env.close()
            return said

        return asyncio.run(turns())

    alone = [episode(seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(episode, range(3))) == alone


async def test_nothing_is_printed_and_only_the_cache_is_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    code = (
        "import asyncio, sys\n"
        "from ludus.envs.alfworld.env import ALFWorld\n"
        "argv, out = list(sys.argv), sys.stdout\n"
        f"asyncio.run(ALFWorld().reset(ALFWorld.task({SMALL!r}, 0)))\n"
        "assert sys.argv == argv and sys.stdout is out\n"
    )
    kept = {k: v for k, v in os.environ.items() if k not in ("ALFWORLD_DATA", "XDG_CACHE_HOME")}
    subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "HOME": str(home), "TMPDIR": str(tmp_path / "home")},
        cwd=home,
        check=True,
    )
    assert capfd.readouterr() == ("", "")
    files = [path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()]
    game, translated = sorted(files)
    assert game.startswith(".cache/ludus/alfworld/games-v1/train/")
    assert translated.startswith(".cache/ludus/alfworld/translated-")


def test_a_missing_engine_is_named() -> None:
    code = (
        "import sys\nsys.modules['textworld'] = None\n"
        "from ludus.core.errors import MissingDependency\nfrom ludus.envs import ENVS\n"
        "try:\n    ENVS.load('alfworld')\nexcept MissingDependency as error:\n    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'ludus-rl[alfworld]'" in run.stdout


async def test_it_keeps_the_protocol() -> None:
    tasks = [ALFWorld.task(SMALL, seed) for seed in range(2)]
    findings = await check_env("alfworld", tasks=tasks, timeout_s=60.0)
    assert not findings
