"""Background tasks of an event loop, how far a loop is behind, and growing pauses between retries."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

log = logging.getLogger(__name__)

_MAX_DOUBLINGS = 64


def log_failure(task: asyncio.Task[None]) -> None:
    """A callback for finished tasks: none may fail unnoticed."""
    if not task.cancelled() and task.exception() is not None:
        log.error("%s ended: %r", task.get_name(), task.exception(), exc_info=task.exception())


class BackgroundTasks:
    """Tasks that end by themselves. References are kept here, since the loop alone would let them be
    garbage-collected."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Do `work`, whose failure is logged."""
        task = asyncio.create_task(work, name=name)
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        task.add_done_callback(log_failure)

    async def settled(self) -> None:
        """Return once all tasks started until now have ended, however."""
        await asyncio.gather(*self.running, return_exceptions=True)


class Lag:
    """The outstanding work of a loop that works in passes. The loop's thread writes, any thread may read."""

    def __init__(self, every: float | None = None, clock: Callable[[], float] = time.monotonic):
        """`every`: the most seconds from one pass to the next; None: the loop waits until it is asked."""
        self._every, self._clock = every, clock
        self._working_since: float | None = None
        self._due: float | None = None
        if every is not None:
            self._due = clock() + every

    def asked(self) -> None:
        """There is something to do now."""
        now = self._clock()
        self._due = now if self._due is None else min(self._due, now)

    def begin(self) -> None:
        """A pass begins. Anything requested from now on belongs to the next one."""
        if self._working_since is None:
            self._working_since = self._clock() if self._due is None else min(self._due, self._clock())
        self._due = None

    def done(self) -> None:
        """The pass has done its work. A pass that fails does not call this, and stays behind."""
        self._working_since = None
        if self._every is not None:
            next_pass = self._clock() + self._every
            self._due = next_pass if self._due is None else min(self._due, next_pass)

    @property
    def seconds(self) -> float:
        """How long the oldest outstanding work has been due; 0 if there is none."""
        since = [each for each in (self._working_since, self._due) if each is not None]
        return max(0.0, self._clock() - min(since)) if since else 0.0


def backoff(first: float, longest: float) -> Iterator[float]:
    """Seconds between attempts, without end: each twice the previous one, from `first` up to `longest`."""
    pause = first
    while True:
        yield min(pause, longest)
        pause = min(2 * pause, longest)


def backoff_after(tries: int, first: float, longest: float) -> float:
    """Seconds to wait after `tries` tries in vain, counted from 0, as `backoff` has it. However many there are:
    what does not answer for days is tried thousands of times, and no float holds 2 to the power of that."""
    return min(longest, first * 2.0 ** min(tries, _MAX_DOUBLINGS))
