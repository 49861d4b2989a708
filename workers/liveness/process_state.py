"""What the kernel says about a process: whether it is stopped, and whether it got processor time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessState:
    """One look at a process."""

    letter: str
    """R running or runnable, S sleeping, D waiting for a device, T stopped by a signal, t stopped by a debugger, Z
    ended."""
    cpu_seconds: float
    """Processor time used by all its threads."""
    main_cpu_seconds: float
    """Processor time used by its main thread, which is the one that trains."""
    delay_seconds: float
    """Time that its main thread was runnable without getting a processor; 0 if the kernel does not count it."""

    @property
    def stopped(self) -> bool:
        """Whether it was stopped by a signal; a debugger does not count."""
        return self.letter == "T"


def process_state(pid: int) -> ProcessState | None:
    """The state of process `pid`; None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may contain anything
    used = (int(fields[11]) + int(fields[12])) / _TICKS
    main, delay = _scheduling(pid, used)
    return ProcessState(fields[0], used, main, delay)


def _scheduling(pid: int, used: float) -> tuple[float, float]:
    try:
        running, waiting = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[:2]
    except (OSError, ValueError):
        return used, 0.0
    return int(running) / 1e9, int(waiting) / 1e9
