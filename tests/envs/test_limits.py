"""Declared ranges and thresholds of rewards that are no numbers are refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faulty_envs as faulty
import pytest

from ludus.core.errors import ConfigError, EnvError
from ludus.core.types import Spec, Task
from ludus.envs import ENVS
from ludus.envs.base import Env, limits_of
from ludus.envs.checks.check import check_env
from ludus.envs.mixture import Mixture
from ludus.rollout.hosts.host import LocalEnvs
from ludus.tasks.mixture import PART

WRONG: list[tuple[str, str]] = [
    ("score_range = None", "score_range is None; it has to be two numbers"),
    ("score_range = (0.0,)", r"score_range is \(0.0,\); it has to be two numbers"),
    ("score_range = ('a', 'b')", "it has to be two numbers, the lowest and the highest reward"),
    ("score_range = (0.0, float('inf'))", "it has to be two numbers"),
    ("score_range = (1.0, 1.0)", r"score_range \(1.0, 1.0\) is empty"),
    ("success_at = None", "success_at is None; it has to be a number"),
    ("success_at = float('nan')", "success_at is nan; it has to be a number"),
]


@pytest.mark.parametrize(("line", "said"), WRONG)
def test_a_class_is_refused_when_it_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(f"from faulty_envs import Digit\n\nclass Own(Digit):\n    {line}\n")
    with pytest.raises(ConfigError, match=f"env '.*own.py:Own': .*{said}"):
        ENVS.check(Spec(name=f"{path}:Own"), "env")


class Late(faulty.Digit):
    """The class is right, its objects are not."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


async def test_an_object_is_refused_when_it_is_used() -> None:
    late = Spec(name=f"{__name__}:Late", args={"score_range": None})
    with pytest.raises(EnvError, match="Late: score_range is None"):
        limits_of(LocalEnvs(late).make())
    task = Task(id="a", data={PART: "one", "seed": 1})
    with pytest.raises(EnvError, match="Late: score_range is None"):
        await Mixture(envs={"one": late}).reset(task)
    [finding] = [f for f in await check_env(late, num_tasks=1) if f.check == "declarations"]
    assert "score_range is None; it has to be two numbers" in str(finding)


def test_integers_and_lists_are_numbers() -> None:
    env: Env = Late(score_range=[-1, 2], success_at=1)
    assert limits_of(env) == ((-1, 2), 1)
