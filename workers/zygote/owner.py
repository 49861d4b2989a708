"""Starts a node's zygote, and restarts it when it dies or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from manta.workers.system.processes import ended, process_state
from manta.workers.system.threads import OF_COMPUTATION

log = logging.getLogger(__name__)

RESTART_SECONDS = 1.0
"""Pause before a dead zygote is restarted, so that one that cannot start does not exhaust the node."""
END_SECONDS = 10.0
POLL_SECONDS = 2.0
MAX_STOPPED_POLLS, MAX_UNANSWERED_POLLS = 5, 30
"""After so many looks in a row at a zygote that is stopped, or owes an answer, it is replaced: late enough not to be
due to load, as its trainers end with it. Looks are counted, since an owner that was stopped finds its timers overdue.
"""


class ZygoteOwner:
    """Owns the zygote that listens on `socket_path`. It ends with this process, through the pipe between the two."""

    def __init__(self, socket_path: Path, log: Path, options: Sequence[str], environment: Mapping[str, str] | None):
        """`options`: further arguments of `manta.workers.zygote`; `environment`: additions to this process's own."""
        self._socket_path, self._log = socket_path, log
        self._options, self._environment = tuple(options), dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._owner_pipe: int | None = None
        self._restarting: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the zygote; None before `start`."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the zygote unless it was started before. Does not wait until it is warm: requests do."""
        if self._restarting is None:
            self._spawn()
            self._restarting = asyncio.create_task(self._restart_when_it_dies(), name="zygote owner")

    async def close(self) -> None:
        """End the zygote and all its children, and wait until they are gone."""
        if self._restarting is not None:
            self._restarting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._restarting
        self._close_pipe()
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await ended(self._process.pid)
            self._process.kill()
            self._process.wait()

    async def _restart_when_it_dies(self) -> None:
        while self._process is not None:
            await self._end_of(self._process)
            self._process.wait()
            self._close_pipe()
            spawned = False
            while not spawned:
                await asyncio.sleep(RESTART_SECONDS)
                spawned = self._respawn()

    async def _end_of(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until `process` has ended, and end it if it hangs. One that does not listen yet is still importing."""
        stopped = unanswered = 0
        request = asyncio.create_task(_wait_for_answer(self._socket_path))
        try:
            while not await _ends_soon(process.pid):
                state = process_state(process.pid)
                stopped = stopped + 1 if state is not None and state.stopped else 0
                unanswered = unanswered + 1 if not request.done() else 0
                if request.done():
                    request = asyncio.create_task(_wait_for_answer(self._socket_path))
                if stopped == MAX_STOPPED_POLLS or unanswered == MAX_UNANSWERED_POLLS:
                    found = "is stopped" if stopped == MAX_STOPPED_POLLS else "does not answer"
                    log.warning("the zygote (process %d) %s, and is replaced", process.pid, found)
                    process.kill()
        finally:
            request.cancel()

    def _respawn(self) -> bool:
        """False if the machine does not permit it: whatever took the zygote's memory may still have the rest of it."""
        try:
            self._spawn()
        except OSError as error:
            self._close_pipe()
            log.warning("the zygote cannot be restarted: %s; retrying", error)
            return False
        return True

    def _spawn(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        read, self._owner_pipe = os.pipe()
        command = [sys.executable, "-P", "-m", "manta.workers.zygote", "--socket", str(self._socket_path)]
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [*command, "--owner-pipe", str(read), *self._options],
                    pass_fds=[read],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    env={
                        **os.environ,
                        **OF_COMPUTATION,
                        "PYTHONPATH": os.pathsep.join(_import_path()),
                        **self._environment,
                    },
                    start_new_session=True,
                )
        finally:
            os.close(read)

    def _close_pipe(self) -> None:
        if self._owner_pipe is not None:
            os.close(self._owner_pipe)
            self._owner_pipe = None


async def _ends_soon(pid: int) -> bool:
    """Whether the process `pid` ends before the next look at it is due."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(POLL_SECONDS):
            await ended(pid)
            return True
    return False


async def _wait_for_answer(path: Path) -> None:
    """Wait until who listens at `path` has refused an empty request; does not wait if nobody listens there."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        while connection.connect_ex(str(path)) == errno.EAGAIN:  # it has more to accept than it can queue
            await asyncio.sleep(POLL_SECONDS)
        connection.send(b"\n")
        await asyncio.get_running_loop().sock_recv(connection, 1)


def _import_path() -> list[str]:
    """Where this process finds its modules, so that the zygote finds the same ones from any working folder."""
    return [str(Path(entry).absolute()) for entry in sys.path if entry and Path(entry).is_dir()]
