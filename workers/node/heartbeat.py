"""A node's heartbeat: a port on which its daemon answers every ping, and says at once when the node is to be left.

The answers come from a thread of their own, so that they do not wait for the daemon's event loop; and when the daemon
is gone, the kernel says so by closing the connection.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from typing import Any

from workers.protocol.json_codec import to_json
from workers.protocol.messages import Heartbeat

BACKLOG = 64
CHUNK_BYTES = 4096


class HeartbeatServer:
    """Answers each line that it receives, on any connection, with a Heartbeat as one JSON line."""

    def __init__(self, host: str, node: str):
        """Listen at `host`, on a free port."""
        self._node = node
        self._drain_at: float | None = None
        self._listener = socket.create_server((host, 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        self._woken, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._serve, name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    @property
    def drain_seconds(self) -> float | None:
        """For how long the node can still be counted on; None: nobody has said that it ends."""
        return None if self._drain_at is None else max(0.0, self._drain_at - time.monotonic())

    def drain(self, seconds: float) -> None:
        """The node is to be left within `seconds`: say so to all who are connected. The last word counts."""
        self._drain_at = time.monotonic() + seconds
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
            for each in (self._listener, self._woken, *self._connections):
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
            else:
                self._read(key.fileobj)
        return True

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._connections.add(connection)
            self._selector.register(connection, selectors.EVENT_READ)
            self._answer(connection)

    def _read(self, connection: Any) -> None:
        try:
            received = connection.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._drop(connection)
        elif b"\n" in received:
            self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        line = json.dumps(to_json(Heartbeat(self._node, self.drain_seconds))) + "\n"
        try:
            connection.sendall(line.encode())
        except OSError:  # it is gone, or does not read
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._connections.discard(connection)
        connection.close()
