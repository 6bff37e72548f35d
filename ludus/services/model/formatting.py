"""Formats tokens for OpenAI's clients: streamed text, thinking, tool calls, logprobs.

A stream cannot take text back. It therefore holds back text that may become a marker or a stop
string, and all tool calls, until the end of the turn.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from tokenizers.decoders import DecodeStream

from ludus.core.types import Message, ToolCall
from ludus.models.chat.parsing import (
    CALL_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    split_thinking,
    without_calls,
)
from ludus.models.chat.renderer import Renderer
from ludus.models.samplers.base import Completion
from ludus.services.model.engine import Token

Delta = dict[str, Any]

MIN_LOGPROB = -9999.0
"""OpenAI's value for minus infinity, which JSON lacks."""


def cut(text: str, stops: Iterable[str]) -> str:
    """The text before the first stop string."""
    positions = [position for stop in stops if (position := text.find(stop)) >= 0]
    return text[: min(positions)] if positions else text


def num_held(text: str, markers: Iterable[str]) -> int:
    """Number of characters at the end of a text that may begin a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest


class TextStream:
    """Streams the text of one choice of `/v1/completions`.

    Special tokens are included, except the token that ends the turn; stop strings are not.
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer, self._stop_ids, self._stops = tokenizer, set(stop_ids), stops
        self._decoder = DecodeStream(skip_special_tokens=False)
        self._waiting: list[int] = []
        self._text, self._sent = "", 0

    def add(self, token: Token) -> Delta:
        """The text that can be sent after this token."""
        self._read(token)
        ready = cut(self._text, self._stops)
        return self._send(ready[: len(ready) - num_held(ready, self._stops)])

    def end(self, done: Completion) -> Delta:
        """The remaining text, at the end of the turn."""
        return self._send(text_of(done, self._tokenizer, self._stop_ids, self._stops))

    def _read(self, token: Token) -> None:
        """Add a token's text; a token that ends turns belongs to the text if another follows."""
        self._waiting.append(token.id)
        if token.id in self._stop_ids:
            return
        for id in self._waiting:
            self._text += self._decoder.step(self._tokenizer.backend_tokenizer, id) or ""
        self._waiting = []

    def _send(self, text: str) -> Delta:
        new, self._sent = text[self._sent :], max(self._sent, len(text))
        return {"text": new} if new else {}


class ChatStream(TextStream):
    """Streams one assistant turn of `/v1/chat/completions`."""

    def __init__(self, renderer: Renderer, tools: bool, stops: Sequence[str]) -> None:
        super().__init__(renderer.tokenizer, renderer.stop_token_ids, stops)
        self._renderer, self._tools = renderer, tools
        self._opened = renderer.parse([]).message.thinking is not None
        self._parts = {"reasoning_content": "", "content": ""}

    def add(self, token: Token) -> Delta:
        self._read(token)
        ready = cut(self._text, self._stops)
        ready = ready[: len(ready) - num_held(ready, self._stops)]
        lead = self._renderer.lead
        if lead.startswith(ready):
            return {}
        ready = ready.removeprefix(lead)
        if not self._opened and THINK_OPEN.startswith(ready.lstrip()):
            return {}  # a thinking block may begin
        thinking, content, closed = split_turn(ready, self._renderer, self._opened)
        if not closed:
            return self._grow("reasoning_content", str(thinking), (THINK_CLOSE,))
        delta = self._grow("reasoning_content", thinking or "", ())
        if not self._tools:
            return delta | self._grow("content", content, ())
        before, call, _ = content.partition(CALL_OPEN)
        held = num_held(before, () if call else (CALL_OPEN,))
        # Spaces before a call are no part of the content.
        return delta | self._grow("content", before[: len(before) - held].rstrip(), ())

    def end(self, done: Completion) -> Delta:
        message = message_of(done, self._renderer, self._stops)
        delta = self._rest("reasoning_content", message.thinking or "")
        delta |= self._rest("content", message.content)
        if message.tool_calls:
            delta["tool_calls"] = [
                {"index": i, **call} for i, call in enumerate(calls_of(message.tool_calls))
            ]
        return delta

    def _grow(self, key: str, text: str, markers: Sequence[str]) -> Delta:
        """The new text of a field, as far as it is certain."""
        ready = text[: len(text) - num_held(text, markers)]
        sent = self._parts[key]
        if not ready.startswith(sent) or ready == sent:
            return {}
        self._parts[key] = ready
        return {key: ready[len(sent) :]}

    def _rest(self, key: str, text: str) -> Delta:
        """The remaining text of a field."""
        sent = self._parts[key]
        if text.startswith(sent):
            return {key: text[len(sent) :]} if len(text) > len(sent) else {}
        return {key: text}  # the turn parsed differently than streamed: send all


def text_of(done: Completion, tokenizer: Any, stop_ids: Iterable[int], stops: Iterable[str]) -> str:
    """A turn's text up to the first stop string, without the token that ended the turn."""
    ids, stop_ids = done.token_ids, set(stop_ids)
    if ids and ids[-1] in stop_ids:
        ids = ids[:-1]
    return cut(decode(tokenizer, ids), stops)


def split_turn(text: str, renderer: Renderer, opened: bool) -> tuple[str | None, str, bool]:
    """As `split_thinking`, for streams: what follows never changes the parts but at their ends.

    So a `</think>` that nothing has opened is text: a stream has sent what stands before it.
    """
    begins = opened or text.lstrip().startswith(THINK_OPEN)
    if renderer.thinking == "forbid" or not begins:
        return None, text, True
    return split_thinking(text, opened=opened)


def message_of(done: Completion, renderer: Renderer, stops: Iterable[str]) -> Message:
    """The turn up to the first stop string, parsed. With malformed calls, all of it is content."""
    text = text_of(done, renderer.tokenizer, renderer.stop_token_ids, stops)
    text = text.removeprefix(renderer.lead)
    opened = renderer.parse([]).message.thinking is not None
    thinking, content, closed = split_turn(text, renderer, opened)
    calls: list[ToolCall] = []
    if closed and CALL_OPEN in content:
        with suppress(Exception):  # a client's tool schema may break the check
            calls = renderer.parse_calls(content)
    if calls:
        content = without_calls(content).rstrip()
    return Message(role="assistant", content=content, thinking=thinking, tool_calls=calls)


def calls_of(calls: Iterable[ToolCall]) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's format, with new ids where they have none."""
    return [
        {
            "id": call.id or f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
            },
        }
        for call in calls
    ]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Tokens as text, special tokens included."""
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(list(ids), **options))


def chat_logprobs(tokens: Iterable[Token], tokenizer: Any) -> dict[str, Any]:
    """`logprobs` of a chat choice, an entry per sampled token."""

    def entry(id: int, logprob: float) -> dict[str, Any]:
        text = decode(tokenizer, [id])
        complete = "\ufffd" not in text  # else the token is a part of a character
        encoded = list(text.encode()) if complete else None
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": encoded}

    return {
        "content": [
            {
                **entry(token.id, token.logprob),
                "top_logprobs": [entry(*other) for other in token.alternatives],
            }
            for token in tokens
        ],
        "refusal": None,
    }


Row = tuple[int, float | None, Sequence[tuple[int, float]]]
"""A token's id, log-probability (None for a prompt's first token) and alternatives."""


def completion_logprobs(rows: Sequence[Row], tokenizer: Any) -> dict[str, Any]:
    """`logprobs` of a completion. `top_logprobs` always include the token itself."""
    tokens = [decode(tokenizer, [id]) for id, _, _ in rows]
    lengths = itertools.accumulate(map(len, tokens), initial=0)
    return {
        "tokens": tokens,
        "token_logprobs": [
            None if value is None else max(value, MIN_LOGPROB) for _, value, _ in rows
        ],
        "top_logprobs": [_top_logprobs(row, tokenizer) for row in rows],
        "text_offset": list(lengths)[:-1],
    }


def _top_logprobs(row: Row, tokenizer: Any) -> dict[str, float] | None:
    id, logprob, alternatives = row
    if logprob is None:
        return None
    named: dict[str, float] = {}
    for other, value in [*alternatives, (id, logprob)]:
        name = decode(tokenizer, [other])
        named[name] = max(value, MIN_LOGPROB, named.get(name, MIN_LOGPROB))  # ids may share a text
    return named
