"""A network of namespaces on this machine: a bridge, and cables that can be pulled."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol


class Closable(Protocol):
    """Something that ends."""

    def close(self) -> None:
        """Leave nothing of it."""


class Network:
    """A bridge that machines are plugged into."""

    def __init__(self, tag: str):
        """`tag`: something short that no other network of this machine has."""
        self.bridge = f"mt{tag[:8]}"
        self.subnet = f"10.213.{int(tag[:6], 16) % 250 + 1}"
        """The first three numbers of all its addresses."""
        self._plugged = 0
        self.plugged_in: list[Closable] = []
        """What goes with it, beside cables."""
        self.usable = self._set_up()

    def _set_up(self) -> bool:
        """False where this user may not."""
        try:
            _ip("link", "add", self.bridge, "type", "bridge")
            _ip("addr", "add", f"{self.subnet}.1/24", "dev", self.bridge)
            _ip("link", "set", self.bridge, "up")
        except (OSError, subprocess.CalledProcessError):
            return False
        return True

    @property
    def address(self) -> str:
        """Of the machine that the bridge is on."""
        return f"{self.subnet}.1"

    def plug_in(self) -> Cable:
        """A namespace with an address in this network."""
        self._plugged += 1
        return Cable(self.bridge, self._plugged, self.subnet)

    def close(self) -> None:
        """Take it down, and all that is plugged in."""
        for each in self.plugged_in:
            each.close()
        if self.usable:
            _ip("link", "del", self.bridge)


class Cable:
    """What connects one namespace with the bridge; `device` is its end there."""

    def __init__(self, bridge: str, number: int, subnet: str):
        self.namespace, self.address = f"{bridge}-{number}", f"{subnet}.{number + 1}"
        self._here, self.device = f"{bridge}{number}h", f"{bridge}{number}n"
        _ip("netns", "add", self.namespace)
        _ip("link", "add", self._here, "type", "veth", "peer", "name", self.device, "netns", self.namespace)
        _ip("link", "set", self._here, "master", bridge)
        _ip("link", "set", self._here, "up")
        inside = ("-n", self.namespace)
        _ip(*inside, "addr", "add", f"{self.address}/24", "dev", self.device)
        for device in ("lo", self.device):
            _ip(*inside, "link", "set", device, "up")
        _ip(*inside, "route", "add", "default", "via", f"{subnet}.1")

    def pull(self) -> None:
        """From now on nothing gets through, and nobody is told."""
        _ip("link", "set", self._here, "down")

    def put_back(self) -> None:
        """As before."""
        _ip("link", "set", self._here, "up")

    @contextmanager
    def cut(self, way: Literal["both", "output", "input"] = "both") -> Iterator[None]:
        """Until the end nothing gets through, or nothing that leaves the machine, or nothing that is sent to it; nobody
        is told."""
        if way == "both":
            self.pull()
        else:
            device = "oif" if way == "output" else "iif"
            chain = f"type filter hook {way} priority 0; policy drop; {device} lo accept;"
            self._nft(f"table inet lost {{ chain packets {{ {chain} }}; }}")
        try:
            yield
        finally:
            if way == "both":
                self.put_back()
            else:
                self._nft("delete table inet lost")

    def _nft(self, rules: str) -> None:
        inside = ["ip", "netns", "exec", self.namespace, "nft", "-f", "-"]
        subprocess.run(inside, input=rules, text=True, check=True, capture_output=True)

    def close(self) -> None:
        """Remove the namespace, once nobody lives there."""
        _ip("netns", "del", self.namespace)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
