"""Scheduling priorities of processes, for when there are fewer cores than processes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NICENESS = 5
"""About a third of the weight of a process that is not nice (1.25 times less for each step, sched(7))."""
AUTOGROUP = Path("/proc/self/autogroup")
"""Where Linux keeps the niceness of a whole session, which is what counts where sessions share the cores (sched(7))."""


def give_way() -> None:
    """Let processes that only watch, decide and repair run before this one, which computes all the time.

    Without it they wait for their turn among the trainers of a CPU node just when there is something to do.
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(OSError):  # a kernel without such groups, or one that is asked too often
        AUTOGROUP.write_text(str(NICENESS))
