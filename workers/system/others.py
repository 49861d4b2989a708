"""How many of this machine's cores other processes use in the meantime."""

from __future__ import annotations

import os
import time
from pathlib import Path

_IDLE = slice(3, 5)
"""Columns of the first line of /proc/stat: idle, and waiting for disks."""
_COUNTED = 8
"""Number of its columns up to time that a hypervisor took; later columns are included in the first two."""


class OtherWork:
    """Counts, from its creation on, the computing of processes other than this one and the children that it has waited
    for."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), _busy_seconds(), _own_seconds()

    def cores(self) -> float | None:
        """Mean number of cores that others have kept busy since then; None if the kernel does not say."""
        busy = _busy_seconds()
        if busy is None or self._busy is None:
            return None
        others = (busy - self._busy) - (_own_seconds() - self._own)
        return max(0.0, others / max(1e-3, time.monotonic() - self._began))


def _busy_seconds() -> float | None:
    """Of all cores together, since the machine started."""
    try:
        columns = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1 : 1 + _COUNTED]
    except OSError:
        return None
    ticks = [int(each) for each in columns]
    return (sum(ticks) - sum(ticks[_IDLE])) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
