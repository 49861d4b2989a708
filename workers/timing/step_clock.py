"""How a rank's wall time is spent between two committed steps: always on, two readings of the clock per wait.

`StepParts` occasionally measures what computing consists of; this always separates computing from waiting.
The control plane's ledger is made from it. `timing/step_phases.py` says which phases of a step are waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, get_args

Wait = Literal["data_wait", "snapshot_stall", "checkpoint_stall"]
WAITS: tuple[Wait, ...] = get_args(Wait)


class StepClock:
    """Seconds since the last lap, and how many of them were spent in which wait. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        """`clock`: a monotonic clock, in seconds."""
        self._clock = clock
        self._open: Wait | None = None
        self._depth = 0
        self._since = 0.0
        self.restart()

    def restart(self) -> None:
        """Begin the first lap again: earlier time counts for no phase."""
        self._began = self._since = self._clock()
        self._waits: dict[Wait, float] = dict.fromkeys(WAITS, 0.0)

    def enter(self, wait: Wait) -> None:
        """Work begins that keeps the training thread from computing. Within another wait it counts as that one."""
        self._depth += 1
        if self._depth == 1:
            self._open, self._since = wait, self._clock()

    def leave(self) -> None:
        """The work that was entered last is over."""
        self._depth -= 1
        if self._depth == 0:
            self._count(self._clock())
            self._open = None

    def _count(self, now: float) -> None:
        if self._open is not None:
            self._waits[self._open] += now - self._since
            self._since = now

    def lap(self) -> dict[str, float]:
        """Seconds since the previous lap by wait, and `wall`, all of them. A wait in progress is split here."""
        now = self._clock()
        self._count(now)
        seconds = {"wall": now - self._began} | {str(wait): spent for wait, spent in self._waits.items()}
        self._began, self._waits = now, dict.fromkeys(WAITS, 0.0)
        return seconds
