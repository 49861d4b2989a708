"""Scheduling priorities of processes, for when there are fewer cores than processes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NICENESS = 5
"""About a third of the weight of a normal process (1.25 times less for each step, sched(7))."""
AUTOGROUP = Path("/proc/self/autogroup")
"""Linux's file for the niceness of a whole session, which counts if sessions share the cores (sched(7))."""


def give_way() -> None:
    """Let processes that only watch, decide and repair run before this one, which computes all the time.

    Otherwise, on a CPU node, they would wait for their turn among the trainers just when they are needed.
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(OSError):  # a kernel without such groups, or one that has limited the requests
        AUTOGROUP.write_text(str(NICENESS))
