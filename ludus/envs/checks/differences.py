"""Describes differences between two plays of a task."""

from __future__ import annotations

import json

from ludus.core.errors import counted
from ludus.envs.checks.play import Turn

SEEDED = (
    "The same task has to give the same episode: derive all randomness from it, for example "
    "`random.Random(task.data['seed'])`, and keep nothing from an earlier episode"
)
HASHED = (
    "Between processes the order of sets differs, `hash()` of a text, the clock, addresses in "
    "texts such as `<object at 0x7f...>`, and what earlier episodes left"
)
"""Remedies for episodes that differ: in one process, and between processes."""


def expert_change(first: list[str], second: list[str]) -> str:
    """Describes the first difference of two plays of the expert."""
    pairs = enumerate(zip(first, second, strict=False), start=1)
    found = next(((number, one, other) for number, (one, other) in pairs if one != other), None)
    what = f"takes {len(first)} turns and then {len(second)}"
    if found is not None:
        number, one, other = found
        what = f"takes, in turn {number}, {_cut(repr(one))} and then {_cut(repr(other))}"
    return (
        f"the expert {what}: the same task has to give the same demonstration; derive all "
        "randomness from the task"
    )


def difference(first: list[Turn], second: list[Turn]) -> str:
    """Describes the first difference of two episodes with the same actions."""
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            place = f"turn {number}" if number else "the opening"
            return f"{place} has {_changed(one, other)}"
    return f"it has {counted(len(first) - 1, 'turn')} and then {len(second) - 1}"


def _changed(one: Turn, other: Turn) -> str:
    """Describes the first difference of two turns."""
    for mine, its in zip(one[1], other[1], strict=False):
        said, then = _fields(mine), _fields(its)
        for key in said | then:
            if said.get(key) != then.get(key):
                what = "" if key == "content" else f"{key} "
                return f"{what}{_around(said.get(key), then.get(key))}"
    if one[1] != other[1]:
        return f"{counted(len(one[1]), 'message')} and then {len(other[1])}"
    names = ("the reward", "terminated", "truncated")
    return next(
        f"{name} {mine} and then {its}"
        for name, mine, its in zip(names, one[2:], other[2:], strict=True)
        if mine != its
    )


def _fields(message: str) -> dict[str, object]:
    """The fields of a message that `Player.turns` dumped; what was none is a content."""
    try:
        return dict(json.loads(message))
    except ValueError:
        return {"content": message}


def _around(one: object, other: object) -> str:
    """Two different values, from a little before the place where their texts differ."""
    texts = [value if isinstance(value, str) else json.dumps(value) for value in (one, other)]
    pairs = enumerate(zip(*texts, strict=False))
    differ = next((place for place, (a, b) in pairs if a != b), min(map(len, texts)))
    start = max(differ - 40, 0)
    cut = "..." if start else ""
    return " and then ".join(_cut(repr(cut + text[start:])) for text in texts)


def _cut(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."
