"""Episodes of real programs, which call the model through a gateway."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from played_envs import task_of
from rollout_world import Scripted, World

from ludus.core.types import Group, Task, Trajectory
from ludus.rollout.command.agent import CommandAgent
from ludus.rollout.workflow import Agent
from ludus.services.gateway.gateway import HttpGateway

CALL = """
import json, os, sys, urllib.request
def call(text):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
         "Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
def outcome(**fields):
    with open("outcome.json", "w") as file:
        json.dump(fields, file)
"""


def python(code: str, **args: Any) -> dict[str, Any]:
    """The arguments of an agent: a program in Python with `call` and `outcome`."""
    name = "{python}" if args.get("sandbox") else sys.executable
    return {"command": [name, "-c", CALL + code], **args}


def made(args: dict[str, Any]) -> Agent:
    agent = CommandAgent(**args)
    return Agent(agent, frozenset(inspect.signature(agent).parameters))


async def play_all(
    world: World, args: dict[str, Any], *texts: str, tasks: Sequence[Task], **how: Any
) -> list[Group]:
    """Play an episode of each task with a scripted model; then close all."""
    sampler = Scripted(world.renderer(), *(texts or ("blue",)))
    how = {"format": "plain", "system_prompt": None, "max_retries": 0, **how}
    collector = world.collector(None, "plain", sampler=sampler, **how)
    agent = made(args)
    gateway = HttpGateway(unix=agent.needs_socket)
    collector = replace(collector, agent=agent, gateway=gateway)
    try:
        groups = await collector.collect(tasks, 0, 1)
    finally:
        await collector.close()
    assert sampler.sessions == set()
    return groups


async def play(
    world: World, args: dict[str, Any], *texts: str, task: Task | None = None, **how: Any
) -> Trajectory:
    """Play an episode of one task."""
    (group,) = await play_all(world, args, *texts, tasks=[task or task_of(0)], **how)
    return group.trajectories[0]


def eventually(true: Callable[[], bool]) -> None:
    """Wait until it is true."""
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """True if a process lives: it is there, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def living(path: Path) -> list[int]:
    """The processes whose ids are in a file, and that live."""
    return [pid for pid in map(int, path.read_text().split()) if runs(pid)]
