"""How long requests take."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAME = "manta_http_request_duration_seconds"


class RequestTimer:
    """ASGI middleware that measures how long requests take, by method, route and status."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry):
        """Wraps `app` and registers its histogram at `registry`."""
        self._app = app
        self._histogram = Histogram(
            NAME,
            "Time to answer a request",
            ("method", "route", "status"),
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection; only HTTP is measured."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), "500"

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        finally:
            labels = (_bounded_method(scope["method"]), _route_of(scope), status)
            self._histogram.labels(*labels).observe(time.perf_counter() - started)


def _route_of(scope: Scope) -> str:
    """The route's template, never the path itself: labels stay bounded."""
    return getattr(scope.get("route"), "path", "unmatched")


def _bounded_method(method: str) -> str:
    return method if method in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS") else "other"
