"""OpenTelemetry spans of rollouts, after OpenTelemetry's conventions for generative AI.

    with exported(config.traces, run="tiny-1", model="qwen3"):      # `span_export`, by the launcher
        with invoke_agent("babyai", conversation=trajectory.id) as episode:
            with chat(params=params) as turn:
                completion = await sampler.sample(...)
                turn.answered(input_tokens=41, output_tokens=7, finish_reason="stop")
            with execute_tool("python", call_id="c1"):
                ...

    invoke_agent babyai                    an attempt at an episode
    ├── chat qwen3                         a completion of the model
    ├── execute_tool python                a call of a tool
    └── chat qwen3

Outside of `spans_to`, which `exported` enters, a span costs one comparison. A span is the parent
of the spans that its block starts, tasks of asyncio included. Where the block is elsewhere (a
gateway's request), pass `parent`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from ludus.core.errors import described
from ludus.core.types import Message, ToolCall

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanKind, Tracer

PROVIDER = "ludus"
MAX_CONTENT = 100_000
"""Characters of an attribute with messages, arguments or a result."""

Attributes = Mapping[str, Any]


class SamplingSettings(Protocol):
    """Sampling parameters that a span records (`models.samplers.base.SamplingParams`)."""

    @property
    def max_tokens(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def stop(self) -> tuple[str, ...]: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Exporting:
    tracer: Tracer
    model: str
    content: bool


_exporting: _Exporting | None = None


class Span:
    """A span that begins and ends with its `with` block; without effect while nothing is exported.

    An exception that leaves the block becomes the span's error.
    """

    __slots__ = ("_content", "_span", "_token")

    def __init__(self, span: OtelSpan | None = None, content: bool = False) -> None:
        self._span, self._content = span, content
        self._token: Any = None

    @property
    def has_content(self) -> bool:
        """True if the span records messages: compute them only then."""
        return self._content

    @property
    def parent(self) -> OtelSpan | None:
        """The span as `parent` of spans that begin in another task."""
        return self._span

    def set(self, **attributes: Any) -> None:
        """Set attributes of ludus: `task="t1"` is `ludus.task`. None sets nothing."""
        self._set({f"ludus.{name}": value for name, value in attributes.items()})

    def answered(
        self,
        *,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        finish_reason: str | None = None,
        model: str | None = None,
    ) -> None:
        """Record a completion: its tokens, its end, and the model that the server names."""
        self._set(
            {
                "gen_ai.usage.input_tokens": input_tokens,
                "gen_ai.usage.output_tokens": output_tokens,
                "gen_ai.response.finish_reasons": [finish_reason] if finish_reason else None,
                "gen_ai.response.model": model,
            }
        )

    def messages(
        self, given: Sequence[Message], answer: Message | None, finish_reason: str = "stop"
    ) -> None:
        """Record the messages that the model read and wrote, if `has_content`."""
        if not self._content:
            return
        output = [{**_message(answer), "finish_reason": finish_reason}] if answer else []
        self._set(
            {
                "gen_ai.input.messages": _json([_message(message) for message in given]),
                "gen_ai.output.messages": _json(output),
            }
        )

    def result(self, text: str) -> None:
        """Record the result of a tool, if `has_content`."""
        if self._content:
            self._set({"gen_ai.tool.call.result": text[:MAX_CONTENT]})

    def scored(self, name: str, value: float) -> None:
        """Record a score of the episode as an event."""
        if self._span is not None:
            event: dict[str, str | float] = {
                "gen_ai.evaluation.name": name,
                "gen_ai.evaluation.score.value": value,
            }
            self._span.add_event("gen_ai.evaluation.result", event)

    def failed(self, kind: str, message: str) -> None:
        """Mark the span as an error: a class or status, and the text."""
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self._set({"error.type": kind})
            self._span.set_status(Status(StatusCode.ERROR, _clean(message)))

    def _set(self, attributes: Attributes) -> None:
        if self._span is not None:
            for name, value in attributes.items():
                if value is not None:
                    self._span.set_attribute(name, _clean(value))

    def __enter__(self) -> Span:
        if self._span is not None:
            from opentelemetry import context, trace

            self._token = context.attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._span is None:
            return
        from opentelemetry import context

        context.detach(self._token)
        if error is not None:
            self.failed(type(error).__name__, described(error))
        self._span.end()


OFF = Span()
"""The span while nothing is exported."""


def invoke_agent(
    name: str, *, conversation: str, parent: OtelSpan | None = None, **attributes: Any
) -> Span:
    """An episode, or the part of an agent in it. `attributes`: see `Span.set`."""
    if _exporting is None:
        return OFF
    own = {"gen_ai.agent.name": name, "gen_ai.conversation.id": conversation}
    return _start("invoke_agent", name, "INTERNAL", own, attributes, parent)


def chat(
    model: str | None = None,
    *,
    params: SamplingSettings | None = None,
    conversation: str | None = None,
    parent: OtelSpan | None = None,
    **attributes: Any,
) -> Span:
    """A completion of a model; by default the model of the run."""
    if _exporting is None:
        return OFF
    name = model or _exporting.model
    own: dict[str, Any] = {"gen_ai.request.model": name, "gen_ai.conversation.id": conversation}
    if params is not None:
        own |= {
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k or None,
            "gen_ai.request.stop_sequences": list(params.stop) or None,
            "gen_ai.request.seed": params.seed,
        }
    return _start("chat", name, "CLIENT", own, attributes, parent)


def execute_tool(
    name: str,
    *,
    call_id: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    parent: OtelSpan | None = None,
    **attributes: Any,
) -> Span:
    """A call of a tool. Its arguments are recorded with `traces.content`."""
    if _exporting is None:
        return OFF
    told = _json(arguments) if arguments is not None and _exporting.content else None
    own = {
        "gen_ai.tool.name": name,
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": call_id,
        "gen_ai.tool.call.arguments": told,
    }
    return _start("execute_tool", name, "INTERNAL", own, attributes, parent)


def _start(
    operation: str,
    name: str,
    kind: str,
    own: Attributes,
    attributes: Attributes,
    parent: OtelSpan | None,
) -> Span:
    from opentelemetry import trace

    assert _exporting is not None
    kinds: type[SpanKind] = trace.SpanKind
    around: Context | None = None if parent is None else trace.set_span_in_context(parent)
    started = _exporting.tracer.start_span(f"{operation} {name}", around, kind=kinds[kind])
    span = Span(started, _exporting.content and started.is_recording())
    span._set({"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER, **own})
    span.set(**attributes)
    return span


@contextmanager
def spans_to(tracer: Tracer, model: str, *, content: bool) -> Iterator[None]:
    """Begin the spans of the block with `tracer`; `model` is the run's model."""
    global _exporting
    _exporting = _Exporting(tracer, model, content)
    try:
        yield
    finally:
        _exporting = None


# Content


def _message(message: Message) -> dict[str, Any]:
    """A message in the form of the conventions: a role and its parts."""
    parts: list[dict[str, Any]] = []
    if message.role == "tool":
        return {"role": "tool", "parts": [_response(message)]}
    if message.thinking:
        parts.append({"type": "reasoning", "content": message.thinking})
    if message.content:
        parts.append({"type": "text", "content": message.content})
    parts += [_call(call) for call in message.tool_calls]
    return {"role": message.role, "parts": parts}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments}


def _response(message: Message) -> dict[str, Any]:
    return {"type": "tool_call_response", "id": message.tool_call_id, "response": message.content}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _clean(value: Any) -> Any:
    """An attribute's value; half of a surrogate pair cannot be encoded."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value
