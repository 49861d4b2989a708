"""Threads for what may take long, or is asked for often: jobs, lists, series, what streams read, the planner's
work, what file systems, Ray and agents are asked, deletions. All else is short and has others, so it never waits behind
them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, TypeVar, cast

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Request

from service.store import Store
from workers.errors import MantaError
from workers.system.daemon_threads import in_daemon_thread

T = TypeVar("T")
LONG_READS = 8
SLOW_CHANGES = 8
SEARCHES = 2
PLANS = 2
FILES = 32
FILE_SECONDS = 20.0
"""How long a file system may take to answer: less than clients wait."""
NODES = 8


class FilesSilent(MantaError):
    """A file system that a request names does not answer."""

    def __init__(self, seconds: float):
        super().__init__(
            f"no answer in {seconds:g} s from a file system with data, a tokenizer or weights that this names, or that "
            "others named before; nothing was stored: see that it is mounted and answers (`ls` on the service's "
            "machine), and try again"
        )


class LongReads:
    """So many at once; the others wait without a thread."""

    def __init__(self, at_once: int = LONG_READS):
        self._limiter = CapacityLimiter(at_once)

    async def run(self, read: Callable[[], T]) -> T:
        """What `read` returns, on a thread."""
        return await to_thread.run_sync(read, limiter=self._limiter)


class FileReads:
    """For the files that a JobSpec names, on file systems that may never answer: FILES at once, each on a thread that
    nothing waits for at the end. One that hangs keeps its thread until its file system answers, and no request."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(FILES)

    async def run(self, read: Callable[[], T]) -> T:
        """What `read` returns. Raises FilesSilent where that, or a thread, takes too long."""
        try:
            async with asyncio.timeout(FILE_SECONDS):
                await self._places.acquire()
                answer = asyncio.wrap_future(in_daemon_thread("files of a job", read))
                answer.add_done_callback(self._give_back)
                return await asyncio.shield(answer)
        except TimeoutError as error:
            raise FilesSilent(FILE_SECONDS) from error

    def _give_back(self, answer: asyncio.Future[T]) -> None:
        self._places.release()
        if not answer.cancelled():
            answer.exception()  # a caller that still waits gets it


class DatabaseReads:
    """As many at once as make each other no slower, which depends on the database; the others wait without a thread."""

    def __init__(self) -> None:
        self._limiters: dict[int, CapacityLimiter] = {}

    async def run(self, store: Store, read: Callable[[], T]) -> T:
        """What `read` of `store` returns, on a thread."""
        at_once = store.database.reads_at_once
        limiter = self._limiters.get(at_once)
        if limiter is None:
            limiter = self._limiters[at_once] = CapacityLimiter(at_once)
        return await to_thread.run_sync(read, limiter=limiter)


class ReadThreads:
    """The threads of one app. What takes longer never holds up what is shorter, so each kind has its own."""

    def __init__(self) -> None:
        self.jobs, self.lists, self.series = DatabaseReads(), DatabaseReads(), DatabaseReads()
        self.long = LongReads()
        self.slow = LongReads(SLOW_CHANGES)
        """For what waits for files or nodes, some of it for minutes: deletions, exports that begin, checks of ports."""
        self.nodes = LongReads(NODES)
        """For what Ray or agents are asked, which may give no answer for half a minute."""
        self.files = FileReads()
        self.searches = LongReads(SEARCHES)
        """For the planner, which computes for up to a minute: more at once would take turns, and what supervises jobs
        in this process would wait for each."""
        self.plans = LongReads(PLANS)
        """For the planner where it has no layout to find, which takes it seconds at most: plans of single layouts,
        pictures, and what comes with traces."""


def read_threads_of(request: Request) -> ReadThreads:
    """Of the app that the request is for."""
    return cast(ReadThreads, request.app.state.read_threads)


def long_reads_of(request: Request) -> LongReads:
    """Those for events and logs."""
    return read_threads_of(request).long


async def _long_reads(request: Request) -> LongReads:
    return long_reads_of(request)


Threads = Annotated[LongReads, Depends(_long_reads)]
"""The threads for events and logs, as a parameter of a route."""
