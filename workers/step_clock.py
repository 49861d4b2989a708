"""Where a rank's wall time goes between two committed steps: always on, two readings of the clock a wait.

`step_parts.py` measures what computing consists of, now and then; this tells computing from waiting, always. The
control plane's ledger is made of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Wait = Literal["data_wait", "snapshot_stall", "checkpoint_stall"]
WAITS: tuple[Wait, ...] = Wait.__args__  # type: ignore[attr-defined]


class StepClock:
    """Seconds since the last lap, and how many of them were spent in which wait. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        """`clock`: a monotonic clock, in seconds."""
        self._clock = clock
        self._open: tuple[Wait, float] | None = None
        self.restart()

    def restart(self) -> None:
        """Begin the first lap anew: what was before belongs to nobody."""
        self._began = self._clock()
        self._waits: dict[Wait, float] = dict.fromkeys(WAITS, 0.0)

    @contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """Context of work that keeps the training thread from computing. Within another one it counts as that."""
        if self._open is not None:
            yield
            return
        self._open = (wait, self._clock())
        try:
            yield
        finally:
            self._close(self._clock())
            self._open = None

    def _close(self, now: float) -> None:
        if self._open is not None:
            wait, since = self._open
            self._waits[wait] += now - since
            self._open = (wait, now)

    def lap(self) -> dict[str, float]:
        """Seconds since the lap before by wait, and `wall`, all of them. A wait that goes on is cut in two here."""
        now = self._clock()
        self._close(now)
        seconds = {"wall": now - self._began} | {str(wait): spent for wait, spent in self._waits.items()}
        self._began, self._waits = now, dict.fromkeys(WAITS, 0.0)
        return seconds
