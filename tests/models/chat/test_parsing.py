"""Parsing of turns: any text gives parts or an error text, never an exception."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core.errors import ConfigError
from ludus.core.types import ToolCall, ToolSpec
from ludus.models.chat.parsing import (
    ReAct,
    ToolParser,
    between,
    parse_react,
    split_thinking,
    without_calls,
)

TURN = ToolSpec(
    name="turn",
    parameters={
        "type": "object",
        "properties": {"side": {"enum": ["left", "right"]}, "times": {"type": "integer"}},
        "required": ["side"],
        "additionalProperties": False,
    },
)
PARSER = ToolParser([TURN, ToolSpec(name="look")])


def call(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


def test_one_call_and_the_text_before_it() -> None:
    text = "I turn.\n" + call('\n{"name": "turn", "arguments": {"side": "left"}}\n')
    assert PARSER.parse(text) == (
        "I turn.",
        [ToolCall(name="turn", arguments={"side": "left"})],
        None,
    )


def test_several_calls_and_missing_arguments() -> None:
    content, calls, error = PARSER.parse(call('{"name": "look"}') + "\n" + call('{"name":"look"}'))
    assert (content, error) == ("", None)
    assert calls == [ToolCall(name="look")] * 2


def test_an_opening_mark_repeated_without_end_is_read_at_once() -> None:
    text = "<tool_call>" * 300_000  # in quadratic time: hours
    content, calls, error = PARSER.parse(text)
    assert (content, calls) == (text, [])
    assert error is not None
    assert "not complete" in error
    assert without_calls(text) == text
    assert between(f"a</x>{text}<x>b</x>c<x>", "<x>", "</x>") == (["b"], f"a</x>{text}c<x>")


def test_text_without_calls_is_unchanged() -> None:
    assert PARSER.parse("  turn left\n") == ("  turn left\n", [], None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (call('{"name": "turn", "arguments": {"side": "left"}'), "not valid JSON"),
        (call('{"name": "turn", "arguments": {"side": NaN}}'), "NaN is no JSON value"),
        (call("[" * 100_000), "nested too deeply"),
        (call('{"name": "look", "arguments": ' + "9" * 5000 + "}"), "not valid JSON"),
        (call('["turn"]'), "has no name"),
        (call('{"name": 3}'), "has no name"),
        (call('{"name": "trun", "arguments": {}}'), "did you mean turn"),
        (call('{"name": "turn", "args": {}}'), "keys it may not have: args"),
        (call('{"name": "turn", "arguments": "left"}'), "not a JSON object"),
        (call('{"name": "turn", "arguments": {}}'), "'side' is a required property"),
        (
            call('{"name": "turn", "arguments": {"side": "up"}}'),
            r"arguments.side: 'up' is not one of",
        ),
        (call('{"name": "turn", "arguments": {"side": "left", "x": 1}}'), "'x' was unexpected"),
        (call('{"name": "look", "arguments": {"a": "\\ud800"}}'), "surrogate"),
        ('<tool_call>{"name": "look"}', "not complete"),
        (call('{"name": "look"}') + "<tool_call>", "not complete"),
        ('{"name": "look"}</tool_call>', "not complete"),
    ],
)
def test_malformed_calls_give_errors(text: str, problem: str) -> None:
    content, calls, error = PARSER.parse(text)
    assert (content, calls) == (text, [])
    assert error is not None
    assert problem in error
    assert len(error) <= 400


def test_one_malformed_call_invalidates_all() -> None:
    assert PARSER.parse(call('{"name": "look"}') + call("{"))[1] == []


@given(
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                '{"name": "look"',
                "}",
                '"',
                "[",
                ', "arguments": {}',
                "\\",
                "\ud800",
                "\n",
                "1e999",
                "null",
            ]
        )
    )
)
def test_no_text_raises(pieces: list[str]) -> None:
    _, calls, error = PARSER.parse("".join(pieces))
    assert not (calls and error)


def test_a_tool_that_is_no_schema_is_refused() -> None:
    with pytest.raises(ConfigError, match="'bad'"):
        ToolParser([ToolSpec(name="bad", parameters={"type": "objet"})])


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("turn left", False, (None, "turn left", True)),
        ("<think>\nhm\n</think>\n\ngo", False, ("hm", "go", True)),
        (" \n<think>hm</think>go", False, ("hm", "go", True)),
        ("hm\n</think>\n\ngo", True, ("hm", "go", True)),
        ("hm</think>go", False, ("hm", "go", True)),
        ("<think></think>go", False, ("", "go", True)),
        ("<think>hm", False, ("hm", "", False)),
        ("hm", True, ("hm", "", False)),
        ("go <think>", False, (None, "go <think>", True)),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c", True)),
    ],
)
def test_thinking(text: str, opened: bool, parts: tuple[str | None, str, bool]) -> None:
    assert split_thinking(text, opened=opened) == parts


def test_react() -> None:
    assert parse_react("Thought:\nleft\n\nAction:\nturn left\n") == ReAct("left", "turn left")
    assert parse_react("Action: turn left") == ReAct("", "turn left")
    assert parse_react("just text").error is not None
    assert "2 actions" in (parse_react("Action: a\nAction: b").error or "")
    assert parse_react("Thought: hm\nAction:  ").error is not None
