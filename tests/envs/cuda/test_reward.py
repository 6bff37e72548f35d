"""Rewards of a kernel: named parts, Kevin's, the ladder; numbers without an effect are refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from ludus.core.errors import ConfigError
from ludus.envs.cuda.reward import KernelReward, Measured

BROKEN = Measured(compiles=False, correct=False)
WRONG = Measured(compiles=True, correct=False, efficiency=1.0, quality=1.0)
RIGHT = Measured(compiles=True, correct=True, efficiency=0.5, quality=1.0)


def timed(speedup: float) -> Measured:
    return Measured(True, True, speedup=speedup, efficiency=0.5, quality=1.0)


def reward(**fields: Any) -> KernelReward:
    return KernelReward.model_validate(fields)


def test_parts_that_are_timed() -> None:
    plain = reward()
    assert plain.score(BROKEN, timed=True).value == 0.0
    assert plain.score(WRONG, timed=True).value == pytest.approx(0.30)  # nothing but compilation
    scored = plain.score(timed(1.0), timed=True)
    assert scored.value == pytest.approx(0.30 + 0.30 + 0.25 * 0.5 + 0.10 * 0.5 + 0.05)
    assert scored.parts == {
        "compilation": 1.0, "correctness": 1.0, "performance": 0.5, "efficiency": 0.5,
        "quality": 1.0,
    }  # fmt: skip
    assert "0.25 * 0.5 performance" in scored.explanation
    fast = plain.score(timed(3.0), timed=True)
    assert fast.value == pytest.approx(0.95 + 0.1)
    assert fast.parts["speedup_bonus"] == 0.1


def test_a_part_that_is_not_measured_leaves_its_weight_to_the_others() -> None:
    scored = reward().score(RIGHT, timed=False)
    assert scored.value == pytest.approx((0.30 + 0.30 + 0.10 * 0.5 + 0.05) / 0.75)
    assert "performance" not in scored.parts
    assert "performance is left out: nothing was timed" in scored.explanation
    assert reward().score(WRONG, timed=False).value == pytest.approx(0.30 / 0.75)
    best = Measured(True, True, efficiency=1.0, quality=1.0)
    assert reward().score(best, timed=False).value == pytest.approx(1.0)


def test_the_bonus_for_improvement_is_of_later_turns_and_of_what_they_add() -> None:
    plain = reward()
    assert "improvement_bonus" not in plain.score(RIGHT, timed=False).parts
    scored = plain.score(RIGHT, timed=False, best=0.4)
    assert scored.parts["improvement_bonus"] == pytest.approx(0.1 * (scored.base - 0.4))
    assert scored.value == pytest.approx(scored.base + 0.1 * (scored.base - 0.4))
    assert plain.score(WRONG, timed=False, best=0.9).value == pytest.approx(0.4)
    assert plain.score(WRONG, timed=False, best=0.0).value == pytest.approx(0.4)


def test_success_is_a_right_kernel_of_any_speed_and_efficiency() -> None:
    poor = Measured(True, True, speedup=0.001, efficiency=0.0, quality=0.0)
    for kind in ("parts", "kevin", "ladder"):
        of_kind = reward(kind=kind)
        assert of_kind.score(poor, timed=True).value >= of_kind.success_at(timed=True)
        assert of_kind.score(WRONG, timed=True).value < of_kind.success_at(timed=True)
    poor = Measured(True, True)
    for kind in ("parts", "kevin"):
        of_kind = reward(kind=kind)
        assert of_kind.score(poor, timed=False).value >= of_kind.success_at(timed=False)
        assert of_kind.score(WRONG, timed=False).value < of_kind.success_at(timed=False)


def test_kevin() -> None:
    kevin = reward(kind="kevin")
    assert kevin.score(timed(1.5), timed=True).value == pytest.approx(1.8)
    assert kevin.score(WRONG, timed=True).value == 0.0
    assert kevin.score(timed(150.0), timed=True).value == pytest.approx(10.3)
    untimed = kevin.score(RIGHT, timed=False)
    assert untimed.value == pytest.approx(0.3)
    assert "nothing was timed" in untimed.explanation
    assert reward(kind="kevin", kevin={"speedup": 2.0}).score(
        timed(1.5), timed=True
    ).value == pytest.approx(3.3)


def test_the_ladder() -> None:
    ladder = reward(kind="ladder")
    values = [ladder.score(timed(s), timed=True).value for s in (0.5, 1.0, 1.2, 1.5, 2.9, 3.0, 99)]
    assert values == [-0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    assert ladder.score(BROKEN, timed=True).value == -0.5
    assert ladder.score(WRONG, timed=True).value == -0.3
    assert ladder.score(Measured(False, False, decoy=True), timed=True).value == -1.0
    assert ladder.score_range(timed=True, rounds=1) == (-1.0, 1.0)


def test_all_values_are_in_the_range() -> None:
    measured = [BROKEN, WRONG, timed(0.1), timed(1.0), timed(2.5), timed(1e9)]
    measured.append(Measured(True, True, 50.0, 1.0, 1.0))
    for kind in ("parts", "kevin", "ladder"):
        of_kind = reward(kind=kind)
        low, high = of_kind.score_range(timed=True, rounds=4)
        for item in measured:
            for best in (None, 0.0, 0.3):
                value = of_kind.score(item, timed=True, best=best).value
                assert low - 1e-9 <= value <= high + 1e-9, (kind, item)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "kevin", "parts": {"performance": 0.5}}, "parts has no effect"),
        ({"kind": "parts", "ladder": {}}, "ladder has no effect"),
        ({"parts": {"speed": 1}}, "speed"),
        ({"parts": {"correctness": 0}}, "greater than 0"),
        ({"parts": {"compilation": 1e308}}, "compilation is at most"),
        ({"parts": {"patterns": 0, "pattern_cost": 0.5}}, "pattern_cost has no effect with patt"),
        ({"parts": {"efficiency": 0, "occupancy": 0.9}}, "occupancy has no effect with effic"),
        ({"parts": {"occupancy": 0, "spills": 0, "patterns": 0}}, "cannot all be 0"),
        ({"kind": "ladder", "ladder": {"steps": {1.0: 0.5, 2.0: 0.1}}}, "cannot have a lower"),
        ({"kind": "ladder", "ladder": {"wrong": 0.0}}, "above all failures"),
        ({"kind": "ladder", "ladder": {"slower": 0.3}}, "above the first"),
        ({"kind": "kevin", "kevin": {"correct": 0}}, "greater than 0"),
    ],
)
def test_wrong_numbers(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        reward(**fields)


def test_numbers_without_an_effect_are_refused() -> None:
    def check(asked: bool = False, timed: bool = False, rounds: int = 4, **fields: Any) -> None:
        reward(**fields).check(timed=timed, asked=asked, rounds=rounds)

    check(parts={"performance": 0.5}, timed=True, asked=True)
    check(parts={"performance": 0.5}, asked=True)  # elsewhere it is timed
    with pytest.raises(ConfigError, match=r"parts\.performance has no effect"):
        check(parts={"performance": 0.5})
    with pytest.raises(ConfigError, match=r"kevin\.max_speedup has no effect"):
        check(kind="kevin", kevin={"max_speedup": 3})
    with pytest.raises(ConfigError, match="ladder is one of speed-ups"):
        check(kind="ladder", asked=True)
    with pytest.raises(ConfigError, match="improvement_bonus is for later turns"):
        check(parts={"improvement_bonus": 0.2}, rounds=1)
