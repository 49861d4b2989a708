"""How far a loop is behind."""

from __future__ import annotations

import time
from collections.abc import Callable


class Lag:
    """What a loop that works in passes has still to do. Its thread writes, any thread may read."""

    def __init__(self, every: float | None = None, clock: Callable[[], float] = time.monotonic):
        """`every`: seconds from one pass to the next at most; None: the loop waits until it is asked."""
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
        """A pass begins. What is asked from now on is for the next one."""
        if self._working_since is None:
            self._working_since = self._clock() if self._due is None else min(self._due, self._clock())
        self._due = None

    def done(self) -> None:
        """The pass has done what there was. One that fails does not say so, and stays behind."""
        self._working_since = None
        if self._every is not None:
            next_pass = self._clock() + self._every
            self._due = next_pass if self._due is None else min(self._due, next_pass)

    @property
    def seconds(self) -> float:
        """How long the oldest of what is still to be done has been due; 0 where nothing is."""
        since = [each for each in (self._working_since, self._due) if each is not None]
        return max(0.0, self._clock() - min(since)) if since else 0.0
