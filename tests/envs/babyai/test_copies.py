"""Copies of generated BabyAI levels."""

from __future__ import annotations

import random

import pytest

from ludus.envs.babyai import world as babyai_world
from ludus.envs.babyai.copies import Copies
from ludus.envs.babyai.world import LEVELS, describe_world, make_level


def _play(world: object, seed: int) -> list[str]:
    """The grid after each of 60 random actions, and what they return."""
    rng, seen = random.Random(seed), []
    for _ in range(60):
        _, reward, terminated, truncated, _ = world.step(rng.choice([0, 1, 2, 2, 3, 4, 5]))  # type: ignore[attr-defined]
        seen.append(f"{describe_world(world)} {reward} {terminated} {truncated}")
        if terminated or truncated:
            break
    return seen


@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_plays_as_the_level_and_leaves_it_unchanged(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(babyai_world, "COPIES", copies := Copies())
    first = make_level(level, 2)
    opening = describe_world(first)
    assert copies.get((level, 2, babyai_world.MAX_DRAWS)) is not None, "every level can be kept"
    played = _play(first, 3)
    copy = make_level(level, 2)
    assert describe_world(copy) == opening
    assert _play(copy, 3) == played
    assert describe_world(make_level(level, 2)) == opening
    if first.carrying is None and first.instrs is not None:
        assert copy.instrs.env is copy, "instructions look at the copy, not at the level"


def test_the_memory_is_bounded_and_the_oldest_level_goes_first() -> None:
    copies = Copies(max_bytes=6000)
    level = make_level("GoToObjS6", 1)
    for number in range(10):
        copies.keep(number, level)
        copies.get(0)
    assert copies.get(1) is None
    assert copies.get(0) is not None, "used last"
    assert copies.get(9) is not None


def test_a_level_that_cannot_be_pickled_is_generated_again() -> None:
    copies = Copies()
    level = make_level("GoToObjS6", 1)
    level.hook = lambda: None
    copies.keep("level", level)
    assert copies.get("level") is None
