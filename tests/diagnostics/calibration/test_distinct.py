"""The estimate of different tasks, in environments that do not describe their worlds."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from ludus.core.errors import ConfigError
from ludus.core.system.signals import run
from ludus.core.types import Spec
from ludus.data.expert import Demonstration
from ludus.diagnostics.calibration import distinct
from ludus.diagnostics.calibration.distinct import MANY, by_tier, num_distinct, total, undeclared
from ludus.diagnostics.calibration.episodes import play_again
from ludus.diagnostics.calibration.first import base, with_splits, with_tasks
from ludus.diagnostics.calibration.levels import without_small_tiers
from ludus.diagnostics.calibration.subject import environment
from ludus.envs import ENVS

ENV = """
import time
from ludus import Env, Message, Observation, StepResult, Task

class Few(Env):
    max_turns = 3
    def __init__(self, worlds: int = 5, hidden: int = 1, reset_s: float = 0.0):
        self.worlds, self.hidden, self.reset_s = worlds, hidden, reset_s
    async def reset(self, task):
        time.sleep(self.reset_s)
        self.seed = task.data["seed"]
        return Observation(messages=[Message(role="user", content=f"go {self.seed % self.worlds}")])
    async def step(self, action):
        reply = [Message(role="user", content=f"behind it {self.seed % self.hidden}")]
        return StepResult(messages=reply, reward=1.0, terminated=True)
    def expert_action(self):
        return "walk"
    @classmethod
    def task(cls, tier, seed):
        return Task(id=str(seed), data={"seed": seed})
"""


@pytest.fixture
def name(tmp_path: Path) -> str:
    path = tmp_path / "few.py"
    path.write_text(ENV)
    return f"{path}:Few"


def about(name: str, *, shown: bool = True, num: int = 200, **args: float) -> float:
    subject = environment(name, args, None)
    tasks = subject.take(num, 0)
    return num_distinct(subject, tasks, demonstrations(name, args, num) if shown else ())[0]


def demonstrations(name: str, args: dict[str, float], num: int) -> list[Demonstration]:
    spec = Spec(name=name, args=args)
    tasks = [ENVS.build(spec).task(None, seed) for seed in range(num)]
    return run(play_again(spec, tasks, 20))


def test_few_worlds_are_noticed_without_cheap_resets(name: str) -> None:
    assert about(name) == pytest.approx(5)
    assert about(name, shown=False) == pytest.approx(5)
    assert about(name, worlds=10**6) == MANY


def test_worlds_that_open_alike_are_told_apart_by_the_expert(name: str) -> None:
    assert about(name, worlds=1, hidden=10**6) == MANY
    assert about(name, worlds=1, hidden=7) == pytest.approx(7)
    assert about(name, worlds=1) == pytest.approx(1)
    assert about(name, worlds=1, shown=False) == MANY  # nobody knows


def test_slow_resets_end_in_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distinct, "WORLDS_S", 1.5)  # on a busy machine resets take longer
    begun = time.perf_counter()
    assert about(name, shown=False, reset_s=0.03) == pytest.approx(5, abs=0.5)
    assert about(name, shown=False, reset_s=60.0) == MANY
    assert time.perf_counter() - begun < 40


HELD_OUT = """
from ludus import Env, Message, Observation, StepResult, Task

class Engine(Env):
    max_turns = 1
    async def reset(self, task):
        self.number = task.data["number"]
        return Observation(messages=[Message(role="user", content=f"go {self.number}")])
    async def step(self, action):
        return StepResult(messages=[], reward=1.0, terminated=True)
    def expert_action(self):
        return "walk"
    @classmethod
    def tiers(cls):
        return ["game", "other", "game/test"]
    @classmethod
    def task(cls, tier, seed):
        return Task(id=f"{tier}/{seed}", tier=tier, data={"number": seed % 700})
"""


def test_seeds_that_begin_again_and_levels_to_hold_out(tmp_path: Path) -> None:
    """600 tasks show no repetition; the data of all do. `game/test` is held out for `game`."""
    path = tmp_path / "engine.py"
    path.write_text(HELD_OUT)
    for tiers, train, heldout in ((["game"], 700, 700), (["other"], 420, 175)):
        subject = environment(f"{path}:Engine", {}, ",".join(tiers))
        found, seconds = by_tier(subject, subject.take(2000, 0))
        assert found == {tiers[0]: 700}
        assert not undeclared(subject, subject.take(2000, 0))
        assert undeclared(subject, subject.take(600, 0))
        config = with_tasks(
            base(subject, 0, None, "", shows=True), subject, total(found, subject), seconds, 1024
        )
        assert config.tasks.train.args["num_tasks"] == train
        assert config.tasks.heldout is not None
        held = config.tasks.heldout.args
        assert held["num_tasks"] == heldout
        assert held["tiers"] == (["game/test"] if tiers == ["game"] else ["other"])
        assert held["first_seed"] == (0 if tiers == ["game"] else 1_000_000)


def test_tasks_without_data_are_told_apart_by_their_worlds(tmp_path: Path) -> None:
    """An environment may take its seed from the task's id."""
    path = tmp_path / "by_id.py"
    text = HELD_OUT.replace('task.data["number"]', 'int(task.id.rpartition("/")[2])')
    text = text.replace(', data={"number": seed % 700}', "")
    path.write_text(text.replace("max_turns = 1", "max_turns = 1\n    cheap_reset = True"))
    subject = environment(f"{path}:Engine", {}, "other")
    assert by_tier(subject, subject.take(200, 0))[0] == {"other": MANY}


def test_each_level_is_counted_and_those_with_few_tasks_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "levels.py"
    path.write_text(LEVELS)
    subject = environment(f"{path}:Levels", {}, None)
    tiers, _ = by_tier(subject, subject.take(600, 0))
    assert tiers["tiny"] == pytest.approx(5)
    assert tiers["small"] == pytest.approx(100, rel=0.3)
    assert tiers["large"] == MANY
    told: list[str] = []
    kept = without_small_tiers(subject, tiers, told.append)
    assert kept.tiers == ["small", "large"]
    assert told == [
        "levels of few different tasks are left out: tiny (about 5); the recipe has small, large"
    ]
    assert total({"a": 5.0, "b": 100.0}, replace(subject, tiers=["b"])) == 100
    assert without_small_tiers(subject, dict.fromkeys(tiers, 5.0), told.append) is subject


LEVELS = """
from ludus import Env, Message, Observation, StepResult, Task

class Levels(Env):
    cheap_reset = True
    worlds = {"tiny": 5, "small": 100, "large": 10**9}
    async def reset(self, task):
        world = task.data["seed"] * 7919 % self.worlds[task.tier]
        return Observation(messages=[Message(role="user", content=f"{task.tier} {world}")])
    async def step(self, action):
        return StepResult(messages=[], reward=1.0, terminated=True)
    @classmethod
    def tiers(cls):
        return tuple(cls.worlds)
    @classmethod
    def task(cls, tier, seed):
        return Task(id=f"{tier}-{seed}", data={"seed": seed}, tier=tier)
"""


def test_worlds_that_open_alike_are_told_with_their_cure(tmp_path: Path) -> None:
    path = tmp_path / "alike.py"
    path.write_text(f"{ENV}\nclass Alike(Few):\n    cheap_reset = True\n")
    subject = environment(f"{path}:Alike", {"worlds": 3}, None)
    config = with_tasks(base(subject, 0, None, None, shows=True), subject, 3.0, 0.0)
    with pytest.raises(ConfigError, match=r"alike.py:Alike: its seeds .* override `world`"):
        with_splits(config, subject)
