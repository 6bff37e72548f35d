"""AppWorld on its real engine: `make appworld`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from engines import engine_python
from service_world import service

from ludus.core.errors import EnvError, EnvLost
from ludus.core.types import Message, StepResult, Task
from ludus.envs.appworld import engines, tasks
from ludus.envs.appworld.env import AppWorld
from ludus.envs.checks.check import check_env
from ludus.envs.remote.env import RemoteEnv

pytestmark = pytest.mark.engine("appworld")

Make = Callable[..., AppWorld]


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch, layers: None) -> AsyncIterator[Make]:
    """Makes environments, and closes them at the test's end."""
    monkeypatch.delenv("APPWORLD_ROOT", raising=False)
    made: list[AppWorld] = []

    def make(**args: Any) -> AppWorld:
        made.append(AppWorld(**args))
        return made[-1]

    yield make
    for env in made:
        await env.close()


async def run(env: AppWorld, code: str) -> StepResult:
    return await env.step(Message(role="assistant", content=code))


async def output(env: AppWorld, code: str) -> str:
    return (await run(env, code)).messages[0].content


async def solve(env: AppWorld) -> StepResult:
    while True:
        result = await run(env, env.expert_action())
        assert "Execution failed" not in result.messages[0].content, result.messages[0].content
        if result.done:
            return result


EVERY_KIND = [
    *(f"{tier}:{kind}" for tier, kinds in tasks.KINDS.items() for kind in kinds),
    *(f"unseen/{tier}:{kind}" for tier, kinds in tasks.HELD_OUT.items() for kind in kinds),
]


@pytest.mark.parametrize("tier", EVERY_KIND)
async def test_the_expert_solves_each_kind_and_nothing_less_does(tier: str, make: Make) -> None:
    env = make()
    for seed in (0, 7):
        await env.reset(AppWorld.task(tier, seed))
        solved = await solve(env)
        assert (solved.reward, solved.terminated) == (1.0, True), solved.info
        assert env.scores()["success"] == 1.0
    await env.reset(AppWorld.task(tier, 0))
    undone = await run(env, "apis.supervisor.complete_task()")
    assert (undone.reward, undone.terminated) == (0.0, True)
    assert undone.info["failed"]
    assert not undone.info["success"]


async def test_a_further_change_fails_the_task(make: Make) -> None:
    env = make()
    await env.reset(AppWorld.task("easy:note-add", 2))
    await run(env, env.expert_action())
    await run(
        env, "apis.simple_note.create_note(title='more', content='x', access_token=simple_note)"
    )
    result = await run(env, env.expert_action())
    assert result.reward == 0.0
    assert result.info["failed"] == ["simple_note.Note: exactly the rows that had to be added were"]


async def test_the_share_of_passed_tests_may_be_the_reward(make: Make) -> None:
    env = make(reward="share")
    await env.reset(AppWorld.task("easy:note-delete", 1))
    assert (await run(env, "apis.supervisor.complete_task()")).reward == pytest.approx(1 / 3)


async def test_steps_run_out_and_the_state_is_judged(make: Make) -> None:
    env = make(max_steps=3)
    await env.reset(AppWorld.task("easy:note-delete", 1))
    await run(env, env.expert_action())
    await run(env, env.expert_action().replace("apis.supervisor.complete_task()", ""))
    result = await run(env, "print('done')")
    assert (result.reward, result.terminated, result.truncated) == (1.0, False, True)
    with pytest.raises(EnvError, match="the episode is over"):
        await run(env, "print(1)")


STEPS = [
    "x = 41",
    "print(x + 1)",
    "1 / 0",
    "print(undefined)",
    "def broken(:",
    "",
    "import subprocess",
    "open('/etc/passwd', 'w')",
    "input('?')",
    "print({'a': 1})",
    "print([{'title': 'x' * 60}, {'title': 'y' * 60}])",
    "print(apis.supervisor.show_profile())",
    "print(apis.nothing)",
    "print(apis.venmo.nothing())",
    "apis.venmo.show_account(access_token='wrong')",
    "apis.venmo.show_transaction()",
    "apis.venmo.login(username='a', password='b')",
    "print(apis.venmo.login(username='a', password='b', raise_on_failure=False))",
    "print(apis.api_docs.show_api_descriptions(app_name='venmo')[:2])",
    "print(DateTime.now(), datetime.datetime.now())",
    "for i in range(2000): apis.phone.get_current_date_and_time()",
]

STOCK = """
import json, os, sys
root, task, steps = json.loads(sys.argv[1])
from appworld import AppWorld, update_root
update_root(root)
os.chdir("/usr")
world = AppWorld(task_id=task, experiment_name=sys.argv[2], load_ground_truth=False)
print("ANSWER" + json.dumps([world.execute(code) for code in steps]))
"""


async def test_the_texts_are_those_of_the_stock_engine(make: Make, tmp_path: Path) -> None:
    env = make(timeout_s=100)
    await env.reset(AppWorld.task("medium:pay", 0))
    assert env._episode is not None
    root = tmp_path / "root"
    root.mkdir()
    (root / "data").symlink_to(tasks.cache_root() / "data")
    told = json.dumps([str(root), "pay_0", STEPS])
    stock = subprocess.run(
        [engine_python("appworld"), "-c", STOCK, told, "stock"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "0", "APPWORLD_CACHE": str(tmp_path)},
    )
    expected = json.loads(stock.stdout.rpartition("ANSWER")[2])
    for code, theirs in zip(STEPS, expected, strict=True):
        assert await output(env, code) == theirs, code


async def test_an_end_of_the_interpreter_is_an_observation(make: Make) -> None:
    env = make(timeout_s=1, memory_mb=256)
    await env.reset(AppWorld.task("easy:song-count", 0))
    await run(env, "x = 1")
    assert "timed out after 1 seconds" in await output(env, "while True: pass")
    assert await output(env, "print(x)") == "1\n"
    loop = "for i in range(10**9): x = i"
    stubborn = f"while True:\n    try:\n        {loop}\n    except BaseException: pass"
    for end in (stubborn, "getattr(builtins, '__imp' + 'ort__')('posix')._exit(3)"):
        await run(env, "x = 1")
        assert "was started anew" in await output(env, end)
        assert "NameError" in await output(env, "print(x)")
    assert "MemoryError" in await output(env, "y = bytearray(10**9)")
    assert (await solve(env)).reward == 1.0


async def test_malformed_code_is_answered(make: Make) -> None:
    env = make()
    await env.reset(AppWorld.task("easy:song-count", 0))
    assert "null byte" in await output(env, "x = '\0'")
    for code in ("Ω\u202e\r\n%s{}", "\ud800", "print('\\ud800')", "(" * 5000, "go " * 30_000):
        assert (await run(env, code)).reward == 0.0
    assert len(await output(env, "print('x' * 3_000_000)")) < 110_000
    assert await output(env, "print(2)") == "2\n"


async def test_worlds_are_apart_and_reused(make: Make) -> None:
    one, other = make(), make()
    await asyncio.gather(
        one.reset(AppWorld.task("easy:note-add", 2)), other.reset(AppWorld.task("easy:note-add", 2))
    )
    assert one._episode is not None
    assert other._episode is not None
    assert one._episode.world is not other._episode.world
    await run(one, one.expert_action())
    await run(one, one.expert_action().replace("apis.supervisor.complete_task()", ""))
    assert (await run(other, "apis.supervisor.complete_task()")).reward == 0.0
    await one.close()
    await one.reset(AppWorld.task("easy:note-add", 2))
    assert (await solve(one)).reward == 1.0


async def test_a_world_is_replaced_after_many_episodes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "MAX_RESETS", 2)
    env, seen = make(max_worlds=7), []  # an engine of its own
    for _ in range(4):
        await env.reset(AppWorld.task("easy:song-count", 0))
        assert env._episode is not None
        seen.append(env._episode.world)
        await env.close()
    assert [world is seen[0] for world in seen] == [True, True, False, False]
    assert seen[2] is seen[3]
    env._engine(True, AppWorld.task("easy", 0)).close()


async def test_too_many_worlds_are_refused(make: Make) -> None:
    first, second = make(max_worlds=1), make(max_worlds=1)
    await first.reset(AppWorld.task("easy", 0))
    with pytest.raises(EnvError, match=r"all 1 worlds are in use.*raise env.args.max_worlds"):
        await second.reset(AppWorld.task("easy", 0))
    await first.close()
    await second.reset(AppWorld.task("easy", 0))


async def test_a_dead_engine_loses_the_episode_and_starts_anew(make: Make) -> None:
    env = make(max_worlds=9)
    await env.reset(AppWorld.task("easy", 0))
    engine = env._engine(True, AppWorld.task("easy", 0))
    for server in (engine._launcher, engine._zygote):
        assert server is not None
        os.kill(server._process.pid, signal.SIGKILL)
        server._process.wait()
    with pytest.raises(EnvLost):
        await run(env, "print(apis.supervisor.show_profile())")
    await env.reset(AppWorld.task("easy", 0))
    assert (await solve(env)).reward == 1.0
    engine.close()


async def test_downloaded_data_is_played_from_its_folder(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generated world has the layout of the downloaded one, so it stands in for it here."""
    env = make()
    await env.reset(AppWorld.task("easy:note-add", 2))  # writes the task
    world = tasks.cache_root() / "data"
    (tmp_path / "data" / "datasets").mkdir(parents=True)
    for name in ("base_dbs", "api_docs", "tasks"):
        (tmp_path / "data" / name).symlink_to(world / name)
    (tmp_path / "data" / "datasets" / "dev.txt").write_text("note-add_2\n")
    monkeypatch.setenv("APPWORLD_ROOT", str(tmp_path))
    task = AppWorld.task("dev", 0)
    assert task.data == {"task": "note-add_2"}
    downloaded = make()
    opening = await downloaded.reset(task)
    assert "Add a note" in opening.messages[0].content
    assert (await solve(downloaded)).reward == 1.0
    assert not (tmp_path / "experiments").exists()
    with pytest.raises(EnvError, match="there is no task 'absent_1' below"):
        await downloaded.reset(Task(id="x", prompt=[], data={"task": "absent_1"}))


async def test_folders_of_killed_processes_are_removed(make: Make, tmp_path: Path) -> None:
    dead, alive, other = (
        Path(tempfile.gettempdir()) / f"{engines.PREFIX}{pid}-test" for pid in (2**22 + 1, 1, "x")
    )
    for folder in (dead, alive, other):
        folder.mkdir(exist_ok=True)
        (folder / "code").mkdir(exist_ok=True)
    try:
        engines.Engine(tmp_path, engines.settings_of(None)).close()
        assert [folder.exists() for folder in (dead, alive, other)] == [False, True, True]
    finally:
        for folder in (dead, alive, other):
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
async def test_it_follows_the_protocol(make: Make) -> None:
    make()
    findings = await check_env("appworld", num_tasks=4, timeout_s=120.0)
    assert findings == []


async def test_a_service_plays_it(make: Make) -> None:
    local = make()
    task = AppWorld.task("easy:note-add", 2)
    opening = await local.reset(task)
    with service("appworld", step_deadline_s=120.0) as url:
        env = RemoteEnv(url=url, env="appworld")
        assert (await env.reset(task)).messages == opening.messages
        while True:
            action = local.expert_action()
            theirs = await env.step(Message(role="assistant", content=action))
            ours = await run(local, action)
            assert theirs.messages == ours.messages
            if theirs.done:
                break
        assert theirs.reward == 1.0
        await env.close()
