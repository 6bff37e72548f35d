"""Response bodies of the OpenAI API, whole and streamed."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ludus.core.types import Message
from ludus.core.versions import runs_of
from ludus.models.chat.renderer import Renderer
from ludus.models.samplers.base import Completion
from ludus.services.model.engine import PromptScores, Token
from ludus.services.model.formatting import (
    ChatStream,
    Delta,
    Row,
    TextStream,
    calls_of,
    chat_logprobs,
    completion_logprobs,
    decode,
    message_of,
    text_of,
)
from ludus.services.model.requests import ChatRequest, CommonRequest, CompletionRequest


@dataclass(frozen=True, slots=True)
class Choice:
    """A generated choice. `scores` are the prompt's log-probabilities, if requested; `message` is
    the parsed turn, where the caller has one."""

    prompt_ids: list[int]
    completion: Completion
    tokens: list[Token]
    scores: PromptScores | None = None
    message: Message | None = None


class ResponseBuilder:
    """Builds the response to one request; a subclass per route."""

    kind: str
    chunk_kind: str
    scores_prompt = False

    def __init__(self, id: str, model: str, body: CommonRequest, num_alternatives: int) -> None:
        self._id = id
        self._model, self._body = model, body
        self._created = int(time.time())
        self._streams: list[TextStream] = []
        self._versions: dict[int, int] = {}
        self._num_prompt = self._num_sampled = 0
        self.num_alternatives = num_alternatives

    def body(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        completions = [choice.completion for choice in choices]
        self._count_prompts([choice.prompt_ids for choice in choices])
        self._num_sampled = sum(len(completion.token_ids) for completion in completions)
        version = min(completion.policy_version for completion in completions)
        body = self._frame(self.kind, version)
        body["choices"] = [self._choice(i, choice) for i, choice in enumerate(choices)]
        return body | self._prompt_fields(choices) | {"usage": self._usage()}

    def first_events(
        self, prompts: Sequence[list[int]], version: int, *, by_token: bool = True
    ) -> str:
        """The first events of a stream, one per choice. Not `by_token`: complete choices follow."""
        self._count_prompts(prompts)
        self._streams = [self._new_stream() for _ in prompts] if by_token else []
        events = [self._first_event(i, prompt, version) for i, prompt in enumerate(prompts)]
        return "".join(filter(None, events))

    def event_of(self, index: int, item: Token | Completion) -> str:
        """The event for a token or for the end of a choice; empty if nothing can be sent yet."""
        stream = self._streams[index]
        # Versions count up, so that of the first token is the oldest.
        oldest = self._versions.setdefault(index, item.policy_version)
        if isinstance(item, Token):
            self._num_sampled += 1
            delta = stream.add(item)
            extra = self._token_fields([item])
            (extra.get("logprobs") or {}).pop("text_offset", None)  # unknown for a single token
            if not delta and not extra:
                return ""
            return self._event(index, delta, None, oldest, extra)
        delta = stream.end(item)
        reason = self._finish_reason(item, delta)
        return self._event(index, delta, reason, oldest, {})

    def events_of(self, index: int, choice: Choice) -> str:
        """The events of a choice that is complete: its text at once, then its end."""
        self._num_sampled += len(choice.completion.token_ids)
        version = choice.completion.policy_version
        delta, reason = self._whole(choice)
        text = self._event(index, delta, None, version, self._token_fields(choice.tokens))
        return text + self._event(index, {}, reason, version, {})

    def last_events(self) -> str:
        usage = ""
        if self._body.with_usage:
            frame = self._frame(self.chunk_kind, None)
            usage = event({**frame, "choices": [], "usage": self._usage()})
        return usage + "data: [DONE]\n\n"

    def _count_prompts(self, prompts: Sequence[list[int]]) -> None:
        """A prompt counts once, for any number of choices."""
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
        choice = {"index": index, **self._delta_fields(delta), "finish_reason": reason, **extra}
        return event({**self._frame(self.chunk_kind, version), "choices": [choice]})

    def _token_fields(self, tokens: list[Token]) -> dict[str, Any]:
        """The requested fields about tokens: ids, log-probabilities."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["token_ids"] = [token.id for token in tokens]
            fields["version_runs"] = runs_of(token.policy_version for token in tokens)
        logprobs = self._logprobs(tokens)
        return fields if logprobs is None else {**fields, "logprobs": logprobs}

    # Per route

    def _whole(self, choice: Choice) -> tuple[Delta, str]:
        """The text of a complete choice as a delta, and its finish reason."""
        raise NotImplementedError

    def _new_stream(self) -> TextStream:
        raise NotImplementedError

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _first_event(self, index: int, prompt: list[int], version: int) -> str:
        raise NotImplementedError

    def _delta_fields(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        raise NotImplementedError

    def _prompt_fields(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {}

    def _finish_reason(self, completion: Completion, delta: Delta) -> str:
        return completion.finish_reason


class ChatResponse(ResponseBuilder):
    """Builds responses of `/v1/chat/completions`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, model: str, body: ChatRequest, renderer: Renderer, tools: bool, id: str = ""
    ) -> None:
        super().__init__(id or new_id("chatcmpl"), model, body, body.num_alternatives)
        self._wants_logprobs = bool(body.logprobs)
        self._renderer, self._tools = renderer, tools

    def _new_stream(self) -> TextStream:
        return ChatStream(self._renderer, self._tools, self._body.stops)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        completion = choice.completion
        message = choice.message or message_of(completion, self._renderer, self._body.stops)
        calls = calls_of(message.tool_calls)
        content = message.content or None if calls else message.content
        fields: dict[str, Any] = {"role": "assistant", "content": content}
        if message.thinking is not None:
            fields["reasoning_content"] = message.thinking
        if calls:
            fields["tool_calls"] = calls
        return {
            "index": index,
            "message": {**fields, "refusal": None},
            "finish_reason": "tool_calls" if calls else completion.finish_reason,
            "logprobs": None,
            "policy_version": completion.policy_version,
            **self._token_fields(choice.tokens),
        }

    def _whole(self, choice: Choice) -> tuple[Delta, str]:
        written = self._choice(0, choice)
        fields = {key: written["message"].get(key) for key in ("reasoning_content", "content")}
        delta = {key: text for key, text in fields.items() if text}
        if calls := written["message"].get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        return delta, written["finish_reason"]

    def _prompt_fields(self, choices: Sequence[Choice]) -> dict[str, Any]:
        wanted = self._body.return_token_ids
        return {"prompt_token_ids": choices[0].prompt_ids} if wanted else {}

    def _first_event(self, index: int, prompt: list[int], version: int) -> str:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "finish_reason": None,
        }
        frame = self._frame(self.chunk_kind, version)
        if self._body.return_token_ids and not index:
            frame["prompt_token_ids"] = prompt
        return event({**frame, "choices": [choice]})

    def _delta_fields(self, delta: Delta) -> dict[str, Any]:
        return {"delta": delta}

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        return chat_logprobs(tokens, self._renderer.tokenizer) if self._wants_logprobs else None

    def _finish_reason(self, completion: Completion, delta: Delta) -> str:
        return "tool_calls" if "tool_calls" in delta else completion.finish_reason


class CompletionResponse(ResponseBuilder):
    """Builds responses of `/v1/completions`."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        model: str,
        body: CompletionRequest,
        tokenizer: Any,
        stop_ids: Sequence[int],
        id: str = "",
    ) -> None:
        super().__init__(id or new_id("cmpl"), model, body, body.num_alternatives)
        self._wants_logprobs = body.logprobs is not None
        self._echo = bool(body.echo)
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self.scores_prompt = self._echo and self._wants_logprobs

    def _new_stream(self) -> TextStream:
        return TextStream(self._tokenizer, self._stop_ids, self._body.stops)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        completion, scores = choice.completion, choice.scores
        text = text_of(completion, self._tokenizer, self._stop_ids, self._body.stops)
        fields: dict[str, Any] = {"index": index, "logprobs": None}
        fields |= self._token_fields(choice.tokens)
        if self._echo:
            text = decode(self._tokenizer, choice.prompt_ids) + text
        if scores is not None:
            prompt: list[Row] = list(
                zip(choice.prompt_ids, scores.logprobs, scores.alternatives, strict=True)
            )
            rows = prompt + _rows(choice.tokens)
            fields["logprobs"] = completion_logprobs(rows, self._tokenizer)
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = choice.prompt_ids
        return {
            **fields,
            "text": text,
            "finish_reason": completion.finish_reason,
            "policy_version": completion.policy_version,
        }

    def _whole(self, choice: Choice) -> tuple[Delta, str]:
        written = self._choice(0, choice)
        return {"text": written["text"]}, written["finish_reason"]

    def _first_event(self, index: int, prompt: list[int], version: int) -> str:
        if not self._body.return_token_ids:
            return ""
        return self._event(index, {}, None, version, {"prompt_token_ids": prompt})

    def _delta_fields(self, delta: Delta) -> dict[str, Any]:
        return {"text": delta.get("text", ""), "logprobs": None}

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        return completion_logprobs(_rows(tokens), self._tokenizer) if self._wants_logprobs else None


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}-{secrets.token_hex(12)}"


def event(data: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _rows(tokens: Sequence[Token]) -> list[Row]:
    return [(token.id, token.logprob, token.alternatives) for token in tokens]
