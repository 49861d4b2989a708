"""A network of this process alone, where the system lets us have one."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

CLONE_NEWNET = 0x40000000
SET_UP = (
    "link set lo up",
    "link add eth0 type veth peer name far-end",
    "addr add 198.18.78.1/24 dev eth0",  # out of the range for tests of network devices (RFC 2544)
    "link set eth0 up",
    "link set far-end up",
    # Where nobody is: that way Ray and `manta.workers.system.sockets` look for the address that others reach.
    "route add 8.8.8.8 dev eth0",
    "route add 192.0.2.1 dev eth0",
)
"""What a machine has: 127.0.0.1, and an address that others would reach. Names are not looked up anywhere."""


def enter_own_network() -> bool:
    """Move this thread, and what it starts from now on, into a network that nothing else is in: other processes' ports
    are not taken here, and a browser elsewhere is not told of interfaces that come and go here, for which it breaks off
    what it loads. False where that takes rights or programs that are not here, and nothing has changed."""
    library = ctypes.CDLL(None)
    with Path("/proc/self/ns/net").open() as before:
        if library.unshare(CLONE_NEWNET) != 0:
            return False
        try:
            for words in SET_UP:
                subprocess.run(["ip", *words.split()], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            if library.setns(before.fileno(), CLONE_NEWNET) != 0:
                raise OSError(f"process {os.getpid()} is left in a network without devices") from None
            return False
    return True
