"""A node's heartbeat: a port on which its daemon answers every ping, and reports at once when the node is being
drained.

A ping is a line with a secret, which the daemon gives to those that may ask it for the port: strangers who reach the
port learn nothing, and cannot exhaust it. The secret is sent unencrypted. A separate thread answers, so that answers do
not wait for the daemon's event loop; and when the daemon is gone, the kernel reports that by closing the connection.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from manta.workers.protocol.json_codec import to_json
from manta.workers.protocol.messages import GpuReading, Heartbeat
from manta.workers.system.sockets import PortRange, listen

BACKLOG = 64
CHUNK_BYTES = 4096
MAX_UNAUTHENTICATED = 64
"""Maximum number of connections on which the secret has not been sent."""


@dataclass(frozen=True)
class _Drain:
    until: float
    """In seconds of the monotonic clock; infinite if not known."""
    reason: str


class HeartbeatServer:
    """Answers each ping that it receives, on any connection, with a Heartbeat as one JSON line."""

    def __init__(self, host: str, node: str, ports: PortRange | None = None):
        """Listen at `host`, on one of `ports`; None: any."""
        self._node = node
        self.secret = secrets.token_hex()
        """The content of a ping."""
        self._drains: dict[str, _Drain] = {}  # by who reports it
        self._changing = threading.Lock()
        self._withdrawn = False
        self._gpus: tuple[GpuReading, ...] | None = None
        self._listener = listen(host, ports, BACKLOG)
        self._listener.setblocking(False)
        self._woken, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._connections: dict[socket.socket, tuple[GpuReading, ...] | None] = {}
        """With the last readings of the GPUs that were sent on each."""
        self._unauthenticated: dict[socket.socket, bytes] = {}  # what they have sent so far; the oldest first
        self._thread = threading.Thread(target=self._serve, name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    @property
    def state(self) -> Heartbeat:
        """The current answer, without GPUs. If several sources have reported that the node is being drained, the one
        that leaves the least time counts."""
        with self._changing:
            drains = list(self._drains.values())
        if not drains:
            return Heartbeat(self._node, stays=self._withdrawn)
        first = min(drains, key=lambda drain: drain.until)
        seconds = None if math.isinf(first.until) else max(0.0, first.until - time.monotonic())
        return Heartbeat(self._node, draining=True, drain_seconds=seconds, drain_reason=first.reason)

    def drain(self, seconds: float | None, reason: str = "", source: str = "") -> None:
        """The node is being drained within `seconds`, None if that is not known: report it, with the reason, to all
        connected peers. The latest statement of each `source` counts."""
        until = math.inf if seconds is None else time.monotonic() + seconds
        with self._changing:
            self._drains[source] = _Drain(until, reason)
        self._notify()

    def withdraw(self, *sources: str) -> None:
        """The statements of these `sources` no longer hold."""
        with self._changing:
            for source in sources:
                self._drains.pop(source, None)
            self._withdrawn = True
        self._notify()

    def note_gpus(self, readings: tuple[GpuReading, ...]) -> None:
        """The machine's GPUs: the next answer on each connection contains them."""
        self._gpus = readings

    def _notify(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"\n")

    def close(self) -> None:
        """Stop answering."""
        self._waker.close()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while self._serve_once():
                pass
        finally:
            self._selector.close()
            for each in (self._listener, self._woken, *self._connections, *self._unauthenticated):
                each.close()

    def _serve_once(self) -> bool:
        for key, _ in self._selector.select():
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                if not self._woken.recv(CHUNK_BYTES):
                    return False
                for connection in list(self._connections):
                    self._answer(connection)
            elif key.fileobj in self._connections:
                self._read(key.fileobj)
            elif key.fileobj in self._unauthenticated:  # otherwise it just had to make room
                self._authenticate(key.fileobj)
        return True

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._unauthenticated[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)
            if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
                self._drop(next(iter(self._unauthenticated)))
            self._authenticate(connection)  # it may have sent something already

    def _authenticate(self, connection: Any) -> None:
        """A peer that pings once is authenticated; everything that arrives on the connection later counts as pings,
        too."""
        received = self._received(connection)
        if received is None:
            return
        buffered = self._unauthenticated[connection] + received
        line, newline, _ = buffered.partition(b"\n")
        if newline and hmac.compare_digest(line, self.secret.encode()):
            del self._unauthenticated[connection]
            self._connections[connection] = None
            self._answer(connection)
        elif newline or not received or len(buffered) > len(self.secret):
            self._drop(connection)
        else:
            self._unauthenticated[connection] = buffered

    def _read(self, connection: Any) -> None:
        received = self._received(connection)
        if received == b"":
            self._drop(connection)
        elif received is not None and b"\n" in received:
            self._answer(connection)

    def _received(self, connection: socket.socket) -> bytes | None:
        """What has arrived; empty if the other end is gone, None if there is nothing yet."""
        try:
            return connection.recv(CHUNK_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _answer(self, connection: socket.socket) -> None:
        state, gpus = self.state, self._gpus
        if gpus is not None and self._connections[connection] is not gpus:
            self._connections[connection] = gpus
            state = replace(state, gpus=gpus)
        line = json.dumps(to_json(state)) + "\n"
        try:
            connection.sendall(line.encode())
        except OSError:  # it is gone, or does not read
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._connections.pop(connection, None)
        self._unauthenticated.pop(connection, None)
        connection.close()
