"""Threads for what may take long: lists, series, and what streams read. Short requests have others, so they never wait
behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar, cast

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Request

T = TypeVar("T")
LONG_READS = 8
JOB_LISTS = 2
"""A page of jobs is mostly this process's own work: threads that take turns at it make each take longer (a page of 50
for eight clients at once: 14 ms with 2 threads, 21 ms with 8), and a second one works while the first waits."""


class LongReads:
    """So many at once; the others wait without a thread."""

    def __init__(self, at_once: int = LONG_READS):
        self._limiter = CapacityLimiter(at_once)

    async def run(self, read: Callable[[], T]) -> T:
        """What `read` returns, on a thread."""
        return await to_thread.run_sync(read, limiter=self._limiter)


def long_reads_of(request: Request) -> LongReads:
    """Of the app that the request is for."""
    return cast(LongReads, request.app.state.long_reads)


async def _long_reads(request: Request) -> LongReads:
    return long_reads_of(request)


async def _job_lists(request: Request) -> LongReads:
    return cast(LongReads, request.app.state.job_lists)


Threads = Annotated[LongReads, Depends(_long_reads)]
"""The threads for what may take long, as a parameter of a route."""
JobListThreads = Annotated[LongReads, Depends(_job_lists)]
"""The threads for pages of jobs, as a parameter of a route."""
