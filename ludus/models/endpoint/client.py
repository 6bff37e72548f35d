"""Client of an OpenAI-compatible endpoint: messages in, one turn out.

    async with Endpoint("http://127.0.0.1:8000/v1", "my-model") as endpoint:
        reply = await endpoint.chat([Message(role="user", content="hi")], SamplingParams(64))

Such an endpoint returns text. With vLLM's `return_token_ids` it also returns the prompt ids, the
sampled ids and their log-probabilities, which are used unchanged; nothing is tokenised here. If an
endpoint refuses this option, later requests omit it.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from ludus.core.errors import ConfigError, ContextOverflow, SamplerError, SchemaError, ToolError
from ludus.core.remote import retry_after
from ludus.core.types import Message, ToolCall, ToolSpec
from ludus.core.versions import Run, check_runs, several
from ludus.models.chat.template import well_formed
from ludus.models.endpoint.addresses import BlockedAddress, check_host, guard, is_blocked
from ludus.models.samplers.base import SamplingParams
from ludus.telemetry.waits import waited
from ludus.tools.limits.limiter import Limits

MAX_BYTES = 16_000_000
"""Limit of a response's size."""

CONNECT_S = 5.0
RETRY_PAUSES_S = (0.2, 1.0)
"""Seconds before each retry, where the endpoint is down or busy."""

_MALFORMED = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError
)  # fmt: skip
BUSY_STATUS = (408, 425, 429, 500, 502, 503, 504, 529)
"""Statuses after which a request is sent again: it has no effect beyond its answer."""

TOKEN_OPTIONS = {"logprobs": True, "return_token_ids": True}


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn. `error` describes a malformed turn, for the model.

    `prompt_ids`, `token_ids` and `logprobs` are None where the endpoint returned no ids.
    `policy_version` is the oldest version of the weights that sampled the turn, `version_runs` has
    the versions of all tokens where they differ (`core.versions`); None where the endpoint returned
    none.
    """

    message: Message
    finish_reason: Literal["stop", "length"]
    error: str | None = None
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    policy_version: int | None = None
    version_runs: list[Run] | None = None


def check_url(base_url: str, place: str = "base_url") -> str:
    """Returns the URL without a trailing slash. `place` names the key in messages.

    Errors: ConfigError for a URL that is not http(s)://host[:port][/path], that contains a
    password, or whose IP address is blocked (`addresses`).
    """
    where = f"{place}: {base_url!r:.100}"
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError, ValueError) as error:
        raise ConfigError(f"{where} is not a URL: {error}") from None
    if url.scheme not in ("http", "https") or not url.host or not 0 < (url.port or 80) < 2**16:
        raise ConfigError(f"{where} must have the form http://host:port/v1 or https://...")
    if url.userinfo or url.query or url.fragment:
        raise ConfigError(f"{where} must not have a user, query or fragment; use api_key for a key")
    if is_blocked(url.host):
        raise ConfigError(f"{where} is blocked: link-local, multicast or a metadata service")
    return str(url).rstrip("/")


class Endpoint:
    """Client of one model. Use it in one event loop, as a context manager.

    Args:
        base_url: up to and including `/v1`.
        api_key: sent as a bearer token.
        timeout_s: time limit of one turn, in seconds.
        pauses_s: seconds before each retry.
        tokens: ask for token ids and log-probabilities.
        limits: rate limits by URL; each request, retries included, takes a permit.

    Errors: ConfigError for a wrong `base_url`.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        timeout_s: float = 120.0,
        pauses_s: Sequence[float] = RETRY_PAUSES_S,
        tokens: bool = True,
        limits: Limits | None = None,
    ) -> None:
        self.base_url, self.model = check_url(base_url), model
        self._url = httpx.URL(f"{self.base_url}/chat/completions")
        self._host = self._url.raw_host.decode("ascii")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        if not all(value.isascii() and value.isprintable() for value in headers.values()):
            raise ConfigError("api_key: must be printable ASCII")
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=None),
        )
        self._timeout_s = timeout_s
        self._pauses_s = pauses_s
        self._limits = limits if limits is not None and self.base_url in limits else None
        self._request_tokens, self._constrain = tokens, True

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._client.aclose()

    async def check(self) -> None:
        """Errors: ConfigError where the host name resolves to a blocked address."""
        try:
            await check_host(self._host, self._url.port or 443)
        except BlockedAddress as error:
            raise ConfigError(f"base_url: {error}") from error

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        tools: Sequence[ToolSpec] = (),
        schema: Mapping[str, Any] | None = None,
        *,
        strict: bool = False,
    ) -> Reply:
        """Sample one turn; with `schema`, JSON of that schema if the endpoint can constrain it.
        `strict`: an endpoint that refuses a call with a schema is an error.

        Errors: SchemaError; SamplerError where the endpoint is down, times out, refuses, or sends a
        malformed response; ContextOverflow where the conversation is too long for it.
        """
        body = {
            "model": self.model,
            "messages": [_message_fields(message) for message in messages],
            **_sampling_fields(params),
        }
        if tools:
            body["tools"] = [{"type": "function", "function": t.model_dump()} for t in tools]
        if schema is not None and (self._constrain or strict):
            form = {"name": "answer", "strict": True, "schema": schema}
            constrained = {"type": "json_schema", "json_schema": form}
            status, content = await self._post({**body, "response_format": constrained})
            if status not in (400, 422) or _too_long(content):
                return self._read(status, content)
            if strict:
                told = f"{self.base_url} refused a call with a schema: {_error_text(content)}"
                raise SchemaError(told)
            self._constrain = False
        if self._request_tokens:
            status, content = await self._post({**body, **TOKEN_OPTIONS})
            if status not in (400, 422) or _too_long(content):
                return self._read(status, content)
        reply = self._read(*await self._post(body))
        self._request_tokens = False  # accepted without the token options
        return reply

    async def _post(self, body: dict[str, Any]) -> tuple[int, bytes]:
        """Send a request, with retries; returns status and body of the response.

        A retry waits as long as `Retry-After` asks for, at most `timeout_s`.
        """
        for pause in (*self._pauses_s, None):
            after_s = 0.0
            await self._permit()
            try:
                async with asyncio.timeout(self._timeout_s):
                    status, content, after_s = await self._send(body)
                if status not in BUSY_STATUS or pause is None:
                    return status, content
                if after_s > self._timeout_s:
                    raise SamplerError(
                        f"{self.base_url} answered {status} and asks to wait {after_s:.0f} s, "
                        f"longer than the {self._timeout_s:g} s of a turn: {_error_text(content)}"
                    )
            except (TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout):
                raise SamplerError(
                    f"{self.base_url} did not answer within {self._timeout_s:g} s"
                ) from None
            except BlockedAddress as error:
                raise SamplerError(f"{self.base_url} is refused: {error}") from error
            except httpx.HTTPError as error:
                if pause is None:
                    reason = str(error) or type(error).__name__
                    raise SamplerError(f"{self.base_url} cannot be reached: {reason}") from error
            await asyncio.sleep(max(pause, after_s))
        raise AssertionError("the last attempt returns or raises")

    async def _permit(self) -> None:
        """Wait for the endpoint's rate limit. Errors: SamplerError: no permit in time."""
        if self._limits is not None:
            try:
                waited(await self._limits.acquire(self.base_url))
            except ToolError as error:
                raise SamplerError(str(error)) from error

    async def _send(self, body: dict[str, Any]) -> tuple[int, bytes, float]:
        content = bytearray()
        trace = {"trace": guard(self._host)}
        async with self._client.stream("POST", self._url, json=body, extensions=trace) as answer:
            if answer.has_redirect_location:
                raise SamplerError(
                    f"{self.base_url} answered {answer.status_code}, a redirect to "
                    f"{answer.headers['location']!r:.200}: give the address it leads to, up to /v1"
                )
            async for part in answer.aiter_bytes():
                content += part
                if len(content) > MAX_BYTES:
                    raise SamplerError(f"{self.base_url}: the response exceeds {MAX_BYTES} bytes")
            return answer.status_code, bytes(content), retry_after(answer.headers)

    def _read(self, status: int, content: bytes) -> Reply:
        if status != 200:
            if status in (400, 413, 422) and _too_long(content):
                raise ContextOverflow(f"{self.base_url}: {_error_text(content)}")
            raise SamplerError(f"{self.base_url} answered {status}: {_error_text(content)}")
        try:
            return _parse_reply(well_formed(json.loads(content)))
        except _MALFORMED as e:
            reason = f"{type(e).__name__}: {e}"
            raise SamplerError(f"{self.base_url}: malformed response ({reason:.200})") from e


def _sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters under OpenAI's names; unused ones are omitted."""
    fields: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed % 2**31,
    }
    if params.stop:
        fields["stop"] = list(params.stop)
    if params.top_k:
        fields["top_k"] = params.top_k
    return fields


def _message_fields(message: Message) -> dict[str, Any]:
    """A message in OpenAI's form, without thinking, which templates omit from earlier turns."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = [call.to_openai() for call in message.tool_calls]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _parse_reply(answer: Any) -> Reply:
    """Errors: those caught in `_read`, where the response is not a chat completion."""
    choice = answer["choices"][0]
    sampled = choice["message"]
    content = sampled.get("content") or ""
    thinking = sampled.get("reasoning_content") or sampled.get("reasoning") or None
    if not isinstance(content, str) or not isinstance(thinking, str | None):
        raise TypeError("the message's content is not a string")
    calls, error = _parse_calls(sampled.get("tool_calls") or [])
    message = Message(role="assistant", content=content, thinking=thinking, tool_calls=calls)
    reason: Literal["stop", "length"] = (
        "length" if choice.get("finish_reason") == "length" else "stop"
    )
    tokens = _parse_tokens(answer, choice)
    return Reply(message, reason, error, *tokens, *_parse_versions(answer, choice, tokens[1]))


def _parse_calls(given: list[Any]) -> tuple[list[ToolCall], str | None]:
    """Returns the tool calls; for malformed arguments, no calls and an error text."""
    calls: list[ToolCall] = []
    for number, entry in enumerate(given):
        function = entry["function"]
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (RecursionError, ValueError):
            arguments = None
        if not isinstance(arguments, dict):
            return [], f"{function['name']}: the arguments are no JSON object."
        name, id = str(function["name"]), str(entry.get("id") or f"call_{number}")
        calls.append(ToolCall(name=name, arguments=arguments, id=id))
    return calls, None


def _parse_tokens(
    answer: Any, choice: Any
) -> tuple[list[int] | None, list[int] | None, list[float] | None]:
    """Returns prompt ids, sampled ids and log-probabilities; None for each where any is missing."""
    prompt = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    ids, scored = choice.get("token_ids"), choice.get("logprobs")
    if not prompt or ids is None or not scored or not scored.get("content"):
        return None, None, None
    logprobs = [float(token["logprob"]) for token in scored["content"]]
    if not all(type(i) is int and i >= 0 for i in [*prompt, *ids]):
        raise TypeError("token ids must be non-negative integers")
    if len(logprobs) != len(ids) or not all(map(math.isfinite, logprobs)):
        raise ValueError(f"{len(ids)} sampled ids with {len(logprobs)} log-probabilities")
    return list(prompt), list(ids), logprobs


def _parse_versions(
    answer: Any, choice: Any, token_ids: list[int] | None
) -> tuple[int | None, list[Run] | None]:
    """Returns `policy_version` and `version_runs`.

    Other servers may use the names differently: values that are not valid are ignored. The version
    of a turn without valid runs is the oldest.
    """
    oldest = answer.get("policy_version")
    if not _is_version(oldest):
        return None, None
    try:
        runs = [(version, count) for version, count in choice.get("version_runs") or []]
        if not all(_is_version(number) for run in runs for number in run):
            return oldest, None
        check_runs(runs, oldest, None if token_ids is None else len(token_ids))
    except (TypeError, ValueError):
        return oldest, None
    return oldest, several(runs)


def _is_version(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _too_long(content: bytes) -> bool:
    text = content[:4000].lower()
    return b"context_length_exceeded" in text or b"context length" in text


def _error_text(content: bytes) -> str:
    """Returns the message of an error response, shortened to one line."""
    try:
        answer = well_formed(json.loads(content))
        error = answer.get("error", answer)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (AttributeError, RecursionError, ValueError):
        text = content[:400].decode("utf-8", "replace")
    return " ".join(text.split())[:200]
