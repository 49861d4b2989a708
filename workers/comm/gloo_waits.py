"""Waits for gloo operations that another thread can interrupt."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from manta.workers.errors import PeerLost

_WAIT_SLICE = timedelta(seconds=0.05)
_SHORT_WAIT_SLICE = timedelta(milliseconds=10)  # torch takes less than a millisecond as no timeout at all
END_SECONDS = 0.1
"""How long an aborted operation may take to end before it counts as one that does not end."""
_NOT_YET = "Operation timed out"


class GlooWaits:
    """Waits of one rank in one generation for gloo operations, which another thread can interrupt.

    An error on a connection ends gloo's waits on it, except for a message that is partly received or sent at that
    moment: that wait continues until its timeout (torch 2.13 and 2.14, gloo of 2026-04: `Pair::signalException` skips
    the current operation). So a rank waits in intervals, and checks in between whether its communication was aborted.
    """

    def __init__(self, interrupted: Callable[[], bool]):
        """`interrupted`: whether communication was aborted."""
        self._interrupted = interrupted
        self._collectives: set[dist.Work] = set()
        self._others: set[dist.Work] = set()
        self._waits: queue.SimpleQueue[_Wait | None] | None = None

    def started(self, collective: dist.Work, respects_timeouts: bool) -> None:
        """A collective has begun; a thread of gloo's is in it until it ends. `respects_timeouts`: see `by_thread`."""
        (self._collectives if respects_timeouts else self._others).add(collective)

    def wait_in_slices(self, work: dist.Work) -> None:
        """Wait for a collective. Raises PeerLost, RuntimeError."""
        while not _ended_within(work, _WAIT_SLICE):
            self._raise_if_interrupted()
        work.wait()  # it may have ended just after its interval: its error is raised now
        self._collectives.discard(work)

    def by_thread(self, work: dist.Work) -> None:
        """Wait in another thread for an operation that supports no short timeout: a send or a receive, whose timeout
        would end the whole group, and a reduce-scatter, which ignores it. Raises PeerLost, RuntimeError."""
        wait = self._begin_wait(work)
        while not wait.ended.wait(_WAIT_SLICE.total_seconds()):
            self._raise_if_interrupted()
        self._others.discard(work)
        if wait.error is not None:
            raise wait.error

    def _begin_wait(self, work: dist.Work) -> _Wait:
        if self._waits is None:
            self._waits = queue.SimpleQueue()
            threading.Thread(target=_wait_for_each, args=(self._waits,), name="gloo waits", daemon=True).start()
        wait = _Wait(work)
        self._waits.put(wait)
        return wait

    def _raise_if_interrupted(self) -> None:
        if self._interrupted():
            raise PeerLost("communication was interrupted while this rank waited")

    def end(self) -> bool:
        """After an abort: whether all collectives have ended, as far as known. One that has not keeps a thread of
        gloo's, and the memory that it uses, until its timeout."""
        deadline = time.monotonic() + END_SECONDS
        waits = [self._begin_wait(work) for work in self._others]
        for work in self._collectives:
            while not work.is_completed() and time.monotonic() < deadline:
                with contextlib.suppress(RuntimeError):
                    work.wait(_SHORT_WAIT_SLICE)
        others_ended = all(wait.ended.wait(max(0.0, deadline - time.monotonic())) for wait in waits)
        if self._waits is not None:
            self._waits.put(None)
        return others_ended and all(work.is_completed() for work in self._collectives)


class _Wait:
    """A wait by a thread."""

    def __init__(self, work: dist.Work):
        self.work = work
        self.ended = threading.Event()
        self.error: Exception | None = None


def _wait_for_each(waits: queue.SimpleQueue[_Wait | None]) -> None:
    while (wait := waits.get()) is not None:
        try:
            wait.work.wait()
        except RuntimeError as error:
            wait.error = error
        wait.ended.set()


def _ended_within(work: Any, time_out: timedelta) -> bool:
    """Whether it ends within `time_out`. Raises the error that it ended with, if any."""
    try:
        work.wait(time_out)
    except RuntimeError as error:
        if not str(error).startswith(_NOT_YET):
            raise
        return bool(work.is_completed())
    return True
