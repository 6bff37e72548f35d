"""Exports the spans of a run over OTLP/HTTP, in the background.

A receiver that is down, slow or wrong costs spans, and EXPORT_S seconds at the end of the run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from ludus import __version__
from ludus.config.sections import TracesConfig
from ludus.core.errors import MissingDependency
from ludus.telemetry.logs import get_logger
from ludus.telemetry.traces import MAX_CONTENT, spans_to

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = get_logger(__name__)

EXPORT_S = 5.0
"""Seconds that an export may take; also the wait for the last export."""


def require_otel() -> None:
    """Errors: MissingDependency where the packages of the exporter are not installed."""
    for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            found = find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise MissingDependency(package, "otel", "`traces`")


@contextmanager
def exported(config: TracesConfig | None, *, run: str, model: str) -> Iterator[None]:
    """Export the spans that begin in the block, in the background; None exports nothing.

    The end waits for the last export for at most EXPORT_S.
    """
    if config is None:
        yield
        return
    require_otel()
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    facts = {"service.name": "ludus", "service.version": __version__, "ludus.run": run}
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(config.share)),
        resource=Resource.create(facts),
        shutdown_on_exit=False,
        span_limits=SpanLimits(max_attribute_length=MAX_CONTENT),
    )
    exporter = _Reporting(config.endpoint)
    provider.add_span_processor(
        BatchSpanProcessor(cast("SpanExporter", exporter), 8192, schedule_delay_millis=1000)
    )
    loud = logging.getLogger("opentelemetry.exporter")  # logs every attempt
    level = loud.level
    loud.setLevel(logging.CRITICAL)
    tracer = provider.get_tracer("ludus", __version__)
    try:
        with spans_to(tracer, model, content=config.content):
            yield
    finally:
        end = threading.Thread(target=provider.shutdown, name="ludus-traces", daemon=True)
        end.start()
        end.join(EXPORT_S)
        exporter.abandoned = end.is_alive()
        if exporter.num_lost or exporter.abandoned:
            log.warning("traces: spans were lost", at_least=exporter.num_lost)
        if not exporter.abandoned:
            loud.setLevel(level)


class _Reporting:
    """An exporter that reports the first failure, and counts the spans that are lost."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self._exporter: SpanExporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)
        self._endpoint = endpoint
        self.num_lost = 0
        self.abandoned = False
        """The last export continues, and nobody is told of it."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            result = self._exporter.export(spans)
        except Exception:
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.FAILURE:
            if not self.num_lost and not self.abandoned:
                log.warning("traces: the receiver takes no spans", endpoint=self._endpoint)
            self.num_lost += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
