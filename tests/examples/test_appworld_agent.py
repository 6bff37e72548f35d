"""The tutorial docs/appworld-agent.md: its files are the examples, and they run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from agent_frameworks import WARNINGS
from engines import engine_python
from harness import Ludus
from rollout_world import Scripted

import ludus
from ludus.config.load import load_config
from ludus.config.schema import RolloutConfig
from ludus.core.types import Message, Spec, Status, Task, ToolCall, Trajectory
from ludus.envs.appworld.env import AppWorld
from ludus.models.chat.by_task import TaskRenderers
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.pipeline.parts.checks import check
from ludus.rollout.collect import Collector
from ludus.rollout.workflow import Agent
from ludus.services.gateway.gateway import HttpGateway
from ludus.train.batches.samples import rows

ROOT = Path(ludus.__file__).parents[1]
FOLDER = ROOT / "examples" / "agents"
PAGE = (ROOT / "docs" / "appworld-agent.md").read_text(encoding="utf-8")
FILES = ["appworld_react.py", "appworld-tiny.yaml", "appworld-qwen3-0.6b.yaml"]

pytest.importorskip("agentscope", reason="needs the extra agents")
pytestmark = [pytest.mark.usefixtures("unclosed_clients"), pytest.mark.filterwarnings(*WARNINGS)]


def test_the_page_shows_the_files_that_run() -> None:
    shown = re.findall(r"^```(?:python|yaml)\n(.*?)^```", PAGE, re.M | re.S)
    assert shown == [(FOLDER / name).read_text(encoding="utf-8") for name in FILES]


def coded(code: str) -> Message:
    call = ToolCall(name="execute", arguments={"code": code})
    return Message(role="assistant", tool_calls=[call])


async def play(env: Spec, task: Task, *turns: Any) -> Trajectory:
    renderer = Renderer(train_tokenizer(Spec(name="bpe"), ["note"], "plain"))
    collector = Collector(
        Scripted(renderer, *turns, context_length=30_000),
        TaskRenderers(renderer),
        RolloutConfig(max_retries=0, max_turns=8, deterministic=False, step_deadline_s=60),
        env,
        agent=Agent.build(Spec(name=str(FOLDER / "appworld_react.py:run"))),
        gateway=HttpGateway(),
    )
    try:
        (group,) = await collector.collect([task], 0, 1)
    finally:
        await collector.close()
    return group.trajectories[0]


async def test_it_plays_any_environment_until_its_end() -> None:
    """Without AppWorld: the calls, the end of the episode, and one row."""
    order = Spec(name="served_envs:Obeys")
    task = Task(id="t", data={"seed": 3})
    played = await play(order, task, coded("go"), coded("win"), coded("late"))
    assert (played.status, played.error, played.reward) == (Status.COMPLETED, None, 1.0)
    assert played.num_turns == 2
    assert len(rows(played, 1.0)) == 1
    said = [s.message.content for s in played.segments if s.message and s.message.role == "tool"]
    assert said == ["you said go"]
    played = await play(order, task, coded("raise"), "I give up.")
    assert (played.status, played.reward) == (Status.ERROR_ENV, None)


@pytest.mark.parametrize("name", FILES[1:])
def test_the_recipe_is_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(str(FOLDER / name))
    if engine_python("appworld").is_file():
        check(config)


@pytest.mark.engine("appworld")
async def test_it_solves_a_task_with_the_experts_code(layers: None) -> None:
    task = AppWorld.task("easy:note-add", 2)
    env, turns, done = AppWorld(), [], False
    await env.prepare(task)
    await env.reset(task)
    while not done:
        code = env.expert_action()
        turns.append(coded(code))
        done = (await env.step(Message(role="assistant", content=code))).done
    await env.close()
    played = await play(Spec(name="appworld"), task, *turns, coded("late"))
    assert (played.status, played.error, played.reward) == (Status.COMPLETED, None, 1.0)
    assert played.num_turns == len(turns)
    wrong = await play(Spec(name="appworld"), task, coded("apis.supervisor.complete_task()"))
    assert (wrong.status, wrong.reward) == (Status.COMPLETED, 0.0)


@pytest.mark.engine("appworld")
@pytest.mark.slow
@pytest.mark.parametrize("service", [(), ("--with-env-service", "appworld")])
def test_it_trains(service: tuple[str, ...], ludus: Ludus, layers: None) -> None:
    """Two environments of packages that exclude each other, in one run."""
    folder = ludus.cwd / "examples" / "agents"
    folder.mkdir(parents=True)
    (folder / "appworld_react.py").write_bytes((FOLDER / "appworld_react.py").read_bytes())
    small = ["rl.steps=1", "rollout.max_turns=2", "rollout.max_tokens_per_turn=8", "threads=1"]
    small += ["tasks.train.args.num_tasks=2"]
    told = {"LUDUS_APPWORLD_PYTHON": str(engine_python("appworld"))}
    ludus("train", str(FOLDER / "appworld-tiny.yaml"), *small, *service, env=told).ok()
    (step,) = ludus.metrics("appworld-agent-tiny-1")
    assert step["rollout/excluded"] == 0
    assert step["rollout/sampled_tokens"] > 0
