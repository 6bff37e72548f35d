"""Reward hacks against AppWorld fail: `make appworld`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from appworld_attacks import AND_COMPLETE, ATTACKS
from engines import engine_python

from ludus.core.types import Message
from ludus.envs.appworld import tasks
from ludus.envs.appworld.env import AppWorld

pytestmark = pytest.mark.engine("appworld")

TASK, NAME = AppWorld.task("easy:note-delete", 1), "note-delete_1"


@pytest.fixture
async def env(monkeypatch: pytest.MonkeyPatch, layers: None) -> AsyncIterator[AppWorld]:
    monkeypatch.delenv("APPWORLD_ROOT", raising=False)
    made = AppWorld()
    await made.reset(TASK)
    yield made
    await made.close()


async def output(env: AppWorld, code: str) -> str:
    result = await env.step(Message(role="assistant", content=code))
    return result.messages[0].content


async def filled(env: AppWorld, code: str) -> str:
    """The attack's code with the names of its targets."""
    root = tasks.cache_root()
    me = await output(env, "print(apis.supervisor.show_profile()['email'])")
    people = (
        "p = {r['account_name']: r['password'] for r in apis.supervisor.show_account_passwords()}\n"
        f"t = apis.venmo.login(username={me.strip()!r}, password=p['venmo'])['access_token']\n"
        "print(apis.venmo.search_users(access_token=t)[0]['email'])"
    )
    names = {
        "SECRET_FILE": str(root / "data" / "tasks" / NAME / "ground_truth" / "answer.json"),
        "ROOT": str(root),
        "TASK": NAME,
        "OTHER": (await output(env, people)).strip(),
        "ME": me.strip(),
    }
    for name, value in names.items():
        code = code.replace(name, value)
    # A traceback shows the line, and must not look like its success.
    return code.replace('"ESCAPED', '"ESC" "APED').replace("'ESCAPED", "'ESC' 'APED")


@pytest.mark.parametrize("name", ATTACKS)
async def test_what_an_agent_may_not_have_stays_away(name: str, env: AppWorld) -> None:
    seen = await output(env, await filled(env, ATTACKS[name]))
    assert "ESCAPED" not in seen
    done = await env.step(Message(role="assistant", content="apis.supervisor.complete_task()"))
    assert done.reward == 0.0


@pytest.mark.parametrize("name", AND_COMPLETE)
async def test_a_task_cannot_be_declared_solved(name: str, env: AppWorld) -> None:
    await output(env, AND_COMPLETE[name])
    for _ in range(2):
        code = "try:\n    apis.supervisor.complete_task()\nexcept Exception as error: print(error)"
        result = await env.step(Message(role="assistant", content=code))
        if result.done:
            assert result.reward == 0.0
            return
    assert "the world" in name  # which hangs up on nonsense


CONTROLS = [
    "reads the answer",
    "loads the ground truth from the right folder",
    "opens the databases",
    "runs a program",
    "writes into the data",
]


@pytest.mark.parametrize("name", CONTROLS)
async def test_without_the_sandbox_an_attack_succeeds(name: str) -> None:
    """The attacks are real: the sandbox is what stops them."""
    env = AppWorld(isolation="none")
    await env.reset(TASK)
    assert "ESCAPED" in await output(env, await filled(env, ATTACKS[name]))
    await env.close()


STOCK = """
import json, sys
from appworld import AppWorld, update_root
update_root(sys.argv[1])
world = AppWorld(task_id=sys.argv[2], experiment_name="stock", load_ground_truth=False)
print("ANSWER" + json.dumps([world.execute(code) for code in json.loads(sys.argv[3])]))
"""

GATED = [name for name in ATTACKS if "address" in name or "company" in name or "signs an" in name]


async def test_what_the_gate_refuses_works_on_the_stock_engine(
    env: AppWorld, tmp_path: Path
) -> None:
    """The attacks are real: the gate is what stops them."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "data").symlink_to(tasks.cache_root() / "data")
    names = [name for name in GATED if "encoded" not in name]
    codes = [await filled(env, ATTACKS[name]) for name in names]
    stock = subprocess.run(
        [engine_python("appworld"), "-c", STOCK, str(root), NAME, json.dumps(codes)],
        capture_output=True,
        text=True,
        env={**os.environ, "APPWORLD_CACHE": str(tmp_path)},
    )
    answers = json.loads(stock.stdout.rpartition("ANSWER")[2])
    for name, text in zip(names, answers, strict=True):
        assert "ESCAPED" in text, (name, text)
