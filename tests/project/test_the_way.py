"""docs/the-way.md lists real functions, in the order in which they call each other."""

from __future__ import annotations

import ast
import asyncio
import re
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from loop_helpers import Recording, World, task

import ludus
from ludus.loop.loop import run_stage

ROOT = Path(ludus.__file__).parents[1]
PAGE = ROOT / "docs" / "the-way.md"
ROW = re.compile(r"^\| (\d+) \| `([\w/]+\.py)` \| `([\w.]+)` \| .+ \|$", re.MULTILINE)

MAX_HOPS = {
    "From the command to the first sampled token": 12,
    "From a batch to new weights": 8,
}

CALLED_BY = {
    "run_episode": ("ludus/rollout/collect.py", "Collector.collect"),  # hands it to run_pool
    "Learner.optim_step": ("ludus/train/learner.py", "Learner.train_step"),  # its second half
}


def hops(section: str) -> list[tuple[int, str, str]]:
    """(number, file, function) of the table under a heading."""
    text = PAGE.read_text(encoding="utf-8")
    body = text.split(f"## {section}\n")[1].split("\n## ")[0]
    return [(int(number), file, name) for number, file, name in ROW.findall(body)]


def definition(file: str, name: str) -> ast.AST | None:
    """The function or method `name` of a file, or None."""
    node: ast.AST | None = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for part in name.split("."):
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        body = getattr(node, "body", [])
        node = next((n for n in body if isinstance(n, kinds) and n.name == part), None)
    return node


def names_used(node: ast.AST) -> set[str]:
    """Names and attributes that a function's body reads."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)
    }


@pytest.mark.parametrize("section", MAX_HOPS)
def test_each_function_is_called_by_one_before_it(section: str) -> None:
    """By the function just before, or the one that CALLED_BY names."""
    way = hops(section)
    assert [number for number, _, _ in way] == list(range(len(way)))
    assert 3 < len(way) <= MAX_HOPS[section] + 1
    nodes = {(file, name): definition(file, name) for _, file, name in way}
    assert None not in nodes.values(), nodes
    for (_, file, caller), (_, _, called) in pairwise(way):
        if called in CALLED_BY:
            file, caller = CALLED_BY[called]
        node = nodes[file, caller]
        assert node is not None
        used = {name.lstrip("_") for name in names_used(node)}
        name = called.rpartition(".")[2].lstrip("_")
        assert name in used, f"{file}: {caller} does not call {called}"


async def test_the_way_is_complete(tmp_path: Path) -> None:
    """No other function of ludus stands between two hops that call each other directly.

    The stack at the first sampled token, from `sample` down and from `take` to `run_pool`, has the
    page's functions and no others. Tasks of asyncio begin new stacks there.
    """
    stacks: list[list[str]] = []
    world = World(tmp_path)
    run = world.backend.sampler._run

    def traced(batch: Any) -> Any:
        tasks = [*asyncio.all_tasks()]
        stacks.extend([frame.f_code.co_name for frame in stack_of(task)] for task in tasks)
        return run(batch)

    world.backend.sampler._run = traced
    await run_stage(world.rl([task("hall")], steps=1), world.backend, Recording())
    names = [name.rpartition(".")[2] for _, _, name in hops(next(iter(MAX_HOPS)))]
    loop_stack = ["run_stage", "take", "collect", "run_pool"]
    episode_stack = ["run_episode", "_play_turns", "turn", "sample"]
    assert names[3:7] == loop_stack
    assert names[7:11] == episode_stack
    assert any(contains(stack, loop_stack) for stack in stacks), stacks
    assert any(contains(stack, episode_stack) for stack in stacks), stacks


def stack_of(task: asyncio.Task[Any]) -> list[types.FrameType]:
    """The frames of a task, from its coroutine down the chain of awaits."""
    frames, awaited = [], task.get_coro()
    while isinstance(awaited, types.CoroutineType):
        if awaited.cr_frame is not None:
            frames.append(awaited.cr_frame)
        awaited = awaited.cr_await
    return frames


def contains(stack: list[str], part: list[str]) -> bool:
    return any(stack[i : i + len(part)] == part for i in range(len(stack)))
