"""Levels of an environment that the expert cannot play."""

from dataclasses import replace
from pathlib import Path

import pytest

from ludus.core.errors import ConfigError
from ludus.data.demonstrations import Dropped
from ludus.data.expert import Demonstration
from ludus.diagnostics.calibration.calibrate import EXPERT_S, calibrate
from ludus.diagnostics.calibration.conversations import of_heldout_levels
from ludus.diagnostics.calibration.episodes import Expert, play_expert
from ludus.diagnostics.calibration.first import base, failing_tiers
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
    assert "in 1 of 2 levels; not two, of whose expert " in line
    assert "failed, KeyError: 'k' [failing_levels_env.py, line" in line
    assert any("level 'two' is left out" in line and "KeyError" in line for line in said)
    assert any("level 'two' is left out" in line for line in made.warnings)
    assert any("fail, 100% of the others succeed" in line for line in said)


def test_a_level_that_nearly_always_fails_is_named_in_one_line(levels: str) -> None:
    subject = environment(levels, {}, None)
    fine = Demonstration(
        task_id="a", tier="one", messages=[], reward=1.0, success=True, num_turns=1
    )
    odd = fine.model_copy(update={"tier": "two"})
    dropped = [Dropped(task_id="b", tier="two", kind="error", reason="Bad: a\nb " + 999 * "c")]
    expert = Expert([*([fine] * 9), odd], dropped=19 * dropped)
    [(tier, reason)] = failing_tiers(subject, expert).items()
    assert tier == "two"
    assert reason.startswith("19 of 20 episodes failed, Bad: a b ccc")
    assert len(reason) < 200
    assert expert.without({"two"}) == Expert([fine] * 9, [])
    assert failing_tiers(subject, Expert([*([fine] * 9), odd], dropped=9 * dropped)) == {}


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
