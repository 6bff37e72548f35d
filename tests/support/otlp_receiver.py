"""A receiver of OpenTelemetry's spans: OTLP over HTTP, decoded from protobuf."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from threaded_server import body_of, reply, serving


@dataclass
class Received:
    """One span, with its attributes as Python values."""

    name: str
    id: bytes
    parent: bytes
    trace: bytes
    kind: int
    failed: bool
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    resource: dict[str, Any]


@dataclass
class Receiver:
    """`status` is the answer to every request; `hold` makes requests wait until it is set."""

    status: int = 200
    spans: list[Received] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    hold: threading.Event | None = None
    url: str = ""

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for scoped in request.resource_spans:
            resource = plain(scoped.resource.attributes)
            for scope in scoped.scope_spans:
                self.spans += [
                    Received(
                        name=span.name,
                        id=span.span_id,
                        parent=span.parent_span_id,
                        trace=span.trace_id,
                        kind=span.kind,
                        failed=span.status.code == 2,
                        attributes=plain(span.attributes),
                        events=[(event.name, plain(event.attributes)) for event in span.events],
                        resource=resource,
                    )
                    for span in scope.spans
                ]

    def named(self, start: str) -> list[Received]:
        return [span for span in self.spans if span.name.startswith(start)]


def plain(attributes: Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def receiving(**settings: Any) -> Iterator[Receiver]:
    """A receiver on a free port."""
    receiver = Receiver(**settings)

    def take(request: BaseHTTPRequestHandler) -> None:
        body = body_of(request)
        if request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        receiver.paths.append(request.path)
        receiver.headers.append(dict(request.headers))
        if receiver.hold is not None:
            receiver.hold.wait(60)
        if receiver.status == 200:
            receiver.take(body)
        reply(request, receiver.status, ExportTraceServiceResponse().SerializeToString())

    with serving(take) as port:
        receiver.url = f"http://127.0.0.1:{port}"
        try:
            yield receiver
        finally:
            if receiver.hold is not None:
                receiver.hold.set()
