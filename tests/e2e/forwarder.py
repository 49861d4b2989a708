"""Servers that listen on this machine only, made reachable at another address."""

from __future__ import annotations

import contextlib
import socket
import threading

Target = tuple[str, int] | str
"""A host and port, or the path of a Unix socket."""


class Forwarder:
    """Whatever comes to `host` is passed on to `target`, and the answers back."""

    def __init__(self, host: str, target: Target):
        self._target = target
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = self._connect()
                except OSError:
                    client.close()
                    continue
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=_pump, args=(source, sink), daemon=True).start()

    def _connect(self) -> socket.socket:
        if isinstance(self._target, tuple):
            return socket.create_connection(self._target)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._target)
        return connection


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(1 << 16):
            sink.sendall(chunk)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
