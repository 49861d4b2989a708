"""Folders of a service on a node: which of the service's it shares, where it stores its own files, and its runtime
folder, which is kept from those who clean /tmp. Pure Python.

A service marks its folders with the id of its installation. A node that finds the mark in a folder at the same path,
and may write there, shares it. Another machine, or another user on it, uses a separate folder instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

from manta.workers.paths import Paths, safe_name
from manta.workers.system.daemon_threads import in_daemon_thread
from manta.workers.system.regular_files import read_regular

MARK = ".installation"
_MAX_BYTES = 1000

POLL_SECONDS = 1.0
"""How long callers wait for a look, from its beginning on."""

TOUCH_SECONDS = 6 * 3600.0
"""Seconds between two times at which everything in the folder is marked as used: cleaners wait for days."""


def mark(folder: Path, installation: str) -> None:
    """Mark `folder`, which is created if it is missing, as one of the service with this id. Raises OSError."""
    file = folder / MARK
    folder.mkdir(parents=True, exist_ok=True)
    if not shares(folder, installation):
        file.write_text(installation, encoding="utf-8")


def shares(folder: Path, installation: str) -> bool:
    """Whether this process sees the `folder` that the service with this id has marked, and may write there. Without an
    id every folder counts as shared."""
    if not installation:
        return True
    try:
        return read_regular(folder / MARK, _MAX_BYTES).decode() == installation and os.access(folder, os.W_OK)
    except (OSError, ValueError):
        return False


def unshared(folders: Iterable[str], installation: str) -> tuple[str, ...]:
    """The `folders` that this process does not share."""
    return tuple(folder for folder in folders if not shares(Path(folder), installation))


def paths_on_node(home: str, installation: str) -> Paths:
    """Paths of the service on this node: in its `home` if the node shares that, otherwise in a folder of this user.
    Raises UnsafePath for an id that cannot be the name of a folder."""
    if shares(Path(home), installation):
        return Paths.of(home)
    return Paths.of(Path.home() / ".manta" / "nodes" / safe_name(installation))


class SharedFolders:
    """The folders of one service, as seen by a daemon's loop, which must not wait for a mount that does not answer."""

    def __init__(self, folders: Iterable[str], installation: str):
        """`installation`: the service's id."""
        self._folders, self._installation = tuple(folders), installation
        self._check: Future[None] | None = None
        self._began = 0.0
        """When the look began, by the monotonic clock."""
        self._unshared: tuple[str, ...] = ()

    async def unshared(self) -> tuple[str, ...]:
        """Folders that this node does not share. While a file system does not answer, what was known before; at first
        all count as shared, since something is mounted there."""
        check = self._check
        if check is None or check.done():
            check = self._check = in_daemon_thread("shared folders", self._run_check)
            self._began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._began + POLL_SECONDS - time.monotonic()):
                await asyncio.wrap_future(check)
        return self._unshared

    def _run_check(self) -> None:
        """Store the result here, since it may come when nobody waits for it any more."""
        self._unshared = unshared(self._folders, self._installation)


class RuntimeFolder:
    """The runtime folder of `paths`, in /tmp, locked while this process lives: systemd-tmpfiles leaves a locked folder
    and everything below it alone; others who clean go by the age of what they find. If it is removed nevertheless, it
    is made again."""

    def __init__(self, paths: Paths):
        """Does nothing yet."""
        self._paths = paths
        self._lock: int | None = None
        self._touched = time.monotonic()

    def keep(self) -> None:
        """Make the folder unless it is there, and keep it. To be called again and again. Raises UnsafePath, OSError."""
        folder = self._paths.make_runtime_folder()
        if self._lock is None or not os.path.samestat(os.fstat(self._lock), folder.lstat()):
            self.release()
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                # Shared, since each node of a machine holds it. It fails while a cleaner is at work there.
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            else:
                self._lock = descriptor
        if time.monotonic() - self._touched >= TOUCH_SECONDS:
            self._touch()
            self._touched = time.monotonic()

    def release(self) -> None:
        """Let go of the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _touch(self) -> None:
        """Everything in it: Ray's sockets and files are as old as the service."""
        for parent, folders, files in os.walk(self._paths.runtime_folder):
            for name in (".", *folders, *files):
                with contextlib.suppress(OSError):  # it has been removed, or is another user's
                    os.utime(Path(parent, name), follow_symlinks=False)
