"""Addresses of this machine: those under which others reach it, and those that lead nowhere else."""

from __future__ import annotations

import ipaddress
import socket

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


def address_towards(host: str) -> str:
    """Address of this machine on the route to `host`. Raises OSError if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _DISCARD_PORT))  # sends nothing: a datagram socket only picks its route
        return str(probe.getsockname()[0])


def outward_address() -> str:
    """Address of the interface that leads out of this machine; its loopback address if there is no network."""
    try:
        return address_towards(_SOMEWHERE_ELSE)
    except OSError:
        return LOOPBACK
