"""Threads for what may take long: lists, series, and what streams read. Short requests have others, so they never wait
behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar, cast

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Request

T = TypeVar("T")
LONG_READS = 8


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


Threads = Annotated[LongReads, Depends(_long_reads)]
"""The threads for what may take long, as a parameter of a route."""
