"""The bodies of OpenAI's answers, whole and in parts."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ludus.models.chat.renderer import Renderer
from ludus.models.samplers.base import Completion
from ludus.services.model.engine import Scored, Token
from ludus.services.model.formatting import (
    ChatWriter,
    Delta,
    Row,
    TextWriter,
    calls_of,
    chat_logprobs,
    completion_logprobs,
    decode,
    message_of,
    text_of,
)
from ludus.services.model.requests import ChatRequest, Common, CompletionRequest


@dataclass(frozen=True, slots=True)
class Done:
    """A turn that is over: its tokens, and the prompt's log-probabilities where asked for."""

    prompt_ids: list[int]
    completion: Completion
    tokens: list[Token]
    scored: Scored | None


class Answer:
    """What both routes have in common; one object answers one request."""

    kind: str
    chunk_kind: str
    scores_prompt = False

    def __init__(self, id: str, model: str, body: Common, num_alternatives: int) -> None:
        self._id, self._model, self._body = id, model, body
        self._created = int(time.time())
        self._writers: list[TextWriter] = []
        self._num_prompt = self._num_sampled = 0
        self.num_alternatives = num_alternatives

    def whole(self, turns: Sequence[Done]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        done = [turn.completion for turn in turns]
        self._count([turn.prompt_ids for turn in turns])
        self._num_sampled = sum(len(completion.token_ids) for completion in done)
        body = self._frame(self.kind, min(completion.policy_version for completion in done))
        body["choices"] = [self._choice(i, turn) for i, turn in enumerate(turns)]
        return body | self._prompt_of(turns) | {"usage": self._usage()}

    def opening(self, prompts: Sequence[list[int]], version: int) -> str:
        """The first events of a stream, one a choice."""
        self._count(prompts)
        self._writers = [self._writer() for _ in prompts]
        events = [self._opening(i, prompt, version) for i, prompt in enumerate(prompts)]
        return "".join(filter(None, events))

    def part(self, index: int, what: Token | Completion) -> str:
        """The event of a token, or of a turn's end; nothing where there is nothing to tell."""
        writer = self._writers[index]
        if isinstance(what, Token):
            self._num_sampled += 1
            delta = writer.add(what)
            extra = self._of_tokens([what])
            (extra.get("logprobs") or {}).pop("text_offset", None)  # of a token alone it is wrong
            if not delta and not extra:
                return ""
            return self._event(index, delta, None, what.policy_version, extra)
        delta = writer.end(what)
        reason = self._reason(what, delta)
        return self._event(index, delta, reason, what.policy_version, {})

    def closing(self) -> str:
        """The end of a stream."""
        usage = ""
        if self._body.with_usage:
            frame = self._frame(self.chunk_kind, None)
            usage = event({**frame, "choices": [], "usage": self._usage()})
        return usage + "data: [DONE]\n\n"

    def _count(self, prompts: Sequence[list[int]]) -> None:
        """A prompt counts once, however many choices it has."""
        self._num_prompt = sum(len(prompt) for prompt in prompts[:: self._body.choices])

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_sampled,
            "total_tokens": self._num_prompt + self._num_sampled,
        }

    def _frame(self, kind: str, version: int | None) -> dict[str, Any]:
        frame = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        if version is None:
            return frame
        return {**frame, "system_fingerprint": f"policy-{version}", "policy_version": version}

    def _event(
        self, index: int, delta: Delta, reason: str | None, version: int, extra: dict[str, Any]
    ) -> str:
        choice = {"index": index, **self._delta(delta), "finish_reason": reason, **extra}
        return event({**self._frame(self.chunk_kind, version), "choices": [choice]})

    def _of_tokens(self, tokens: list[Token]) -> dict[str, Any]:
        """What was asked to be told of tokens besides their text."""
        told: dict[str, Any] = {}
        if self._body.return_token_ids:
            told["token_ids"] = [token.id for token in tokens]
        logprobs = self._logprobs(tokens)
        return told if logprobs is None else {**told, "logprobs": logprobs}

    # Of each route

    def _writer(self) -> TextWriter:
        raise NotImplementedError

    def _choice(self, index: int, turn: Done) -> dict[str, Any]:
        raise NotImplementedError

    def _opening(self, index: int, prompt: list[int], version: int) -> str:
        raise NotImplementedError

    def _delta(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        raise NotImplementedError

    def _prompt_of(self, turns: Sequence[Done]) -> dict[str, Any]:
        return {}

    def _reason(self, done: Completion, delta: Delta) -> str:
        return done.finish_reason


class ChatAnswer(Answer):
    """Of `/v1/chat/completions`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, body: ChatRequest, renderer: Renderer, tools: bool) -> None:
        super().__init__(_id("chatcmpl"), model, body, body.num_alternatives)
        self._wants_logprobs = bool(body.logprobs)
        self._renderer, self._tools = renderer, tools

    def _writer(self) -> TextWriter:
        return ChatWriter(self._renderer, self._tools, self._body.stops)

    def _choice(self, index: int, turn: Done) -> dict[str, Any]:
        message = message_of(turn.completion, self._renderer, self._body.stops)
        calls = calls_of(message.tool_calls)
        told: dict[str, Any] = {"role": "assistant", "content": message.content or None}
        if not calls:
            told["content"] = message.content
        if message.thinking is not None:
            told["reasoning_content"] = message.thinking
        if calls:
            told["tool_calls"] = calls
        return {
            "index": index,
            "message": {**told, "refusal": None},
            "finish_reason": "tool_calls" if calls else turn.completion.finish_reason,
            "logprobs": None,
            "policy_version": turn.completion.policy_version,
            **self._of_tokens(turn.tokens),
        }

    def _prompt_of(self, turns: Sequence[Done]) -> dict[str, Any]:
        wanted = self._body.return_token_ids
        return {"prompt_token_ids": turns[0].prompt_ids} if wanted else {}

    def _opening(self, index: int, prompt: list[int], version: int) -> str:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "finish_reason": None,
        }
        frame = self._frame(self.chunk_kind, version)
        if self._body.return_token_ids and not index:
            frame["prompt_token_ids"] = prompt
        return event({**frame, "choices": [choice]})

    def _delta(self, delta: Delta) -> dict[str, Any]:
        return {"delta": delta}

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        return chat_logprobs(tokens, self._renderer.tokenizer) if self._wants_logprobs else None

    def _reason(self, done: Completion, delta: Delta) -> str:
        return "tool_calls" if "tool_calls" in delta else done.finish_reason


class TextAnswer(Answer):
    """Of `/v1/completions`."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self, model: str, body: CompletionRequest, tokenizer: Any, stop_ids: Sequence[int]
    ) -> None:
        super().__init__(_id("cmpl"), model, body, body.num_alternatives)
        self._wants_logprobs = body.logprobs is not None
        self._echo = bool(body.echo)
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self.scores_prompt = self._echo and self._wants_logprobs

    def _writer(self) -> TextWriter:
        return TextWriter(self._tokenizer, self._stop_ids, self._body.stops)

    def _choice(self, index: int, turn: Done) -> dict[str, Any]:
        text = text_of(turn.completion, self._tokenizer, self._stop_ids, self._body.stops)
        told: dict[str, Any] = {"index": index, "logprobs": None, **self._of_tokens(turn.tokens)}
        if self._echo:
            text = decode(self._tokenizer, turn.prompt_ids) + text
        if turn.scored is not None:
            rows: list[Row] = list(
                zip(
                    turn.prompt_ids,
                    turn.scored.logprobs,
                    turn.scored.alternatives,
                    strict=True,
                )
            )
            told["logprobs"] = completion_logprobs(rows + _rows(turn.tokens), self._tokenizer)
        if self._body.return_token_ids:
            told["prompt_token_ids"] = turn.prompt_ids
        done = turn.completion
        return {
            **told,
            "text": text,
            "finish_reason": done.finish_reason,
            "policy_version": done.policy_version,
        }

    def _opening(self, index: int, prompt: list[int], version: int) -> str:
        if not self._body.return_token_ids:
            return ""
        return self._event(index, {}, None, version, {"prompt_token_ids": prompt})

    def _delta(self, delta: Delta) -> dict[str, Any]:
        return {"text": delta.get("text", ""), "logprobs": None}

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        return completion_logprobs(_rows(tokens), self._tokenizer) if self._wants_logprobs else None


def event(data: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _rows(tokens: Sequence[Token]) -> list[Row]:
    return [(token.id, token.logprob, token.alternatives) for token in tokens]


def _id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"
