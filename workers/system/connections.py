"""TCP connections of this process that libraries have opened, and how to shut them down from another thread."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

_DESCRIPTORS = Path("/proc/self/fd")
_INTERNET = (socket.AF_INET, socket.AF_INET6)


class Connection(NamedTuple):
    """Both ends of a connection. No other connection of the machine has the same ones while it is open."""

    here: tuple[str, int]
    """Address and port."""
    there: tuple[str, int]


def open_connections() -> set[Connection]:
    """All TCP connections that this process has open now."""
    return {connection for connection, _ in _connected()}


def break_connections(wanted: Callable[[Connection], bool]) -> int:
    """Shut down those that are `wanted`, in both directions: a thread that waits on one of them here or at its other
    end learns at once that it is closed. Their descriptors stay with their owners. Returns how many there were."""
    broken = 0
    for connection, own in _connected():
        if wanted(connection):
            with contextlib.suppress(OSError):  # the other end was faster
                own.shutdown(socket.SHUT_RDWR)
                broken += 1
    return broken


def _connected() -> Iterator[tuple[Connection, socket.socket]]:
    """Each connection with a separate descriptor, valid until the next one is returned: the number of the original one
    may be closed, and reused, before it is used."""
    for entry in list(_DESCRIPTORS.iterdir()):
        own = _socket_behind(int(entry.name))
        if own is None:
            continue
        with own:
            connection = _ends_of(own)
            if connection is not None:
                yield connection, own


def _socket_behind(descriptor: int) -> socket.socket | None:
    """The socket of `descriptor` under another number; None for files and for what was closed in the meantime."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def _ends_of(own: socket.socket) -> Connection | None:
    if own.family not in _INTERNET or own.type != socket.SOCK_STREAM:
        return None
    try:
        return Connection(own.getsockname()[:2], own.getpeername()[:2])
    except OSError:  # it listens, or is not connected yet
        return None
