"""Streamed parts add up to the whole turn, for any tokenization of the text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_world import TOOL, make_tokenizer

from ludus.core.types import ToolSpec
from ludus.models.chat.renderer import Renderer
from ludus.models.samplers.base import Completion
from ludus.services.model.engine import Token
from ludus.services.model.formatting import (
    ChatStream,
    TextStream,
    cut,
    message_of,
    num_held,
    text_of,
)

TOKENIZER = make_tokenizer()
PLAIN = Renderer(TOKENIZER)
TOOLS = Renderer(TOKENIZER, None, [ToolSpec(**TOOL["function"])])
CALL = '<tool_call>{"name": "press", "arguments": {"lever": "red"}}</tool_call>'
UNKNOWN = '<tool_call>{"name": "pull"}</tool_call>'
PIECES = ["<think>", "</think>", "\n", " ", "a", "stop", "<thi", "é€🙂", CALL, "<tool_call>", "<im"]
PIECES += ["<eos>"]


def turn(text: str, ended: bool = True) -> tuple[list[Token], Completion]:
    ids = [
        id
        for number, part in enumerate(text.split("<eos>"))
        for id in [
            *PLAIN.stop_token_ids[: number > 0],  # generation goes on with ignore_eos
            *TOKENIZER(part, add_special_tokens=False)["input_ids"],
        ]
    ]
    ids += PLAIN.stop_token_ids[:1] if ended else []
    tokens = [Token(id, -1.0, 0, []) for id in ids]
    return tokens, Completion(ids, [-1.0] * len(ids), "stop", 0)


def streamed(writer: TextStream, tokens: list[Token], done: Completion) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for delta in [*(writer.add(token) for token in tokens), writer.end(done)]:
        for key, value in delta.items():
            parts[key] = parts[key] + value if key in parts else value
    return parts


def test_cut_and_num_held() -> None:
    assert cut("one two three", ["three", " two"]) == "one"
    assert cut("one", ["two"]) == "one"
    assert num_held("ends with <thin", ["<think>", "x"]) == 5
    assert num_held("abab", ["ababc", "bad"]) == 4
    assert num_held("<think>", ["<think>"]) == 0


@pytest.mark.parametrize(
    ("text", "thinking", "content", "calls"),
    [
        ("plain < text", None, "plain < text", 0),
        ("<think>\nwhy not\n</think>\n\nbecause", "why not", "because", 0),
        ("<think>\nnever closed", "never closed", "", 0),
        (f"I press.\n{CALL}", None, "I press.", 1),
        (f"<think>\nred\n</think>\n\n{CALL}\n{CALL}", "red", "", 2),
        (UNKNOWN, None, UNKNOWN, 0),
        ("half a <tool_call>{", None, "half a <tool_call>{", 0),
    ],
)  # fmt: skip
def test_parsed_turn(text: str, thinking: str | None, content: str, calls: int) -> None:
    tokens, done = turn(text)
    message = message_of(done, TOOLS, ())
    assert (message.thinking, message.content) == (thinking, content)
    assert len(message.tool_calls) == calls
    parts = streamed(ChatStream(TOOLS, True, ()), tokens, done)
    assert parts.get("reasoning_content", "") == (thinking or "")
    assert parts.get("content", "") == content
    assert len(parts.get("tool_calls", [])) == calls


@settings(max_examples=25)
@given(st.lists(st.sampled_from(PIECES), max_size=8), st.booleans())
def test_streamed_text_equals_the_whole_text(pieces: list[str], ended: bool) -> None:
    tokens, done = turn("".join(pieces), ended)
    for stops in ((), ("stop",), ("a\n", "🙂")):
        whole = text_of(done, TOKENIZER, PLAIN.stop_token_ids, stops)
        writer = TextStream(TOKENIZER, PLAIN.stop_token_ids, stops)
        assert streamed(writer, tokens, done).get("text", "") == whole


@settings(max_examples=150)
@given(st.lists(st.sampled_from(PIECES), max_size=8), st.booleans())
def test_streamed_turn_equals_the_whole_turn(pieces: list[str], ended: bool) -> None:
    tokens, done = turn("".join(pieces), ended)
    for stops in ((), ("stop",)):
        for renderer, tools in ((TOOLS, True), (PLAIN, False)):
            whole = message_of(done, renderer, stops)
            parts = streamed(ChatStream(renderer, tools, stops), tokens, done)
            assert parts.get("reasoning_content", "") == (whole.thinking or "")
            assert parts.get("content", "") == whole.content
            calls = [call["function"]["name"] for call in parts.get("tool_calls", [])]
            assert calls == [call.name for call in whole.tool_calls]
