"""The exception tree, its exit codes, and the nearest name."""

from __future__ import annotations

import pickle

import pytest

from ludus.core import errors
from ludus.core.errors import did_you_mean


def test_every_error_is_in_the_drawn_tree():
    classes = [
        value
        for value in vars(errors).values()
        if getattr(value, "__module__", "") == errors.__name__ and isinstance(value, type)
    ]
    assert all(issubclass(cls, errors.LudusError) for cls in classes)
    assert errors.__doc__ is not None
    assert all(cls.__name__ in errors.__doc__ for cls in classes)
    for cls in classes:
        (line,) = [line for line in errors.__doc__.splitlines() if _drawn(line) == cls.__name__]
        depth = (line.index(cls.__name__) - 4) // 4
        assert depth == cls.__mro__.index(errors.LudusError)


def _drawn(line: str) -> str:
    """The class that a line of the tree draws."""
    return line.strip("│├└─ ").partition(" ")[0] if line.startswith("    ") else ""


def test_exit_codes():
    assert errors.LudusError.exit_code == 1
    assert errors.ConfigError.exit_code == 2
    assert errors.DataError.exit_code == 1
    assert errors.MissingDependency.exit_code == 2


def test_an_absent_package_crosses_processes():
    error = errors.MissingDependency("pebble", "envs", "the pool")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.package, again.extra) == (str(error), "pebble", "envs")


@pytest.mark.parametrize(
    ("name", "choices", "text"),
    [
        ("stpes", ["steps", "seed"], " (did you mean steps?)"),
        ("gpro", ["grpo", "gspo"], " (did you mean grpo?)"),
        ("RL", ["rl", "env"], " (did you mean rl?)"),
        ("zzz", ["b", "a"], " (known: a, b)"),
        ("zzz", [], ""),
        ("zzz", [f"a{i}" for i in range(21)], ""),
    ],
)
def test_did_you_mean(name, choices, text):
    assert did_you_mean(name, choices) == text


def test_did_you_mean_in_full():
    assert did_you_mean("stpes", ["steps"], "rl.{}") == " (did you mean rl.steps?)"
