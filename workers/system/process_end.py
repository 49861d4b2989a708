"""Ending processes on this machine, and waiting for their end. Pure Python."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterable


def kill_group(pid: int) -> None:
    """Send SIGKILL to the process `pid` and its process group; it is not an error if there is none. This also ends a
    stopped process. Only for a process that is not reaped yet, since a free pid may be reused by another process."""
    for send in (os.killpg, os.kill):  # a process that was just forked has no group of its own yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)


async def ended(pid: int) -> None:
    """Wait until the process `pid`, which need not be a child of this one, has ended; it is not reaped here."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(handle, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


@contextlib.asynccontextmanager
async def ends_of(pids: Iterable[int]) -> AsyncIterator[set[asyncio.Task[None]]]:
    """For each process, a task that is done once it has `ended`."""
    tasks = {asyncio.create_task(ended(pid)) for pid in pids}
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
