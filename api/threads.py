"""Threads for requests that may take long or are frequent: jobs, lists, series, streams, the planner, file systems, Ray
and agents, deletions. All other requests are short and use other threads, so they never wait for these."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Request

from manta.api.app_state import state_of
from manta.service.control.file_work import MAX_THREADS
from manta.service.errors import ErrorKind, ServiceError
from manta.service.store import Store
from manta.workers.system.daemon_threads import in_daemon_thread

T = TypeVar("T")
LONG_READS = 8
SLOW_CHANGES = 8
DELETIONS = MAX_THREADS + 8
SEARCHES = 2
PLANS = 2
FILES = 32
FILE_SECONDS = 20.0
"""Seconds that a file system may take to answer: less than clients wait."""
NODES = 8


class FilesTimeout(ServiceError):
    """A file system that a request names does not answer."""

    kind = ErrorKind("files_silent", 503, "a file system that the JobSpec names does not answer")

    def __init__(self, seconds: float):
        super().__init__(
            f"no answer in {seconds:g} s from a file system with data, a tokenizer or weights that this names, or that "
            "others named before; nothing was stored: see that it is mounted and answers (`ls` on the service's "
            "machine), and try again"
        )


class LongReads:
    """A limited number of reads at once; others wait without using a thread."""

    def __init__(self, at_once: int = LONG_READS):
        self._limiter = CapacityLimiter(at_once)

    async def run(self, read: Callable[[], T]) -> T:
        """The result of `read`, on a thread."""
        return await to_thread.run_sync(read, limiter=self._limiter)


class FileReads:
    """Accesses files named by a JobSpec, on file systems that may never answer: FILES at once, each on a thread that is
    not joined at the end. One that hangs keeps its thread until its file system answers, but not its request."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(FILES)

    async def run(self, read: Callable[[], T]) -> T:
        """The result of `read`. Raises FilesTimeout if it takes too long, or no thread becomes free."""
        try:
            async with asyncio.timeout(FILE_SECONDS):
                await self._places.acquire()
                answer = asyncio.wrap_future(in_daemon_thread("files of a job", read))
                answer.add_done_callback(self._give_back)
                return await asyncio.shield(answer)
        except TimeoutError as error:
            raise FilesTimeout(FILE_SECONDS) from error

    def _give_back(self, answer: asyncio.Future[T]) -> None:
        self._places.release()
        if not answer.cancelled():
            answer.exception()  # a caller that still waits gets it


class DatabaseReads:
    """As many reads at once as do not slow each other down, which depends on the database; others wait without using a
    thread."""

    def __init__(self) -> None:
        self._limiters: dict[int, CapacityLimiter] = {}

    async def run(self, store: Store, read: Callable[[], T]) -> T:
        """The result of `read` from `store`, on a thread."""
        at_once = store.database.reads_at_once
        limiter = self._limiters.get(at_once)
        if limiter is None:
            limiter = self._limiters[at_once] = CapacityLimiter(at_once)
        return await to_thread.run_sync(read, limiter=limiter)


class ReadThreads:
    """The threads of one app. Each kind of work has its own, so that long ones never hold up short ones."""

    def __init__(self) -> None:
        self.jobs, self.lists, self.series = DatabaseReads(), DatabaseReads(), DatabaseReads()
        self.long = LongReads()
        self.slow = LongReads(SLOW_CHANGES)
        """For work that waits for nodes or files, possibly for half a minute: beginnings of exports, checks of
        ports."""
        self.deletions = LongReads(DELETIONS)
        """For deletions, which wait for file systems that may not answer."""
        self.nodes = LongReads(NODES)
        """For queries of Ray or agents, which may give no answer for half a minute."""
        self.files = FileReads()
        self.searches = LongReads(SEARCHES)
        """For searches of the planner, which take up to a minute: several would take turns on the CPU, and the
        supervision of jobs in this process would be delayed by each."""
        self.plans = LongReads(PLANS)
        """For the planner without a search, which takes seconds at most: plans of single layouts, pictures, comparisons
        with traces."""


def read_threads_of(request: Request) -> ReadThreads:
    """The app's threads."""
    return state_of(request.app).read_threads


async def _long_reads(request: Request) -> LongReads:
    return read_threads_of(request).long


Threads = Annotated[LongReads, Depends(_long_reads)]
"""The threads for events and logs, as a parameter of a route."""
