"""The unfinished writes of one control plane."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class WriteQueue:
    """Counts writes. For any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.Lock()
        self._asked_at: dict[Future[Any], float] = {}  # the oldest first
        self._done, self._seconds = 0, 0.0

    def add(self, write: Future[Any]) -> None:
        """A write was requested just now."""
        with self._lock:
            self._asked_at[write] = self._clock()
        write.add_done_callback(self._remove)

    def _remove(self, write: Future[Any]) -> None:
        with self._lock:
            self._seconds += self._clock() - self._asked_at.pop(write)
            self._done += 1

    @property
    def length(self) -> int:
        """Number of writes that wait or are being executed."""
        return len(self._asked_at)

    @property
    def oldest_seconds(self) -> float:
        """Seconds that the oldest of them has waited; 0 if there is none."""
        with self._lock:
            return self._clock() - next(iter(self._asked_at.values())) if self._asked_at else 0.0

    @property
    def done(self) -> tuple[int, float]:
        """Number of writes that have ended, successfully or not, and their total seconds, waiting included."""
        with self._lock:
            return self._done, self._seconds
