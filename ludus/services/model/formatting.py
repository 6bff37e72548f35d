"""From tokens to what OpenAI's clients read: growing text, thinking, tool calls, logprobs.

A stream may send nothing that it would have to take back. So it holds what may become a marker or a
stop string, and tool calls until the turn is over; what is held comes with the end.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from ludus.core.types import Message, ToolCall
from ludus.models.chat.parsing import (
    CALL_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    split_thinking,
)
from ludus.models.chat.renderer import Renderer
from ludus.models.samplers.base import Completion
from ludus.services.model.engine import Token

Delta = dict[str, Any]


def cut(text: str, stops: Iterable[str]) -> str:
    """The text before the first stop string."""
    found = [position for stop in stops if (position := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def held(text: str, markers: Iterable[str]) -> int:
    """Characters at the end of a text that may turn out to be the beginning of a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest


class TextWriter:
    """The text of one turn of `/v1/completions`, as it grows.

    Special tokens are shown, but for the one that ends the turn; a stop string is not.
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer, self._stop_ids, self._stops = tokenizer, set(stop_ids), stops
        self._decoder = DecodeStream(skip_special_tokens=False)
        self._text, self._sent = "", 0

    def add(self, token: Token) -> Delta:
        """What can be sent now that this token is there."""
        self._read(token)
        ready = cut(self._text, self._stops)
        return self._send(ready[: len(ready) - held(ready, self._stops)])

    def end(self, done: Completion) -> Delta:
        """What is left, now that the turn is over."""
        return self._send(text_of(done, self._tokenizer, self._stop_ids, self._stops))

    def _read(self, token: Token) -> None:
        if token.id not in self._stop_ids:
            self._text += self._decoder.step(self._tokenizer.backend_tokenizer, token.id) or ""

    def _send(self, text: str) -> Delta:
        new, self._sent = text[self._sent :], max(self._sent, len(text))
        return {"text": new} if new else {}


class ChatWriter(TextWriter):
    """One assistant turn of `/v1/chat/completions`, as it grows."""

    def __init__(self, renderer: Renderer, tools: bool, stops: Sequence[str]) -> None:
        super().__init__(renderer.tokenizer, renderer.stop_token_ids, stops)
        self._renderer, self._tools = renderer, tools
        self._opened = renderer.parse([]).message.thinking is not None
        self._parts = {"reasoning_content": "", "content": ""}

    def add(self, token: Token) -> Delta:
        self._read(token)
        thinking, content = None, self._text
        if self._renderer.thinking != "forbid":
            thinking, content, closed = split_thinking(self._text, opened=self._opened)
            if not closed:
                return self._grow("reasoning_content", str(thinking), (THINK_CLOSE,))
        delta = self._grow("reasoning_content", thinking or "", ())
        if self._tools:
            content = content.partition(CALL_OPEN)[0]
        markers = (THINK_OPEN, THINK_CLOSE, *((CALL_OPEN,) if self._tools else ()))
        return delta | self._grow("content", content, markers)

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
        """What of a part is new and certain."""
        ready = cut(text, self._stops)
        ready = ready[: len(ready) - held(ready, (*self._stops, *markers))]
        sent = self._parts[key]
        if not ready.startswith(sent) or ready == sent:
            return {}
        self._parts[key] = ready
        return {key: ready[len(sent) :]}

    def _rest(self, key: str, text: str) -> Delta:
        """What of a part is left. The final text may lack white space that was sent already."""
        sent = self._parts[key]
        for start in (sent, sent.strip()):
            if text.startswith(start):
                return {key: text[len(start) :]} if len(text) > len(start) else {}
        return {key: text}  # parts of the turn were not what they seemed: nothing is lost


def text_of(done: Completion, tokenizer: Any, stop_ids: Iterable[int], stops: Iterable[str]) -> str:
    """The text of a turn: without the token that ended it, up to the first stop string."""
    ids, stop_ids = done.token_ids, set(stop_ids)
    if ids and ids[-1] in stop_ids:
        ids = ids[:-1]
    return cut(decode(tokenizer, ids), stops)


def message_of(done: Completion, renderer: Renderer, stops: Iterable[str]) -> Message:
    """The turn in parts. A turn whose tool calls are malformed is text, calls and all."""
    try:
        message = renderer.parse(done.token_ids).message
    except Exception:  # a client's own schema may break the check against it
        text = decode(renderer.tokenizer, done.token_ids)
        message = Message(role="assistant", content=text)
    stops = tuple(stops)
    thinking = None if message.thinking is None else cut(message.thinking, stops)
    return message.model_copy(update={"thinking": thinking, "content": cut(message.content, stops)})


def calls_of(calls: Iterable[ToolCall]) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's form, each with an id of its own."""
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
            },
        }
        for call in calls
    ]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """All tokens as text, special ones too."""
    text = tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return str(text)


def chat_logprobs(tokens: Iterable[Token], tokenizer: Any) -> dict[str, Any]:
    """`logprobs` of a chat choice: an entry for each sampled token, the last one too."""

    def entry(id: int, logprob: float) -> dict[str, Any]:
        text = decode(tokenizer, [id])
        # JSON has no infinity; a token that cannot be sampled has OpenAI's least number.
        whole = "\ufffd" not in text  # else the token is a part of a character
        spelled = list(text.encode()) if whole else None
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": spelled}

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


LEAST = -9999.0


Row = tuple[int, float | None, Sequence[tuple[int, float]]]
"""A token's id, its log-probability (None: it has none), and its alternatives."""


def completion_logprobs(rows: Sequence[Row], tokenizer: Any) -> dict[str, Any]:
    """`logprobs` of a completion. The token itself is always among the likeliest that are told."""
    tokens = [decode(tokenizer, [id]) for id, _, _ in rows]
    lengths = itertools.accumulate(map(len, tokens), initial=0)
    return {
        "tokens": tokens,
        "token_logprobs": [None if value is None else max(value, LEAST) for _, value, _ in rows],
        "top_logprobs": [_by_name(row, tokenizer) for row in rows],
        "text_offset": list(lengths)[:-1],
    }


def _by_name(row: Row, tokenizer: Any) -> dict[str, float] | None:
    id, logprob, alternatives = row
    if logprob is None:
        return None
    named: dict[str, float] = {}
    for other, value in [*alternatives, (id, logprob)]:
        name = decode(tokenizer, [other])
        named[name] = max(value, LEAST, named.get(name, LEAST))  # ids may share a spelling
    return named
