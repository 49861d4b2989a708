"""An OpenTelemetry collector of which there is nothing but its way in: it takes traces by OTLP over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Listens on a free port of this machine."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        """In the order in which they came, again and again where they were sent so."""
        self.resources: list[dict[str, Any]] = []
        """Of each request."""
        self.headers: list[Mapping[str, str]] = []
        """Of each request."""
        self.status = 200
        """What it answers; takes nothing with another one."""
        self.answers = threading.Event()
        """While this is not set nobody gets an answer."""
        self.answers.set()
        self.asked = threading.Event()
        """Once somebody waits for an answer, or has got one."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self._take))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="collector", daemon=True).start()

    def _take(self, path: str, headers: Mapping[str, str], body: bytes) -> int:
        self.asked.set()
        self.answers.wait()
        self.headers.append(headers)
        if self.status != 200 or path != "/v1/traces":
            return self.status if self.status != 200 else 404
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            self.resources.append(attributes(resource.resource))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return 200

    def of(self, job: str) -> dict[tuple[str, int], Span]:
        """The spans of a job by name and generation."""
        own = [(span, attributes(span)) for span in list(self.spans)]
        return {(span.name, values["manta.generation"]): span for span, values in own if values["manta.job.id"] == job}

    def close(self) -> None:
        """Take nothing any more."""
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()


def attributes(message: Any) -> dict[str, Any]:
    """Of a span or a resource, by name."""
    return {each.key: _value(each.value) for each in message.attributes}


def seconds(span: Span) -> float:
    """How long it took."""
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def _handler(take: Callable[[str, Mapping[str, str], bytes], int]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status = take(self.path, self.headers, self.rfile.read(int(self.headers["Content-Length"])))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
