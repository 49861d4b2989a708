"""Wakes a thread of another process: a named pipe that any process can write to and one process reads. Pure Python.

Shared memory has no events, and polling would use too much CPU time.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from pathlib import Path

from workers.paths import rank_stem
from workers.system.own_files import make_folder, remove


def notification_path(folder: str | Path, rank: int) -> Path:
    """The pipe through which the trainer of `rank` announces that a snapshot has its checksums."""
    return Path(folder) / f"{rank_stem(rank)}.bell"


def notify(path: Path) -> None:
    """Wake the listener at `path`, if there is one."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return  # nothing listens
    # The pipe is full of unread notifications, or the listener has just left.
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(descriptor, b"!")
    os.close(descriptor)


class NotificationPipe:
    """The listener's end of the pipe."""

    def __init__(self, path: Path):
        """Create the pipe at `path`, replacing an existing one."""
        self.path = path
        make_folder(path.parent)
        remove(path)
        os.mkfifo(path, 0o600)
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def notify(self) -> None:
        """Wake this listener, even if another pipe is at its path by now."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._descriptor, b"!")

    def wait(self, timeout: float | None = None, connection: socket.socket | None = None) -> bool:
        """Return True after a notification since the last wait, or when data or the end of `connection` arrives; False
        after `timeout` seconds."""
        watched = [self._descriptor] if connection is None else [self._descriptor, connection.fileno()]
        ready, _, _ = select.select(watched, [], [], timeout)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._descriptor, 4096):
                continue
        return bool(ready)

    def close(self) -> None:
        """Remove the pipe, unless another one is at its path by now."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == os.fstat(self._descriptor).st_ino:
                self.path.unlink()
        os.close(self._descriptor)
