"""The OpenTelemetry side of the traces: spans are sent to a collector in batches, on a thread of the SDK. Only the
sending code imports this module."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags, set_span_in_context

from manta.service.traces.spans import Span
from manta.workers.system.sockets import is_loopback

MAX_WAITING = 8192
"""Number of spans that may wait; further ones are dropped."""
BATCH = 512
DELAY_SECONDS = 1.0
LOG_INTERVAL_SECONDS = 300.0
"""Seconds within which identical messages are logged only once."""
_LIBRARY = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


class SpanSender:
    """Sends spans to a collector. One thread hands them in; only `close` waits for the collector."""

    def __init__(self, endpoint: str, lost: Callable[[int], None]):
        """`endpoint`: the collector's base address, or the full address for traces; `lost`: called with the number of
        starts and recoveries that were not delivered, on any thread."""
        self._lost, self._quiet = lost, _ThrottleFilter()
        logging.getLogger(_LIBRARY).addFilter(self._quiet)
        session = requests.Session()
        session.trust_env = not is_loopback(
            urlsplit(endpoint).hostname or ""
        )  # no proxy reaches this machine's loopback
        self._exporter = _Counting(OTLPSpanExporter(traces_endpoint(endpoint), session=session), lost)
        self._ids, self._handed_in = _GivenIds(), 0
        resource = Resource.create({"service.name": "manta", "service.version": version("manta-train")})
        self._provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False, id_generator=self._ids)
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, MAX_WAITING, DELAY_SECONDS * 1e3, min(BATCH, MAX_WAITING))
        )
        self._tracer = self._provider.get_tracer("manta")

    def send(self, spans: Sequence[Span]) -> None:
        """Queue these spans for sending; they are dropped if too many already wait."""
        if self._handed_in - self._exporter.taken + len(spans) > MAX_WAITING:
            self._lost(sum(span.parent_id is None for span in spans))
            return
        self._handed_in += len(spans)
        for span in spans:
            self._enqueue(span)

    def _enqueue(self, span: Span) -> None:
        self._ids.trace_id, self._ids.span_id = span.trace_id, span.span_id
        context = None
        if span.parent_id is not None:
            parent = SpanContext(span.trace_id, span.parent_id, is_remote=False, trace_flags=TraceFlags(1))
            context = set_span_in_context(NonRecordingSpan(parent))
        begun = self._tracer.start_span(
            span.name, context, attributes=span.attributes, start_time=_nanoseconds(span.began_at)
        )
        if span.problem is not None:
            begun.set_status(Status(StatusCode.ERROR, span.problem))
        begun.end(_nanoseconds(span.ended_at))

    def close(self) -> None:
        """Send what waits, until `interrupt` or the SDK's own limit of half a minute."""
        self._provider.shutdown()
        logging.getLogger(_LIBRARY).removeFilter(self._quiet)

    def interrupt(self) -> None:
        """Interrupt `close`, from another thread."""
        self._exporter.shutdown()


def traces_endpoint(endpoint: str) -> str:
    """The address for traces of an OTLP collector with this base address; a full address is left unchanged."""
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"


class _GivenIds(IdGenerator):
    """Returns the ids of the span that is created next."""

    trace_id = span_id = 0

    def generate_span_id(self) -> int:
        return self.span_id

    def generate_trace_id(self) -> int:
        return self.trace_id


class _Counting(SpanExporter):
    """Counts what another exporter accepts and cannot deliver."""

    def __init__(self, exporter: SpanExporter, lost: Callable[[int], None]):
        self._exporter, self._lost, self._closed = exporter, lost, False
        self.taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._lost(sum(span.parent is None for span in spans))
        return result

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self._exporter.shutdown()


class _ThrottleFilter(logging.Filter):
    """Lets identical messages of the library through only occasionally: a collector may be unreachable for days."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_at: dict[object, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self._logged_at.get(record.msg, -LOG_INTERVAL_SECONDS) < LOG_INTERVAL_SECONDS:
            return False
        self._logged_at[record.msg] = now
        return True


def _nanoseconds(at: float) -> int:
    return round(at * 1e9)
