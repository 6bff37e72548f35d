"""A model behind an OpenAI-compatible endpoint: messages in, one turn out.

    async with Endpoint("http://127.0.0.1:8000/v1", "my-model") as endpoint:
        reply = await endpoint.chat([Message(role="user", content="hi")], SamplingParams(64))

Text is all that such an endpoint promises. One that knows vLLM's `return_token_ids` also tells the
ids that it read and sampled, with their log-probabilities; those are kept as they are, and nothing
is ever tokenised here. An endpoint that refuses the question is not asked again.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ludus.core.errors import ConfigError, ContextOverflow, MissingDependency, SamplerError
from ludus.core.types import Message, ToolCall, ToolSpec
from ludus.models.endpoint.addresses import OffLimits, check_host, guard, off_limits
from ludus.models.samplers.base import SamplingParams

try:
    import httpx
except ModuleNotFoundError as error:
    raise MissingDependency("httpx", "remote", "asking a model's endpoint") from error

MAX_BYTES = 16_000_000
"""Length of the longest answer that is read."""

CONNECT_S = 5.0
PAUSES_S = (0.2, 1.0)
"""Seconds before a request is tried again, where the endpoint is down or busy."""

BUSY = (408, 429, 502, 503, 504)
TOKENS = {"logprobs": True, "return_token_ids": True}


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn. `error` is what the model is to be told of a turn that cannot be read.

    `prompt_ids`, `token_ids` and `logprobs` are all None where the endpoint told no ids;
    `policy_version`, that of the weights which sampled the turn, where it told none.
    """

    message: Message
    finish_reason: Literal["stop", "length"]
    error: str | None = None
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    policy_version: int | None = None


def check_url(base_url: str) -> str:
    """The address without a slash at its end.

    Errors: ConfigError for one that is not http(s)://host[:port][/path], that carries a password,
    or whose number no model has (`addresses`).
    """
    where = f"base_url: {base_url!r:.100}"
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError, ValueError) as error:
        raise ConfigError(f"{where} is no address: {error}") from None
    if url.scheme not in ("http", "https") or not url.host or not 0 < (url.port or 80) < 2**16:
        raise ConfigError(f"{where} has to be http://host:port/v1 or https://...")
    if url.userinfo or url.query or url.fragment:
        raise ConfigError(f"{where} may have no user, query or fragment; a key is given apart")
    if off_limits(url.host):
        raise ConfigError(f"{where} is link-local or multicast, which is no model's address")
    return str(url).rstrip("/")


class Endpoint:
    """One model of an endpoint. Use it in one event loop, as a context manager.

    Args:
        base_url: up to and with `/v1`.
        api_key: sent as a bearer token.
        timeout_s: seconds that one turn may take.

    Errors: ConfigError for a wrong `base_url`.
    """

    def __init__(
        self, base_url: str, model: str, api_key: str | None = None, *, timeout_s: float = 120.0
    ) -> None:
        self.base_url, self.model = check_url(base_url), model
        self._url = httpx.URL(f"{self.base_url}/chat/completions")
        self._host = self._url.raw_host.decode("ascii")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        if not all(value.isascii() and value.isprintable() for value in headers.values()):
            raise ConfigError("api_key: it has to be printable ASCII")
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=None),
        )
        self._timeout_s = timeout_s
        self._asks_tokens = True

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def check(self) -> None:
        """Errors: ConfigError where the host's name stands for an address that no model has."""
        try:
            await check_host(self._host, self._url.port or 443)
        except OffLimits as error:
            raise ConfigError(f"base_url: {error}") from error

    async def chat(
        self, messages: Sequence[Message], params: SamplingParams, tools: Sequence[ToolSpec] = ()
    ) -> Reply:
        """Sample one turn.

        Errors: SamplerError where the endpoint is down, slow, refuses, or answers rubbish;
        ContextOverflow where it says that the conversation is too long.
        """
        body = {
            "model": self.model,
            "messages": [_told(message) for message in messages],
            **_asked(params),
        }
        if tools:
            body["tools"] = [{"type": "function", "function": t.model_dump()} for t in tools]
        if self._asks_tokens:
            status, content = await self._post({**body, **TOKENS})
            if status not in (400, 422) or _too_long(content):
                return self._read(status, content)
        status, content = await self._post(body)
        reply = self._read(status, content)
        self._asks_tokens = False  # it took the turn without the question: that was the fault
        return reply

    async def _post(self, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status and body of the answer; a request that found nobody is sent again."""
        for pause in (*PAUSES_S, None):
            try:
                async with asyncio.timeout(self._timeout_s):
                    status, content = await self._send(body)
                if status not in BUSY or pause is None:
                    return status, content
            except (TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout):
                raise SamplerError(
                    f"{self.base_url} did not answer within {self._timeout_s:g} s"
                ) from None
            except OffLimits as error:
                raise SamplerError(f"{self.base_url} is refused: {error}") from error
            except httpx.HTTPError as error:
                if pause is None:
                    what = str(error) or type(error).__name__
                    raise SamplerError(f"{self.base_url} cannot be reached: {what}") from error
            await asyncio.sleep(pause)
        raise AssertionError("the last try returns or raises")

    async def _send(self, body: dict[str, Any]) -> tuple[int, bytes]:
        content = bytearray()
        watched = {"trace": guard(self._host)}
        async with self._client.stream("POST", self._url, json=body, extensions=watched) as answer:
            async for part in answer.aiter_bytes():
                content += part
                if len(content) > MAX_BYTES:
                    raise SamplerError(f"{self.base_url} answers more than {MAX_BYTES} bytes")
            return answer.status_code, bytes(content)

    def _read(self, status: int, content: bytes) -> Reply:
        if status != 200:
            if status in (400, 413, 422) and _too_long(content):
                raise ContextOverflow(f"{self.base_url}: {_message(content)}")
            raise SamplerError(f"{self.base_url} answered {status}: {_message(content)}")
        try:
            return _reply(json.loads(content))
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as e:
            what = f"{type(e).__name__}: {e}"
            raise SamplerError(f"{self.base_url} answered rubbish ({what:.200})") from e


def _asked(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters in OpenAI's names; what is off is not sent."""
    asked: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed % 2**31,
    }
    if params.stop:
        asked["stop"] = list(params.stop)
    if params.top_k:
        asked["top_k"] = params.top_k
    return asked


def _told(message: Message) -> dict[str, Any]:
    """A message in OpenAI's form; thinking of earlier turns is left out, as templates do."""
    told: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        told["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        told["tool_call_id"] = message.tool_call_id
    return told


def _reply(answer: Any) -> Reply:
    """Errors: any of those that `_read` lists, where the answer is no chat completion."""
    choice = answer["choices"][0]
    said = choice["message"]
    content = said.get("content") or ""
    thinking = said.get("reasoning_content") or said.get("reasoning") or None
    if not isinstance(content, str) or not isinstance(thinking, str | None):
        raise TypeError("the message's content is no text")
    calls, error = _calls(said.get("tool_calls") or [])
    content = content.encode("utf-8", "replace").decode()
    message = Message(role="assistant", content=content, thinking=thinking, tool_calls=calls)
    reason: Literal["stop", "length"] = (
        "length" if choice.get("finish_reason") == "length" else "stop"
    )
    # Others may mean something else by the name: what is no number of ours is not taken for one.
    told = answer.get("policy_version")
    version = told if type(told) is int and 0 <= told < 2**63 else None
    return Reply(message, reason, error, *_tokens(answer, choice), policy_version=version)


def _calls(given: list[Any]) -> tuple[list[ToolCall], str | None]:
    """The tool calls; or none, and what is wrong with the arguments that the model wrote."""
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


def _tokens(
    answer: Any, choice: Any
) -> tuple[list[int] | None, list[int] | None, list[float] | None]:
    """Ids of the prompt and of the turn, and the turn's log-probabilities; or nothing."""
    prompt = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    ids, told = choice.get("token_ids"), choice.get("logprobs")
    if not prompt or ids is None or not told or not told.get("content"):
        return None, None, None
    logprobs = [float(token["logprob"]) for token in told["content"]]
    if not all(type(i) is int and i >= 0 for i in [*prompt, *ids]):
        raise TypeError("token ids that are no numbers")
    if len(logprobs) != len(ids) or not all(map(math.isfinite, logprobs)):
        raise ValueError(f"{len(ids)} sampled ids with {len(logprobs)} log-probabilities")
    return list(prompt), list(ids), logprobs


def _too_long(content: bytes) -> bool:
    text = content[:4000].lower()
    return b"context_length_exceeded" in text or b"context length" in text


def _message(content: bytes) -> str:
    """What an error's body says, in one short line."""
    try:
        answer = json.loads(content)
        error = answer.get("error", answer)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (AttributeError, RecursionError, ValueError):
        text = content[:400].decode("utf-8", "replace")
    return " ".join(text.split())[:200]
