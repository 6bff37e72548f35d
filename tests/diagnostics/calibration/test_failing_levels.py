"""Levels of an environment that the expert cannot play."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from ludus.core.errors import ConfigError
from ludus.core.system.signals import run
from ludus.data.demonstrations import Dropped
from ludus.data.expert import Demonstration
from ludus.diagnostics.calibration.calibrate import calibrate
from ludus.diagnostics.calibration.conversations import of_heldout_levels
from ludus.diagnostics.calibration.expert import Expert, play_expert, play_here
from ludus.diagnostics.calibration.first import base
from ludus.diagnostics.calibration.levels import (
    EXPERT_S,
    failing_tiers,
    fewer_tiers,
    no_demonstration,
    without_unmade_tiers,
)
from ludus.diagnostics.calibration.recipe import write
from ludus.diagnostics.calibration.subject import Subject, environment

LEVELS = """
from random import Random

from ludus import Env, Message, Observation, StepResult, Task


class Sums(Env):
    max_turns = 1

    @classmethod
    def tiers(cls):
        return ("one", "two")

    @classmethod
    def task(cls, tier, seed):
        tier = tier or "one"
        return Task(id=f"{tier}-{seed}", data={"seed": seed}, tier=tier, source="sums")

    async def reset(self, task):
        self.tier, draws = task.tier, Random(task.data["seed"])
        self.low, self.high = draws.randint(0, 99), draws.randint(0, 99)
        text = f"{self.low} + {self.high}"
        return Observation(messages=[Message(role="user", content=text)])

    async def step(self, action):
        if self.tier == "two":
            raise KeyError("k")
        right = action.content == self.expert_action()
        return StepResult(messages=[], reward=float(right), terminated=True)

    def expert_action(self):
        return str(self.low + self.high)
"""


@pytest.fixture
def levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "failing_levels_env.py").write_text(LEVELS)
    monkeypatch.chdir(tmp_path)
    return "failing_levels_env.py:Sums"


def test_a_level_whose_every_episode_failed_is_named_with_its_reason(
    levels: str, tmp_path: Path
) -> None:
    subject = environment(levels, {}, None)
    assert subject.env is not None
    tasks = subject.take(64, 0)
    expert = play_expert(subject.env, tasks, tmp_path, EXPERT_S)
    broken = failing_tiers(subject, expert)
    assert list(broken) == ["two"]
    assert "KeyError: 'k'" in broken["two"]
    left = expert.without(broken)
    assert left.failed == {}
    assert left.reason == ""
    assert not left.dropped
    assert left.num_played == len(expert.demonstrations) > 0


def test_a_level_that_fails_alone_is_no_level_to_leave_out(levels: str, tmp_path: Path) -> None:
    subject = environment(levels, {}, "two")
    assert subject.env is not None
    expert = play_expert(subject.env, subject.take(8, 0), tmp_path, EXPERT_S)
    assert not expert.demonstrations
    assert failing_tiers(subject, expert) == {}


@pytest.mark.slow
def test_init_trains_on_the_healthy_level(levels: str) -> None:
    said: list[str] = []
    made = calibrate(environment(levels, {}, None), 1.0, 0, said.append)
    assert made.config.tasks.train.args["tiers"] == ["one"]
    [line] = [
        line for line in write(made, "ludus init").splitlines() if line.startswith("  train: ")
    ]
    assert "in 1 of 2 levels; not two: of the expert, " in line
    assert "failed, KeyError: 'k' [failing_levels_env.py, line" in line
    assert any("level 'two' is left out" in line and "KeyError" in line for line in said)
    assert not any("two" in line for line in made.warnings)  # it has been told
    assert any("fail, 100% of the others succeed" in line for line in said)


def test_a_level_that_nearly_always_fails_is_named_in_one_line(levels: str) -> None:
    subject = environment(levels, {}, None)
    fine = Demonstration(
        task_id="a", tier="one", messages=[], reward=1.0, success=True, num_turns=1
    )
    odd = fine.model_copy(update={"tier": "two"})
    dropped = [Dropped(task_id="b", tier="two", kind="error", reason="Bad: a\nb " + 999 * "c")]
    dropped[0].reason += " [e.py, line 3]"
    expert = Expert([*([fine] * 9), odd], dropped=19 * dropped)
    [(tier, reason)] = failing_tiers(subject, expert).items()
    assert tier == "two"
    assert reason.startswith("of the expert, 19 of 20 episodes failed, Bad: a b ccc")
    assert reason.endswith("... [e.py, line 3]")
    assert len(reason) < 230
    assert expert.without({"two"}) == Expert([fine] * 9, [])
    assert failing_tiers(subject, Expert([*([fine] * 9), odd], dropped=9 * dropped)) == {}


def changed(levels: str, *changes: tuple[str, str]) -> str:
    """The environment with some of its code replaced."""
    file = Path(levels.partition(":")[0])
    text = file.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    return levels


SIX = ('("one", "two")', '("a", "b", "two", "c", "d", "e")')


def test_of_many_levels_those_that_fail_are_named(levels: str, tmp_path: Path) -> None:
    first = ('self.tier == "two"', 'self.tier in "abtwo"')
    subject = environment(changed(levels, SIX, first), {}, None)
    said: list[str] = []
    kept, failing = fewer_tiers(subject, tmp_path, said.append, scratch=True)
    assert list(kept.tiers) == ["c", "d", "e"]
    assert list(failing) == ["a", "b", "two"]
    assert said[0].startswith("level 'a' is left out: of the expert, 2 of 2 episodes failed, KeyEr")
    assert "6 levels: the shortest of 3 played are c, d, e" in said[3]


def test_chosen_levels_that_all_fail_are_named(levels: str, tmp_path: Path) -> None:
    subject = environment(changed(levels, ('self.tier == "two"', "True")), {}, "one,two")
    assert subject.env is not None
    expert = play_expert(subject.env, subject.take(64, 0), tmp_path, EXPERT_S)
    told = no_demonstration(subject, expert)
    assert "episodes of the expert failed in levels 'one', 'two': KeyError: 'k' [fail" in told


def test_a_level_without_tasks_is_left_out(levels: str) -> None:
    raises = (
        '        tier = tier or "one"\n',
        "        if tier == 'two': raise ValueError('file')\n",
    )
    subject = environment(changed(levels, raises), {}, None)
    said: list[str] = []
    kept, broken = without_unmade_tiers(subject, 64, said.append)
    assert list(kept.tiers) == ["one"]
    assert broken["two"].startswith("Sums.task('two', 0) raised ValueError: file [failing_levels_")
    assert said == [f"level 'two' is left out: {broken['two']}"]
    with pytest.raises(
        ConfigError, match=r"py:Sums: Sums\.task\('two', 0\) raised ValueError: file"
    ):
        without_unmade_tiers(replace(subject, tiers=["two"]), 64, said.append)


def test_an_error_of_the_expert_does_not_make_the_others_few(levels: str, tmp_path: Path) -> None:
    subject = environment(levels, {}, None)
    assert subject.env is not None
    here = run(play_here(subject.env, subject.take(64, 0), EXPERT_S))
    assert here.shown
    assert here.per_s > 10
    expert = play_expert(subject.env, subject.take(400, 0), tmp_path, EXPERT_S)
    assert expert.num_played == 400


@pytest.mark.slow  # it waits for time limits
def test_a_level_that_hangs_leaves_time_to_the_others(levels: str, tmp_path: Path) -> None:
    sleeps = ('raise KeyError("k")', "await asyncio.sleep(1000)")
    subject = environment(
        changed(levels, sleeps, ("from random", "import asyncio\nfrom random")), {}, None
    )
    assert subject.env is not None
    begun = time.monotonic()
    expert = play_expert(subject.env, subject.take(400, 0), tmp_path, EXPERT_S)
    assert time.monotonic() - begun < 2 * EXPERT_S
    assert len(expert.demonstrations) > 100
    assert failing_tiers(subject, expert) == {
        "two": "of the expert, 2 of 2 episodes failed, took longer than 6 s"
    }


@pytest.mark.slow  # it waits for a time limit
def test_a_first_level_that_hangs_leaves_time_to_the_others(levels: str, tmp_path: Path) -> None:
    changes = (
        ('self.tier == "two"', 'self.tier == "one"'),
        ('raise KeyError("k")', "await sleep(99)"),
    )
    imported = ("from random", "from asyncio import sleep\nfrom random")
    subject = environment(changed(levels, *changes, imported), {}, None)
    assert subject.env is not None
    expert = play_expert(subject.env, subject.take(400, 0), tmp_path, EXPERT_S)
    assert len(expert.demonstrations) > 100
    assert failing_tiers(subject, expert) == {
        "one": "of the expert, 1 of 1 episode failed, took longer than 12 s"
    }


def with_test_levels(levels: str) -> Subject:
    file = Path(levels.partition(":")[0])
    text = file.read_text().replace('("one", "two")', '("one", "one/test", "two", "two/test")')
    file.write_text(text.replace('self.tier == "two"', 'self.tier == "two/test"'))
    return environment(levels, {}, None)


def test_a_held_out_level_that_cannot_be_played_is_named(levels: str) -> None:
    subject = with_test_levels(levels)
    config = base(subject, 0, None, "sft.jsonl", shows=True)
    [line] = of_heldout_levels(config, subject, subject.take(4, 0))
    assert "of level 'two/test' that were tried cannot be played (task two/test-" in line
    assert "KeyError: 'k'" in line


def test_init_ends_where_no_held_out_level_can_be_played(levels: str) -> None:
    subject = replace(with_test_levels(levels), tiers=["two"])
    config = base(subject, 0, None, "sft.jsonl", shows=True)
    with pytest.raises(ConfigError, match=r"held-out levels two/test: none of 8 .* played"):
        of_heldout_levels(config, subject, subject.take(4, 0))


def test_environments_without_held_out_levels_are_not_played(levels: str) -> None:
    subject = environment(levels, {}, None)
    assert of_heldout_levels(base(subject, 0, None, "x", shows=True), subject, []) == []
