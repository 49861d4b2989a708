"""Work on files of jobs, on file systems and stores that may never answer.

Each piece has a thread of its own, for which neither a request nor the end of the service waits. Who repeats a request
waits for the work that the first one began.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from workers.errors import MantaError
from workers.system.daemon_threads import in_daemon_thread

T = TypeVar("T")

AT_ONCE = 32
"""More are refused: a store that does not answer keeps that many threads at most."""
REMOVAL_SECONDS = 120.0
"""How long a request waits for a removal, which may be of many files."""
LOOK_SECONDS = 20.0
"""How long it waits for what takes a moment where the file system answers."""


class NoAnswer(MantaError):
    """The work takes longer than its caller waits. It goes on, unless it was refused."""


class FileWork:
    """All such work of one service. Safe for use by several threads."""

    def __init__(self) -> None:
        self._under_way: dict[Hashable, Future[Any]] = {}
        self._lock, self._closed = threading.Lock(), Future[None]()

    def run(self, about: Hashable, seconds: float, work: Callable[[], T]) -> T:
        """The result of `work`, or of what is already under way `about` the same. Raises NoAnswer after `seconds`, or
        when the service ends, and at once if too much else is under way."""
        with self._lock:
            self._under_way = {key: each for key, each in self._under_way.items() if not each.done()}
            future = self._under_way.get(about)
            if future is None:
                if len(self._under_way) >= AT_ONCE:
                    raise NoAnswer(f"{AT_ONCE} others wait for a file system or store that does not answer")
                future = self._under_way[about] = in_daemon_thread(f"files: {about}", work)
        wait([future, self._closed], seconds, FIRST_COMPLETED)
        if not future.done():
            raise NoAnswer(f"no answer in {seconds:g} s" if not self._closed.done() else "the service is ending")
        result: T = future.result()
        return result

    def close(self) -> None:
        """Nobody waits any more; what is under way ends with the process."""
        if not self._closed.done():
            self._closed.set_result(None)
