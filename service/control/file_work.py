"""Work on files of jobs, on file systems and stores that may never answer.

Each piece has a thread of its own, for which neither a request nor the end of the service waits. Who repeats a request
waits for the work that the first one began.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from manta.workers.errors import MantaError
from manta.workers.system.daemon_threads import in_daemon_thread

T = TypeVar("T")

MAX_THREADS = 32
"""Others wait for one of these to end: stores that do not answer keep that many threads at most."""
REMOVAL_SECONDS = 120.0
"""How long a request waits for a removal, which may be of many files."""
FILE_SECONDS = 20.0
"""How long it waits for what takes a moment where the file system answers."""


class NotFinished(MantaError):
    """The work is not finished, but its caller waits no longer; the message says why."""

    state: str
    """What has become of the work, as a clause."""
    advice: str
    """What to do before it is asked for again, as a clause."""


class StillRunning(NotFinished):
    """The work takes longer than its caller waits."""

    state, advice = "the work continues in the background", "check that the file system or store responds"

    def __init__(self, seconds: float):
        super().__init__(f"that takes longer than {seconds:g} s")


class TooManyRunning(NotFinished):
    """Too much else is under way."""

    state, advice = "nothing was started", "check that the file systems and stores of the others respond"

    def __init__(self, seconds: float):
        super().__init__(f"{MAX_THREADS} others were under way for {seconds:g} s")


class ServiceEnds(NotFinished):
    """The service ends meanwhile."""

    state, advice = "what is not done by then is left", "wait until the service is back"

    def __init__(self) -> None:
        super().__init__("the service is ending")


class FileWork:
    """All such work of one service. Safe for use by several threads."""

    def __init__(self) -> None:
        self._under_way: dict[Hashable, Future[Any]] = {}
        self._changed, self._closed = threading.Condition(), Future[None]()

    def run(self, about: Hashable, seconds: float, work: Callable[[], T]) -> T:
        """The result of `work`, or of what is already under way `about` the same. Raises NotFinished after `seconds`,
        part of which it may wait for a place, or when the service ends."""
        until = time.monotonic() + seconds
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_decided(about), seconds):
                raise TooManyRunning(seconds)
            future = self._under_way.get(about)
            if future is None:
                if self._closed.done():
                    raise ServiceEnds
                future = self._under_way[about] = in_daemon_thread(f"files: {about}", work)
                future.add_done_callback(self._notify)
        wait([future, self._closed], max(until - time.monotonic(), 0.0), FIRST_COMPLETED)
        if not future.done():
            raise ServiceEnds if self._closed.done() else StillRunning(seconds)
        result: T = future.result()
        return result

    def _is_decided(self, about: Hashable) -> bool:
        """Whether work can begin now, has begun already, or never will."""
        self._under_way = {key: each for key, each in self._under_way.items() if not each.done()}
        return about in self._under_way or len(self._under_way) < MAX_THREADS or self._closed.done()

    def _notify(self, _ended: Future[Any]) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody waits any more; what is under way ends with the process."""
        with self._changed:
            if not self._closed.done():
                self._closed.set_result(None)
            self._changed.notify_all()
