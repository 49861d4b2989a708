"""The priority of a trainer, which computes all the time, below that of processes which watch, decide and repair."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

NICENESS = 5
"""About a third of the weight of a normal process (1.25 times less for each step, sched(7))."""
AUTOGROUP = Path("/proc/self/autogroup")
"""Linux's file for the niceness of a whole session, which counts if sessions share the cores (sched(7))."""
TRIES = 100
"""Maximum number of requests."""
PAUSE_SECONDS = (0.1, 1.0)
"""Linux takes one request within 0.1 seconds from all processes of a node that are not privileged."""
_own_random = random.SystemRandom()
"""A model's code may draw from the common generator, which depends on nothing but its seed."""


def lower_priority() -> None:
    """Let processes that only watch, decide and repair run before this one, which computes all the time.

    Otherwise, on a CPU node, they would wait for their turn among the trainers just when they are needed.
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    if not _request():  # another rank, which has just started too, was before this one
        threading.Thread(target=_keep_requesting, name="priority", daemon=True).start()


def _request() -> bool:
    """Whether Linux took the request, or takes none because it has no such groups."""
    try:
        AUTOGROUP.write_text(str(NICENESS))
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _keep_requesting() -> None:
    for _ in range(TRIES - 1):
        time.sleep(_own_random.uniform(*PAUSE_SECONDS))
        if _request():
            return
