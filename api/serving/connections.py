"""Limits the service's connections: their number, how long one may be silent, how long it may leave answers unread, and
how much of it is kept before a request begins. Before a client has sent a key, these are the only resources that it can
use up.

A connection that is one too many is answered before anything is read from it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from http import HTTPStatus

import uvicorn
from fastapi import FastAPI, Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from manta.api.app_state import state_of
from manta.api.problems import HEAD_TOO_LARGE, HTTP_ERROR, TOO_MANY_CONNECTIONS, problem
from manta.api.rest_version import HEADER, REST
from manta.service.errors import ErrorKind
from manta.workers.system.resources import raise_limit

HEAD_SECONDS = 15.0
"""Seconds that a connection may take to send everything before a request's body, for each request."""
UNREAD_SECONDS = 300.0
"""Seconds that a connection may leave sent data unread. A client that pages through a stream can reconnect where it
broke off."""
MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of a request's line and headers; also of what comes between two parts of a body, or after the last."""
MAX_HEADERS = 200
MAX_PIPELINED = 8
"""Requests that a connection may send before it has the answer to an earlier one. Ordinary clients send none."""
MAX_CONNECTIONS = 8192
_RESERVED_FILES = 256
"""Files that the service opens in addition to connections: its database, logs, Ray."""


def max_connections() -> int:
    """Number of connections that the process can hold, given its limit of open files, which is raised as far as needed
    and allowed."""
    return max(1, raise_limit(MAX_CONNECTIONS + _RESERVED_FILES) - _RESERVED_FILES)


class LimitedConnection(HttpToolsProtocol):
    """One connection of a service; see `limited_to`."""

    most = MAX_CONNECTIONS
    """Maximum number of connections."""
    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _outside_bodies = 0
    """Bytes that have arrived since the last whole head or part of a body. The parser keeps them, and does not say how
    many there are."""
    _is_too_much = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or refuse it if there are too many."""
        super().connection_made(transport)
        if self.client is not None:  # a listener for both families shows callers over IPv4 as ::ffff:ADDRESS
            self.client = (self.client[0].removeprefix("::ffff:"), self.client[1])
        if len(self.connections) > self.most:
            transport.write(_as_bytes(_refusal(TOO_MANY_CONNECTIONS)))
            transport.close()
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        """Continue with a request; when its head is complete, the wait for it ends. Close if that has no end."""
        if self.transport.is_closing():
            return
        self._outside_bodies += len(data)
        super().data_received(data)
        if self._outside_bodies > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(HEAD_TOO_LARGE)
        elif self._reads_a_body_or_answers():
            self._end_wait()
        else:
            self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One more header, or trailer."""
        self._stop_unless(len(self.headers) < MAX_HEADERS)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete. The parser is fed more than a head at once, so its size is known only here."""
        self._outside_bodies = 0
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        self._stop_unless(size <= MAX_HEAD_BYTES and len(self.pipeline) < MAX_PIPELINED)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._outside_bodies = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body has ended, and its trailers."""
        self._outside_bodies = 0
        super().on_message_complete()

    def _stop_unless(self, is_acceptable: bool) -> None:
        """Stop the parser, which then calls `send_400_response`, unless what arrives `is_acceptable`."""
        if not is_acceptable:
            self._is_too_much = True
            raise ValueError("more than a request needs")

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser cannot read, or was stopped at."""
        self._refuse(HEAD_TOO_LARGE if self._is_too_much else HTTP_ERROR)

    def _refuse(self, kind: ErrorKind) -> None:
        """Close the connection, with an answer unless that could be taken for the answer to an earlier request."""
        if not self.pipeline and not (self._reads_a_body_or_answers() and not self.cycle.more_body):
            self.transport.write(_as_bytes(_refusal(kind)))
        self.transport.close()

    def pause_writing(self) -> None:
        """Sent data is not being read: a stream would wait for that forever, even after its key is revoked."""
        super().pause_writing()
        self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Most of the sent data has been read."""
        self._end_unread()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._end_wait()
        self._end_unread()
        super().connection_lost(exc)

    def _reads_a_body_or_answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _end_wait(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self._reads_a_body_or_answers():
            self.transport.close()


def limited_to(most: int) -> type[LimitedConnection]:
    """The protocol of a server that holds at most `most` connections, for `uvicorn.Config(http=...)`."""
    return type("LimitedConnection", (LimitedConnection,), {"most": most})


_DETAILS = {
    TOO_MANY_CONNECTIONS: "the service holds as many connections as it can; try again in a moment",
    HEAD_TOO_LARGE: f"the request's line and headers, or what is around its body, have more than {MAX_HEAD_BYTES} "
    f"bytes or {MAX_HEADERS} lines, which no request needs",
    HTTP_ERROR: "this is not HTTP that the service can read",
}


def _refusal(kind: ErrorKind) -> Response:
    return problem(kind, _DETAILS[kind], headers={HEADER: str(REST)})


def _as_bytes(response: Response) -> bytes:
    status = HTTPStatus(response.status_code)
    headers = [*response.raw_headers, (b"connection", b"close")]
    lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), *(name + b": " + value for name, value in headers)]
    return b"\r\n".join([*lines, b"", bytes(response.body)])


class HttpServer(uvicorn.Server):
    """Serves an app of `api/app.py`. At its end it ends open streams and waits; uvicorn by itself would give them its
    grace period for requests, and then break them off."""

    def __init__(self, config: uvicorn.Config, app: FastAPI):
        super().__init__(config)
        self._app = app
        logging.getLogger("uvicorn.error").addFilter(is_no_hangup)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        state = state_of(self._app)
        state.changes.close()
        state.waits.close()
        await super().shutdown(sockets)


def is_no_hangup(record: logging.LogRecord) -> bool:
    """Whether a record is about something else than a client that has reset its connection, which uvloop raises in what
    is being sent."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, RuntimeError) and str(error).endswith("the handler is closed"))
