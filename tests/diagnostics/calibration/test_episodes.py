"""Episodes of the expert and of random actions, in environments that misbehave."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ludus.core.errors import ConfigError
from ludus.core.system.signals import run
from ludus.core.types import Message, Spec, Task
from ludus.data.expert import Demonstration
from ludus.diagnostics.calibration.calibrate import repeated
from ludus.diagnostics.calibration.conversations import measured
from ludus.diagnostics.calibration.episodes import play_again, play_random, success_of
from ludus.diagnostics.calibration.expert import Expert, play_expert
from ludus.diagnostics.calibration.levels import refuse_long
from ludus.diagnostics.calibration.subject import environment, open_subject
from ludus.envs import ENVS
from ludus.envs.checks.check import check_env

ENV = """
import os, time
from ludus import Env, Message, Observation, StepResult, Task

class Count(Env):
    max_turns = 3
    async def reset(self, task):
        self.seed, self.turns = task.data["seed"], 0
        salt = os.urandom(8).hex() if NOISE else ""
        return Observation(messages=[Message(role="user", content=f"go {salt}")])
    async def step(self, action):
        if action.content == "raise":
            raise RuntimeError("boom")
        if HANGS and self.seed == 3:
            time.sleep(60)
        self.turns += 1
        done = self.turns == 2
        return StepResult(messages=[Message(role="user", content="on")], reward=1.0 * done,
                          terminated=done)
    def expert_action(self):
        return "walk"
    @classmethod
    def task(cls, tier, seed):
        return Task(id=str(seed), data={"seed": seed})
"""
NUMBER = itertools.count()


def env(tmp_path: Path, *, noise: bool = False, hangs: bool = False) -> Spec:
    path = tmp_path / f"env{next(NUMBER)}.py"
    path.write_text(f"NOISE, HANGS = {noise}, {hangs}\n" + ENV)
    return Spec(name=f"{path}:Count")


def tasks(spec: Spec, count: int) -> list:
    made = ENVS.build(spec)
    return [made.task(None, seed) for seed in range(count)]


@pytest.mark.slow  # it waits for a time limit
def test_an_expert_that_hangs_in_a_task_leaves_the_others(tmp_path: Path) -> None:
    spec = env(tmp_path, hangs=True)
    expert = play_expert(spec, tasks(spec, 12), tmp_path, seconds=30)
    assert len(expert.demonstrations) == 11
    assert expert.failed == {"timeout": 1}
    assert "took longer than" in expert.reason
    assert expert.turns == [2] * 11


SILENT = """
class Silent(Count):
    async def reset(self, task):
        await super().reset(task)
        return Observation(messages=[])

class Text(Count):
    async def step(self, action):
        return StepResult(reward="good")

class Words(Count):
    async def reset(self, task):
        return Observation(messages=["go"])
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Text", "EnvError: Text.step: StepResult has reward='good'; it has to be a number or No"),
        ("Words", "EnvError: Words.reset: Observation has 'go' in messages; it has to be a list o"),
    ],
)
def test_a_wrong_result_is_told_in_a_line(tmp_path: Path, name: str, told: str) -> None:
    path = tmp_path / f"env{next(NUMBER)}.py"
    path.write_text(f"NOISE = HANGS = False\n{ENV}{SILENT}")
    spec = Spec(name=f"{path}:{name}")
    reason = play_expert(spec, tasks(spec, 2), tmp_path, seconds=30).reason
    assert reason.startswith(told)
    assert "\n" not in reason


def test_a_reset_without_messages_is_named(tmp_path: Path) -> None:
    path = tmp_path / f"env{next(NUMBER)}.py"
    path.write_text(f"NOISE = HANGS = False\n{ENV}{SILENT}")
    spec = Spec(name=f"{path}:Silent")
    with pytest.raises(ConfigError, match=r"py:Silent: reset returned no messages for task 0, wh"):
        play_expert(spec, tasks(spec, 2), tmp_path, seconds=30)
    asked = [Task(id="0", data={"seed": 0}, prompt=[Message(role="user", content="?")])]
    assert play_expert(spec, asked, tmp_path, seconds=30).demonstrations


async def test_random_actions_go_on_after_an_error(tmp_path: Path) -> None:
    spec = env(tmp_path)
    played = await play_random(spec, tasks(spec, 20), ["walk", "raise"], seconds=20)
    assert len(played) == 20
    errors = [episode.error for episode in played if episode.error]
    assert 0 < len(errors) < 20
    assert "boom" in errors[0]
    assert {episode.reward for episode in played if not episode.error} == {1.0}
    assert all(episode.success for episode in played if not episode.error)


@pytest.mark.parametrize(("max_turns", "success"), [(1, 0.0), (2, 1.0), (40, 1.0)])
async def test_random_actions_have_the_turns_of_the_recipe(
    tmp_path: Path, max_turns: int, success: float
) -> None:
    """The class's own limit is 3: chance was that of more turns than the policy has."""
    spec = env(tmp_path)
    played = await play_random(spec, tasks(spec, 4), ["walk"], seconds=20, max_turns=max_turns)
    assert success_of(played) == success


WRONG = {
    "def expert_knows_more(self, task): return True": "raised TypeError",
    "@classmethod\n    def expert_knows_more(cls, task): return 1": "returned 1",
}


@pytest.mark.parametrize(("method", "fault"), WRONG.items(), ids=WRONG.values())
def test_a_wrong_expert_knows_more_is_told(tmp_path: Path, method: str, fault: str) -> None:
    path = tmp_path / f"env{next(NUMBER)}.py"
    path.write_text(f"NOISE = HANGS = False\n{ENV}    {method}\n")
    with pytest.raises(ConfigError, match=rf"Count.expert_knows_more {fault}.*@classmethod def"):
        open_subject(f"{path}:Count", {}, None).searches(Task(id="0"))
    findings = run(check_env(f"{path}:Count", num_tasks=1))
    assert any(f"expert_knows_more {fault}" in finding.detail for finding in findings)


async def test_an_environment_that_hangs_ends_the_random_play(tmp_path: Path) -> None:
    spec = env(tmp_path, hangs=True)
    played = await play_random(spec, tasks(spec, 20), ["walk"], seconds=1)
    assert len(played) == 4
    assert "took longer" in played[-1].error


async def test_a_second_play_shows_differences(tmp_path: Path) -> None:
    for noise in (False, True):
        spec = env(tmp_path, noise=noise)
        first = await play_again(spec, tasks(spec, 3), seconds=20)
        second = await play_again(spec, tasks(spec, 3), seconds=20)
        assert [d.messages for d in first] != [d.messages for d in second] or not noise
        assert [d.messages for d in first] == [d.messages for d in second] or noise


def test_a_task_that_differs_is_told_once(tmp_path: Path) -> None:
    for noise in (False, True):
        spec = env(tmp_path, noise=noise)
        first = Expert(run(play_again(spec, tasks(spec, 3), seconds=20)))
        told = list(repeated(environment(spec.name, {}, None), first, tasks(spec, 3)))
        assert len(told) == noise
        assert all("task 0 differs when it is played again" in text for text in told)


SPEAKS = """
from ludus import Env, Message, Observation, StepResult, Task

class Speaks(Env):
    async def reset(self, task):
        return Observation(messages=[Message(role="user", content="word " * 50_000)])

    async def step(self, action):
        return StepResult(messages=[], reward=1.0, terminated=True)

    @classmethod
    def task(cls, tier, seed):
        return Task(id=f"t-{seed}", data={"seed": seed}, tier=tier, source="x")
"""


def test_openings_far_beyond_the_context_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SPEAKS)
    subject = open_subject(f"{tmp_path}/own.py:Speaks", {}, None)
    with pytest.raises(ConfigError, match=r"the shortest of 4 has 250,000 characters"):
        refuse_long(subject)


@pytest.mark.parametrize(("characters", "number"), [(10, 1600), (5_000, 400), (100_000, 64)])
def test_of_long_episodes_fewer_are_split_into_tokens(characters: int, number: int) -> None:
    messages = [
        Message(role="user", content="x" * (characters - 2)),
        Message(role="assistant", content="go"),
    ]
    shown = Demonstration(
        task_id="1", tier=None, messages=messages, reward=1.0, success=True, num_turns=1
    )
    assert len(measured([shown] * 2000)) == number
