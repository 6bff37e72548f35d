"""Comparison with the package `renderers`: same ids for Qwen3, turn by turn."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from ludus.core.types import Message, Spec, ToolCall, ToolSpec
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import train_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peers = pytest.importorskip("renderers", reason="the package renderers is not installed")
    from renderers.configs import Qwen3RendererConfig
    from renderers.qwen3 import Qwen3Renderer

TOOL = ToolSpec(name="go", description="Walk.", parameters={"type": "object", "properties": {}})
TEXTS = ["You see a red ball.", "turn left, then go forward"]


def as_dict(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking is not None:
        fields["reasoning_content"] = message.thinking
    if message.tool_calls:
        fields["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.tool_calls
        ]
    return fields


@pytest.mark.parametrize("thinking", ["keep", "forbid"])
@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_open_and_bridge_agree(thinking: Any, with_tools: bool, cut: bool) -> None:
    tokenizer = train_tokenizer(Spec(name="bpe"), TEXTS, "qwen3")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>"]})
    tools = [TOOL] if with_tools else []
    ours = Renderer(tokenizer, tools=tools, thinking=thinking)
    config = Qwen3RendererConfig(enable_thinking=thinking == "keep", thinking_retention="all")
    theirs = Qwen3Renderer(tokenizer, config)
    specs = [{"type": "function", "function": tool.model_dump()} for tool in tools] or None

    opening = [Message(role="system", content="Be brief."), Message(role="user", content=TEXTS[0])]
    ids = ours.open(opening)
    expected = theirs.render_ids(
        [as_dict(m) for m in opening], tools=specs, add_generation_prompt=True
    )
    assert ids == expected

    call = ToolCall(name="go", arguments={"to": "left"}) if with_tools else None
    for turn in range(4):
        thought = f"hm {turn}" if thinking == "keep" and turn % 2 else None
        said = Message(
            role="assistant",
            content="turn left",
            thinking=thought,
            tool_calls=[call, call] if call else [],
        )
        sampled = ours.assistant(said)[: -1 if cut else None]
        role: Any = "tool" if with_tools else "user"
        answers = [Message(role=role, content=f"ok {turn}.\n{k}") for k in range(1 + with_tools)]
        bridged = theirs.bridge_to_next_turn(
            ids, sampled, [as_dict(m) for m in answers], tools=specs
        )
        assert bridged is not None
        ids = ids + sampled + ours.extend(answers, sampled)
        assert ids == bridged.token_ids


def test_a_parsed_turn_agrees() -> None:
    tokenizer = train_tokenizer(Spec(name="bpe"), TEXTS, "qwen3")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>"]})
    call = ToolCall(name="go", arguments={})
    ours, theirs = Renderer(tokenizer, tools=[TOOL]), Qwen3Renderer(tokenizer)
    ids = ours.assistant(
        Message(role="assistant", content="Off.", thinking="hm", tool_calls=[call])
    )
    mine, other = ours.parse(ids).message, theirs.parse_response(ids)
    assert (mine.content, mine.thinking) == (other.content, other.reasoning_content)
    assert [c.name for c in mine.tool_calls] == [c.name for c in other.tool_calls]
