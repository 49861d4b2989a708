"""Addresses and ports of this machine: the address under which others reach it, and ports on which our processes
listen: any free one, or one in a range that a firewall permits."""

from __future__ import annotations

import errno
import ipaddress
import secrets
import socket
from dataclasses import dataclass

from manta.workers.errors import MantaError

LOWEST, HIGHEST = 1024, 65535
BACKLOG = 128

LOOPBACK = "127.0.0.1"
"""Reachable only for processes of this machine."""
_DISCARD_PORT = 9
_SOMEWHERE_ELSE = "192.0.2.1"  # in a network that no machine is in (RFC 5737)


def is_loopback(host: str) -> bool:
    """Whether a name or address in a URL leads to the machine of whoever opens it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_facing(host: str) -> str:
    """Address of this machine on the route to `host`. Raises OSError if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _DISCARD_PORT))  # sends nothing: a datagram socket only picks its route
        return str(probe.getsockname()[0])


def outward_address() -> str:
    """Address of the interface that leads out of this machine; its loopback address if there is no network."""
    try:
        return address_facing(_SOMEWHERE_ELSE)
    except OSError:
        return LOOPBACK


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
