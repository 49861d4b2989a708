"""Threads for what may take long, or is asked for often: jobs, lists, series, what streams read, the planner's
work, what file systems, Ray and agents are asked, deletions. All else is short and has others, so it never waits behind
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar, cast

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Request

from service.store import Store

T = TypeVar("T")
LONG_READS = 8
SLOW_CHANGES = 8
SEARCHES = 2
PLANS = 2
FILES = 8
NODES = 8


class LongReads:
    """So many at once; the others wait without a thread."""

    def __init__(self, at_once: int = LONG_READS):
        self._limiter = CapacityLimiter(at_once)

    async def run(self, read: Callable[[], T]) -> T:
        """What `read` returns, on a thread."""
        return await to_thread.run_sync(read, limiter=self._limiter)


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
        self.files = LongReads(FILES)
        """For the files that a JobSpec names, on file systems that may never answer."""
        self.searches = LongReads(SEARCHES)
        """For the planner, which computes for up to a minute: more at once would take turns, and what looks after jobs
        in this process would wait for each."""
        self.plans = LongReads(PLANS)
        """For the planner where it has no layout to find, which takes it seconds at most: plans of single layouts,
        pictures, and what stands beside traces."""


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
