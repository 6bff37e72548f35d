"""Splits that share no task: compared by world, replaced, refused, allowed, remembered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ludus.config.schema import RunConfig
from ludus.core.errors import DataError
from ludus.core.types import Message, Observation, Task
from ludus.data.splits import read_splits, remember
from ludus.data.worlds import Worlds
from ludus.envs.babyai.env import BabyAI
from ludus.envs.base import Env
from ludus.store.folders import RunFolder

ROOM = {"tiers": ["GoToRedBallNoDists"]}


def config(env: Any, train: Any, heldout: Any, **tasks: Any) -> RunConfig:
    model = {"architecture": "qwen3", "tokenizer": "words"}
    splits = {"train": train, "heldout": heldout, **tasks}
    judge = None if env else "answer"
    return RunConfig.model_validate(
        {"model": model, "env": env, "judge": judge, "tasks": splits, "rl": {}}
    )


def made(num_tasks: int, first_seed: int = 0, **args: Any) -> dict[str, Any]:
    return {"name": "env", "args": {"num_tasks": num_tasks, "first_seed": first_seed, **args}}


def babyai(**tasks: Any) -> RunConfig:
    return config("babyai", made(600, **ROOM), made(60, 1_000_000, **ROOM), **tasks)


def test_held_out_worlds_of_training_are_replaced() -> None:
    settings = babyai()
    splits = read_splits(settings)
    worlds = Worlds(settings.env)
    assert len(splits.heldout) == 60
    assert not set(worlds.keys(splits.train)) & set(worlds.keys(splits.heldout))
    asked = read_splits(babyai(allow_overlap=True))
    num_equal = len({t.id for t in asked.heldout} - {t.id for t in splits.heldout})
    assert num_equal > 0
    assert "by world in" in splits.note
    assert f": {num_equal} equal, replaced by further seeds" in splits.note
    assert f": {num_equal} equal, allowed by tasks.allow_overlap" in asked.note
    for before, after in zip(asked.heldout, splits.heldout, strict=True):
        assert before == after or int(after.id.rpartition("/")[2]) >= 1_000_060
    assert read_splits(settings).heldout == splits.heldout


@pytest.mark.parametrize(("num_worlds", "told"), [(20, True), (60, False)])
def test_held_out_tasks_of_few_worlds_are_told(
    monkeypatch: pytest.MonkeyPatch, num_worlds: int, told: bool
) -> None:
    def keys(_: Worlds, tasks: Sequence[Task]) -> list[str]:
        if len(tasks) > 1:
            return [f"world:of training {number}" for number in range(len(tasks))]
        return [f"world:{int(tasks[0].id.rpartition('/')[2]) % num_worlds}"]

    monkeypatch.setattr(Worlds, "keys", keys)
    note = read_splits(babyai()).note
    assert note.endswith("none equal; they open 20 different worlds" if told else "none equal")


def test_a_run_remembers_its_held_out_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, settings = RunFolder(tmp_path), babyai()
    splits = read_splits(settings, folder)
    assert splits.note
    remember(splits, settings, folder)
    monkeypatch.setattr(Worlds, "keys", None)  # no world is opened again
    again = read_splits(settings, folder)
    assert again.heldout == splits.heldout
    assert not again.note
    remember(again, settings, folder)
    assert len(json.loads(folder.splits.read_text())["taken"]) > 0
    monkeypatch.undo()
    assert read_splits(babyai(shuffle=False), folder).note  # other settings: compared anew
    folder.splits.write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        read_splits(settings, folder)


def test_a_mixture_replaces_tasks_of_its_parts() -> None:
    def mixed(first_seed: int, num_tasks: int) -> dict[str, Any]:
        parts = {
            "room": {"tasks": made(num_tasks, first_seed, **ROOM)},
            "craft": {"tasks": made(num_tasks, first_seed)},
        }
        return {"name": "mixture", "args": {"parts": parts}}

    env = {"name": "mixture", "args": {"envs": {"room": "babyai", "craft": "textcraft"}}}
    settings = config(env, mixed(0, 600), mixed(1_000_000, 60))
    splits = read_splits(settings)
    assert "by world in" in splits.note
    assert splits.taken
    assert all(id.startswith("babyai/") for id in splits.taken)
    assert all(task.data["part"] in ("room", "craft") for task in splits.heldout)
    worlds = Worlds(settings.env)
    assert not set(worlds.keys(splits.train)) & set(worlds.keys(splits.heldout))


def test_equal_seeds_are_replaced_where_no_world_is_known() -> None:
    env = f"{__file__}:Hidden"
    splits = read_splits(config(env, made(20), made(5, 18)))
    assert [task.data["seed"] for task in splits.heldout] == [23, 24, 20, 21, 22]
    assert (
        "by data (not by worlds: the class declares neither `cheap_reset` nor `world`) in"
        in splits.note
    )
    assert "2 equal" in splits.note


def test_worlds_that_do_not_open_are_told_as_such() -> None:
    env = f"{__file__}:HalfOpen"
    note = read_splits(config(env, made(20), made(10, 100))).note
    assert "by world and data (not by worlds: they do not open, or the class declares neit" in note


def test_too_many_tasks_are_not_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.data.splits.MAX_TASKS", 100)
    assert "by data (more than 100 tasks are not reset)" in read_splits(babyai()).note


def test_tasks_of_files_are_refused_with_their_rows(tmp_path: Path) -> None:
    def file(name: str, *rows: tuple[str, str, int]) -> dict[str, Any]:
        lines = [json.dumps({"prompt": p, "answer": a, "number": n}) for p, a, n in rows]
        (tmp_path / name).write_text("\n".join(["", *lines, ""]))
        return {"name": "json", "args": {"path": str(tmp_path / name)}}

    train = file("train.jsonl", ("1+1", "2", 1), ("2+2", "4", 2))
    heldout = file("test.jsonl", ("3+3", "6", 1), (" 2+2 ", "4", 7))
    with pytest.raises(DataError) as error:
        read_splits(config(None, train, heldout))
    assert str(error.value) == (
        f"1 of 2 held-out tasks are training tasks too: {tmp_path}/test.jsonl:3 has the content of "
        f"{tmp_path}/train.jsonl:3. Remove them from one of the two, or set "
        "`tasks.allow_overlap: true`."
    )
    splits = read_splits(config(None, train, heldout, allow_overlap=True))
    assert len(splits.heldout) == 2
    assert "by prompt and answer" in splits.note
    assert "1 equal, allowed by tasks.allow_overlap" in splits.note


def test_a_world_is_more_than_what_the_agent_sees() -> None:
    def world(level: str, seed: int) -> str:
        return asyncio.run(BabyAI().world(BabyAI.task(level, seed)))

    def opening(level: str, seed: int) -> str:
        return asyncio.run(BabyAI().reset(BabyAI.task(level, seed))).messages[0].content

    seeds = range(60)
    level = "GoToRedBallNoDists"
    assert len({opening(level, seed) for seed in seeds}) < len({world(level, s) for s in seeds})
    assert world(level, 3) == world(level, 3)
    assert " with " in world("KeyInBox", 0)  # what a box contains


class Hidden(Env):
    """Opens every task alike, and has no cheap reset."""

    max_turns: ClassVar[int] = 1

    async def reset(self, task: Task) -> Observation:
        return Observation(messages=[Message(role="user", content="guess")])

    async def step(self, action: Message) -> Any:
        raise NotImplementedError

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        return Task(id=f"hidden-{seed}", data={"seed": seed})


class HalfOpen(Hidden):
    """Every second world does not open."""

    cheap_reset: ClassVar[bool] = True

    async def reset(self, task: Task) -> Observation:
        if task.data["seed"] % 2:
            raise ValueError("no such room")
        return Observation(messages=[Message(role="user", content=f"Room {task.data['seed']}")])


class Cyclic(Env):
    """An environment whose seeds begin again after 10, as an engine's may."""

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        return Task(id=f"cyclic/{seed}", data={"number": seed % 10}, tier=tier)

    async def reset(self, task: Task) -> Observation:
        raise AssertionError("tasks are compared by their data")

    async def step(self, action: Message) -> Any:
        raise AssertionError


def cyclic(num_train: int, num_heldout: int) -> RunConfig:
    name = f"{__name__}:Cyclic"
    return config(name, made(num_train), made(num_heldout, 1_000))


def test_no_held_out_task_repeats_another(tmp_path: Path) -> None:
    """It would be played twice, alike, and count twice in an interval."""
    splits = read_splits(cyclic(6, 4))
    assert [task.data["number"] for task in splits.heldout] == [6, 7, 8, 9]
    assert splits.note.endswith(": 4 equal, replaced by further seeds")
    folder, more = RunFolder(tmp_path), cyclic(2, 12)
    splits = read_splits(more, folder)
    assert sorted(task.data["number"] for task in splits.heldout) == list(range(2, 10))
    assert splits.note.startswith("8 held-out tasks compared with 2")
    assert "; 4 more, with the data of others, are left out" in splits.note
    remember(splits, more, folder)
    again = read_splits(more, folder)
    assert again.heldout == splits.heldout
    assert not again.note
    assert len(read_splits(more.model_copy(update={"tasks": overlapping(more)})).heldout) == 12


def overlapping(settings: RunConfig) -> Any:
    return settings.tasks.model_copy(update={"allow_overlap": True})
