"""Sockets of this machine: the address under which others reach it, ports on which our processes listen (any free one,
or one in a range that a firewall permits), Unix sockets, and TCP connections that libraries have opened. Pure Python.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from manta.workers.errors import MantaError

LOWEST, HIGHEST = 1024, 65535
BACKLOG = 128

_LOOPBACK, _LOOPBACK_IPV6 = "127.0.0.1", "::1"
_DISCARD_PORT = 9
_SOMEWHERE_ELSE = ("192.0.2.1", "2001:db8::1")  # in networks that no machine is in (RFC 5737, RFC 3849)


def is_loopback(host: str) -> bool:
    """Whether a name or address in a URL leads to the machine of whoever opens it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def loopback_address() -> str:
    """Address that only processes of this machine reach: IPv4's, unless the machine has IPv6 only."""
    try:
        socket.create_server((_LOOPBACK, 0)).close()
    except OSError:
        return _LOOPBACK_IPV6
    return _LOOPBACK


def address_facing(host: str) -> str:
    """Address of this machine on the route to `host`. Raises OSError if there is no route."""
    family, kind, _, _, address = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: a datagram socket only picks its route
        return str(probe.getsockname()[0])


def outward_address() -> str:
    """Address of the interface that leads out of this machine, IPv4's if there is one; its loopback address if there is
    no network."""
    for host in _SOMEWHERE_ELSE:
        with contextlib.suppress(OSError):
            return address_facing(host)
    return loopback_address()


def host_and_port(host: str, port: int) -> str:
    """`HOST:PORT` as in URLs: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


class InvalidPortRange(MantaError):
    """A text is not a range of ports."""


@dataclass(frozen=True)
class PortRange:
    """Ports from `first` to `last`, both included."""

    first: int
    last: int

    @classmethod
    def of(cls, text: str) -> PortRange:
        """From `FIRST-LAST`. Raises InvalidPortRange."""
        first, separator, last = text.strip().partition("-")
        if not separator or not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
            raise InvalidPortRange(f"{text!r} is not a range of ports; write one such as 20000-20999")
        if not LOWEST <= int(first) <= int(last) <= HIGHEST:
            raise InvalidPortRange(
                f"{text!r} is not a range of ports from {LOWEST} to {HIGHEST}, with the lower one first"
            )
        return cls(int(first), int(last))

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


def listen(host: str, ports: PortRange | None = None, backlog: int = BACKLOG) -> socket.socket:
    """A socket that listens at `host`, an IP address or a name, on a free port of `ports`; None: on any. Raises
    OSError, which says so if all of them are in use."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    if ports is None:
        return socket.create_server((host, 0), family=family, backlog=backlog)
    count = ports.last - ports.first + 1
    start = secrets.randbelow(count)  # so that processes that start at once do not all try the same ports
    for number in range(count):
        try:
            return socket.create_server((host, ports.first + (start + number) % count), family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"all ports of {ports} (MANTA_PORTS) are in use at {host}; name a larger range")


POLL_SECONDS = 1.0
"""Seconds between two looks whether a socket's file is still there."""


class UnixListener:
    """Listens at `path`, which only this user can reach; it replaces a socket that another process left there."""

    def __init__(self, path: Path):
        """Raises OSError, also if there is no folder for it."""
        self.path, self.socket = path, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            temporary.unlink(missing_ok=True)
            self.socket.bind(str(temporary))
            temporary.chmod(0o600)
            self.socket.listen(128)
            self._status = temporary.lstat()
            temporary.rename(path)
        except BaseException:
            self.socket.close()
            raise

    def successor(self) -> UnixListener | None:
        """A new listener if nobody can reach this one any more, which is then to be closed. None if it can still be
        reached, if another process answers at its path, or if none can be made at present."""
        if self._is_at_its_path() or _answers(self.path):
            return None
        with contextlib.suppress(OSError):
            return UnixListener(self.path)
        return None

    def close(self) -> None:
        """Stop listening, and remove the socket's file unless it is another's."""
        self.socket.close()
        with contextlib.suppress(OSError):
            if self._is_at_its_path():
                self.path.unlink()

    def _is_at_its_path(self) -> bool:
        try:
            return os.path.samestat(self.path.lstat(), self._status)
        except OSError:
            return False


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except BlockingIOError:
            return True  # it has more to accept than it can queue
        except OSError:
            return False
    return True


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
