"""Levels of an environment that the expert cannot play."""

from pathlib import Path

import pytest

from ludus.diagnostics.calibration.calibrate import EXPERT_S, calibrate
from ludus.diagnostics.calibration.episodes import play_expert
from ludus.diagnostics.calibration.first import failing_tiers
from ludus.diagnostics.calibration.subject import environment

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
    assert any("level 'two' is left out" in line and "KeyError" in line for line in said)
    assert any("level 'two' is left out" in line for line in made.warnings)
    assert any("fail, 100% of the others succeed" in line for line in said)
