"""A service that remembers what it is asked, and answers nothing but that it is not ready."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True)
class Request:
    """What was asked."""

    line: str
    """Method and path, with the query as people would write it."""
    body: Any
    """The JSON document that was sent, None without one."""
    headers: httpx.Headers
    host: str
    timeout: dict[str, float]
    """Seconds that the client waits, by what it waits for."""


@dataclass
class SilentService(httpx.BaseTransport):
    """Give it to a client as its transport."""

    asked: list[Request] = field(default_factory=list)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Remember the request."""
        query = "&".join(f"{name}={value}" for name, value in request.url.params.multi_items())
        path = request.url.raw_path.decode().partition("?")[0]
        line = f"{request.method} {path}{'?' if query else ''}{query}"
        body = json.loads(request.content) if request.content else None
        self.asked.append(Request(line, body, request.headers, request.url.host, request.extensions["timeout"]))
        problem = {"code": "not_ready", "title": "Service Unavailable", "status": 503, "detail": "ask again later"}
        return httpx.Response(503, json=problem)
