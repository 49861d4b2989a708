"""Processes of this machine: what the kernel says about them, their priority, and their end, also with the process that
forked them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ProcessState:
    """One look at a process."""

    letter: str
    """R running or runnable, S sleeping, D waiting for a device, T stopped by a signal, t stopped by a debugger, Z
    ended."""
    cpu_seconds: float
    """Processor time used by all its threads."""
    main_cpu_seconds: float
    """Processor time used by its main thread, which is the one that trains."""
    delay_seconds: float
    """Time that its main thread was runnable without getting a processor; 0 if the kernel does not count it."""

    @property
    def stopped(self) -> bool:
        """Whether it was stopped by a signal; a debugger does not count."""
        return self.letter == "T"


def process_state(pid: int) -> ProcessState | None:
    """The state of process `pid`; None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may contain anything
    used = (int(fields[11]) + int(fields[12])) / _TICKS
    main, delay = _scheduling(pid, used)
    return ProcessState(fields[0], used, main, delay)


def _scheduling(pid: int, used: float) -> tuple[float, float]:
    try:
        running, waiting = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[:2]
    except (OSError, ValueError):
        return used, 0.0
    return int(running) / 1e9, int(waiting) / 1e9


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


class ParentDeathSignal:
    """Asks the kernel to kill the calling process when its parent dies, even by SIGKILL.

    Created before the fork, since loading the C library's handle afterwards would take time in each child.
    """

    def __init__(self) -> None:
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl

    def arm(self, parent: int) -> None:
        """Called in the child of process `parent`; exits at once if that parent is already gone."""
        self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
