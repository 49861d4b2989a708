"""Limits the service's connections: their number, how long one may be silent, and how long it may leave answers unread.
Before a client has sent a key, these are the only resources that it can use up.

A connection that is refused is answered before anything is read from it.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from fastapi import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.problems import problem
from api.rest_version import HEADER, REST
from workers.system.open_files import raise_limit

HEAD_SECONDS = 15.0
"""Seconds that a connection may take to send everything before a request's body, for each request."""
UNREAD_SECONDS = 300.0
"""Seconds that a connection may leave sent data unread. A client that pages through a stream can reconnect where it
broke off."""
MOST_CONNECTIONS = 8192
_OTHER_FILES = 256
"""Files that the service opens in addition to connections: its database, logs, Ray."""


def connections_at_once() -> int:
    """Number of connections that the process can hold, given its limit of open files, which is raised as far as needed
    and allowed."""
    return max(1, raise_limit(MOST_CONNECTIONS + _OTHER_FILES) - _OTHER_FILES)


class LimitedConnection(HttpToolsProtocol):
    """One connection of a service; see `limited_to`."""

    most = MOST_CONNECTIONS
    """Maximum number of connections."""
    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or refuse it if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.write(_as_bytes(_one_too_many()))
            transport.close()
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        """Continue with a request; when its head is complete, the wait for it ends."""
        super().data_received(data)
        if self._reads_a_body_or_answers():
            self._end_wait()
        else:
            self._await_head()

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


def _one_too_many() -> Response:
    detail = "the service holds as many connections as it can; try again in a moment"
    return problem("too_many_connections", detail, headers={HEADER: str(REST)})


def _as_bytes(response: Response) -> bytes:
    status = HTTPStatus(response.status_code)
    headers = [*response.raw_headers, (b"connection", b"close")]
    lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), *(name + b": " + value for name, value in headers)]
    return b"\r\n".join([*lines, b"", bytes(response.body)])
