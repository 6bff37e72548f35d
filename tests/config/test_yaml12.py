"""Plain values as YAML 1.2 reads them; whatever is dumped is read back unchanged."""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from ludus.config import yaml12
from ludus.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E3", 1000.0),
        ("-.5", -0.5),
        ("5.", 5.0),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("0x1F", 31),
        ("-7", -7),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("on", "on"),
        ("No", "No"),
        ("y", "y"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2020-01-01", "2020-01-01"),
        ("=", "="),
        ("'1e-3'", "1e-3"),
    ],
)
def test_plain_values(text, value):
    found = yaml12.parse(text, "here")[0]
    assert found == value
    assert type(found) is type(value)


@given(st.text(st.characters(codec="utf-8")))
@example("a\x85b")
@example("\u2028")
@example("1e-3")
@example("on")
@example("010")
@example("---\n...")
@example("<<")
def test_any_text_survives(text):
    for written in (yaml12.dump({"key": text}), f"key: {yaml12.inline(text)}"):
        assert yaml12.parse(written, "here")[0] == {"key": text}


@pytest.mark.parametrize("word", ["on", "no", "1e-3", "010", "1:30", "2020-01-01", "null", ""])
def test_other_readers_find_the_same_text(word):
    assert yaml.safe_load(yaml12.dump([word])) == [word]


def test_lines_are_those_of_the_keys():
    text = "a: 1\nb:\n  - c\n  - d: 2\n    e: 3\n"
    value, lines = yaml12.parse(text, "here")
    assert value == {"a": 1, "b": ["c", {"d": 2, "e": 3}]}
    assert lines == {
        ("a",): 1,
        ("b",): 2,
        ("b", 0): 3,
        ("b", 1): 4,
        ("b", 1, "d"): 4,
        ("b", 1, "e"): 5,
    }


def test_merge_keys_work():
    text = "base: &b {x: 1, y: 2}\nmore:\n  <<: *b\n  y: 3\n"
    assert yaml12.parse(text, "here")[0]["more"] == {"x": 1, "y": 3}


def aliases(levels: int) -> str:
    """Each level is a list of ten aliases of the level before: 10**levels values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for i in range(1, levels):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (aliases(10), "more than 100,000 values, aliases included"),
        ("[" * 5000, "nested too deeply"),
        ("x: " + "{a: " * 900 + "1" + "}" * 900, "nested too deeply"),
        ("!!bool x", "'x' is neither true nor false"),
        ("!!int x", "not valid YAML"),
    ],
)
def test_hostile_texts_are_refused(text, fault):
    with pytest.raises(ConfigError, match=f"^here: .*{fault}"):
        yaml12.parse(text, "here")


def test_a_few_aliases_are_read():
    assert len(yaml12.parse(aliases(3), "here")[0]["a2"]) == 10
