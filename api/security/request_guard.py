"""Requests that are refused before any route sees them: those that another site's page makes its visitor's browser
send, and bodies that no request needs.

A page of another site, which one at another port of this machine is too, can send a form here, but it can neither hide
its `Origin` nor send JSON or a header of ours without a preflight request. A site whose name is made to resolve to this
machine (DNS rebinding) is recognised by its name in `Host`.
Clients of another release are refused here too, before they send something that this one does not understand.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manta.api.problems import (
    BODY_TOO_LARGE,
    BODY_TOO_SLOW,
    CROSS_SITE,
    OTHER_RELEASE,
    UNKNOWN_HOST,
    UNSUPPORTED_MEDIA_TYPE,
    problem,
)
from manta.api.rest_version import HEADER, REST, client_incompatibility
from manta.api.security.access import is_stranger
from manta.api.security.credentials import credential_in
from manta.api.security.permissions import LINK_PATH, PROBED
from manta.service.errors import ErrorKind
from manta.workers.system.sockets import is_loopback

MAX_BODY_BYTES = 1024 * 1024
"""Maximum size of a body; a job spec is about a thousand times smaller."""
BODY_SECONDS = 60.0
"""Seconds that a body may take to arrive. Until then it holds a connection, of which there is a limited number, which
clients without a key could otherwise use up."""
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_JSON_PATHS = "/v1/"
_NO_HOST = re.compile(r"[/?#@\\\s]")
_WITH_PORT = re.compile(r":\d+$")
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Refusal:
    """Why a request is refused."""

    kind: ErrorKind
    detail: str


@dataclass(frozen=True)
class OwnAddresses:
    """Under which addresses the service may be reached."""

    names: frozenset[str]
    """Host names, in lower case, in addition to all addresses of the machine."""
    origins: frozenset[tuple[str, str, int]] = frozenset()
    """(Scheme, host, port) of the addresses that were configured: what browsers show behind a proxy that sends another
    `Host` on."""
    by_tls: bool = False
    """Whether browsers reach the service over TLS."""

    @classmethod
    def of(cls, names: Collection[str], public: Collection[str], by_tls: bool) -> OwnAddresses:
        """`names`: host names of the machine; `public`: configured ones, each with or without a port."""
        own = (_origin(f"{'https' if by_tls else 'http'}://{each}") for each in public)
        origins = frozenset(each for each in own if each is not None)
        return cls(frozenset({*(name.lower() for name in names), *(host for _, host, _ in origins)}), origins, by_tls)

    def has(self, origin: str, host: str, scheme: str) -> bool:
        """Whether a page of `origin` is the service's own, when it asks `host` for something, which arrives by
        `scheme`."""
        known = _origin(origin)
        return known is not None and (
            known in self.origins or known in {_origin(f"{each}://{host}") for each in self._schemes(host, scheme)}
        )

    def _schemes(self, host: str, arrived_by: str) -> set[str]:
        """By which a browser may have asked `host`. It also reaches a port that is forwarded to its own machine, past
        the proxy that terminates TLS; behind one port there is one server, so no other page has that address."""
        if self.by_tls and not (is_loopback(_name_in(host)) and _WITH_PORT.search(host)):
            return {"https"}
        return {"https", arrived_by} if self.by_tls else {arrived_by}


def refusal(method: str, path: str, headers: Mapping[str, str], ours: OwnAddresses, scheme: str) -> Refusal | None:
    """Why a request is refused; None if it may pass. `scheme`: by which it has arrived."""
    host = headers.get("host", "")
    if not _is_ours(host, ours.names) and (host or path not in PROBED):  # old probes send no Host
        return Refusal(
            UNKNOWN_HOST,
            f"the service is not known as {host[:100]!r}; use its address, or add the name to MANTA_ALLOWED_HOSTS",
        )
    misunderstanding = client_incompatibility(headers.get(HEADER.lower()))
    if misunderstanding is not None:
        return Refusal(OTHER_RELEASE, misunderstanding)
    if path.startswith(LINK_PATH) and headers.get("sec-fetch-dest", "document") != "document":
        return Refusal(CROSS_SITE, "a link signs in whoever opens it, not a browser whose page asks for it")
    if method in _SAFE:
        return None
    foreign = _cross_site(headers, ours, scheme)
    if foreign is not None:
        return Refusal(CROSS_SITE, foreign)
    if path.startswith(_JSON_PATHS) and _has_body(headers) and not _is_json(headers.get("content-type", "")):
        return Refusal(UNSUPPORTED_MEDIA_TYPE, "the body must be JSON: send it with Content-Type: application/json")
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
        return _name_of(urlsplit(f"//{host}"))
    except ValueError:
        return ""


def _name_of(address: SplitResult) -> str:
    return (address.hostname or "").rstrip(".")


def _cross_site(headers: Mapping[str, str], ours: OwnAddresses, scheme: str) -> str | None:
    """Why a request for a change may come from a page that is not ours; None if it does not. With a browser's cookie it
    must be certain, since browsers send cookies by themselves; a key is only sent by who knows it."""
    origin = headers.get("origin")
    if origin is not None and not ours.has(origin, headers.get("host", ""), scheme):
        return (
            f"pages of {origin[:100]!r} may not change anything here; if that is the service's own address, behind a "
            "proxy, name it in MANTA_ALLOWED_HOSTS, and give --tls-terminated if browsers reach it by https"
        )
    credential = credential_in(headers)
    if credential is None or credential.is_key:
        return None
    if origin is None and headers.get("sec-fetch-site") != "same-origin":
        return "a browser that is signed in may change something here only from the service's own pages"
    if HEADER.lower() not in headers:
        return f"a change by a browser that is signed in must have the header {HEADER}: reload the page"
    return None


def _origin(address: str) -> tuple[str, str, int] | None:
    """Scheme, host and port of an address, which together are its origin (RFC 6454); None if it has none."""
    scheme, _, rest = address.partition("://")
    if not rest or _NO_HOST.search(rest):
        return None
    try:
        split = urlsplit(address.lower())
        port = split.port if split.port is not None else _DEFAULT_PORTS.get(scheme.lower())
    except ValueError:
        return None
    name = _name_of(split)
    return (split.scheme, name, port) if name and port is not None else None


def _has_body(headers: Mapping[str, str]) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))


class BelowPrefix:
    """ASGI middleware of a service that a proxy shows below a path: everything behind it sees paths without that."""

    def __init__(self, app: ASGIApp, prefix: str):
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http":
            path = scope["path"]
            while path == self._prefix or path.startswith(f"{self._prefix}/"):
                path = path.removeprefix(self._prefix) or "/"
            scope = {**scope, "path": path, "root_path": self._prefix}
        await self._app(scope, receive, send)


class RequestGuard:
    """ASGI middleware that answers refused requests."""

    def __init__(
        self, app: ASGIApp, listens_on: str = "localhost", allowed_hosts: Collection[str] = (), by_tls: bool = False
    ):
        """`listens_on`: name or address; `allowed_hosts`: names of the service in addition to those of this machine,
        such as a proxy's; `by_tls`: browsers reach the service over TLS."""
        self._app = app
        self._ours = OwnAddresses.of(("localhost", socket.gethostname(), listens_on), allowed_hosts, by_tls)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scheme = scope.get("scheme", "http")  # or what a trusted proxy says of it
        refused = refusal(scope["method"], scope["path"], headers, self._ours, scheme)
        if refused is None and _has_body(headers) and not is_stranger(scope):  # what answers a stranger reads no body
            body = await _arrived(receive, headers)
            if body is None:
                return
            if isinstance(body, Refusal):
                refused = body
            else:
                receive = _replayed(body, receive)
        if refused is not None:
            await problem(refused.kind, refused.detail)(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def _arrived(receive: Receive, headers: Mapping[str, str]) -> bytes | Refusal | None:
    """The whole body, or why it is refused; None if its client has disconnected."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _body(receive, headers)
    except TimeoutError:
        return Refusal(BODY_TOO_SLOW, f"the body has not arrived within {BODY_SECONDS:g} s; send the request again")


async def _body(receive: Receive, headers: Mapping[str, str]) -> bytes | Refusal | None:
    """The whole body, however long it takes, or why it is refused; None if its client has disconnected. A body that is
    too long according to its header is not even read."""
    too_large = Refusal(BODY_TOO_LARGE, f"the body is longer than {MAX_BODY_BYTES} bytes, which no request needs")
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


class VersionHeader:
    """ASGI middleware that adds the version of the REST API to every answer."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, and add the header to its answer."""

        async def send_with_version(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), (HEADER.lower().encode(), b"%d" % REST)]}
            await send(message)

        await self._app(scope, receive, send_with_version)
