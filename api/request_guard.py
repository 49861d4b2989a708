"""Requests that are refused before any route sees them: those that another site's page makes its visitor's browser
send, and bodies that no request needs.

A page of another site can send a form here, but it can neither hide its `Origin` nor send JSON without a preflight
request. A site whose name is made to resolve to this machine (DNS rebinding) is recognised by its name in `Host`.
Clients of another release are refused here too, before they send something that this one does not understand.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.access import is_stranger
from api.problem_codes import KINDS
from api.problems import problem
from api.rest_version import HEADER, REST, other_client

MAX_BODY_BYTES = 1024 * 1024
"""Maximum size of a body; a job spec is about a thousand times smaller."""
BODY_SECONDS = 60.0
"""Seconds that a body may take to arrive. Until then it holds a connection, of which there is a limited number, which
clients without a key could otherwise use up."""
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_JSON_PATHS = "/v1/"
_NO_HOST = re.compile(r"[/?#@\\\s]")


@dataclass(frozen=True)
class Refusal:
    """Why a request is refused."""

    code: str
    detail: str

    @property
    def status(self) -> int:
        """HTTP status of the answer."""
        return KINDS[self.code].status


def refusal(method: str, path: str, headers: Mapping[str, str], own_names: Collection[str]) -> Refusal | None:
    """Why a request is refused; None if it may pass. `own_names`: host names, in lower case, under which the service
    may be reached in addition to its addresses."""
    host = headers.get("host", "")
    if not _is_ours(host, own_names):
        return Refusal(
            "unknown_host",
            f"the service is not known as {host[:100]!r}; use its address, or add the name to MANTA_ALLOWED_HOSTS",
        )
    misunderstanding = other_client(headers.get(HEADER.lower()))
    if misunderstanding is not None:
        return Refusal("other_release", misunderstanding)
    origin = headers.get("origin")
    changes = method not in _SAFE
    if changes and origin is not None and not _same_site(origin, host, own_names):
        return Refusal("cross_site", f"pages of {origin[:100]!r} may not change anything here")
    if (
        changes
        and path.startswith(_JSON_PATHS)
        and _has_body(headers)
        and not _is_json(headers.get("content-type", ""))
    ):
        return Refusal("unsupported_media_type", "the body must be JSON: send it with Content-Type: application/json")
    return None


def _is_ours(host: str, own_names: Collection[str]) -> bool:
    """Whether `host` is one of our names or any IP address, which cannot be another site's name."""
    name = _name_in(host)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in own_names
    return True


def _name_in(host: str) -> str:
    if _NO_HOST.search(host):  # which could be taken for the beginning of a path
        return ""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _same_site(origin: str, host: str, own_names: Collection[str]) -> bool:
    """Whether a page of `origin` is one of ours: of this very host, or of a name that was configured for a proxy."""
    netloc = origin.partition("://")[2].lower()
    return netloc == host.lower() or (_name_in(netloc) in own_names and _name_in(host) in own_names)


def _has_body(headers: Mapping[str, str]) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))


class RequestGuard:
    """ASGI middleware that answers refused requests."""

    def __init__(self, app: ASGIApp, allowed_hosts: Collection[str] = ()):
        """`allowed_hosts`: names of the service in addition to those of this machine, such as a proxy's."""
        self._app = app
        self._own_names = {name.lower() for name in ("localhost", socket.gethostname(), *allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refused = refusal(scope["method"], scope["path"], headers, self._own_names)
        if refused is None and _has_body(headers) and not is_stranger(scope):  # what answers a stranger reads no body
            body = await _arrived(receive, headers)
            if body is None:
                return
            if isinstance(body, Refusal):
                refused = body
            else:
                receive = _replayed(body, receive)
        if refused is not None:
            await problem(refused.code, refused.detail)(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def _arrived(receive: Receive, headers: Mapping[str, str]) -> bytes | Refusal | None:
    """The whole body, or why it is refused; None if its client has disconnected."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _body(receive, headers)
    except TimeoutError:
        return Refusal("body_too_slow", f"the body has not arrived within {BODY_SECONDS:g} s; send the request again")


async def _body(receive: Receive, headers: Mapping[str, str]) -> bytes | Refusal | None:
    """The same, however long it takes. A body that is too long according to its header is not even read."""
    too_large = Refusal("body_too_large", f"the body is longer than {MAX_BODY_BYTES} bytes, which no request needs")
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        return too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return too_large
        if not message.get("more_body", False):
            return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body as one message, followed by further messages."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return left.pop() if left else await receive()

    return replay


class TellVersion:
    """ASGI middleware that adds the version of the REST API to every answer."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, and add the header to its answer."""

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), (HEADER.lower().encode(), b"%d" % REST)]}
            await send(message)

        await self._app(scope, receive, tell)
