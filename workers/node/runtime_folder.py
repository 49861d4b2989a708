"""Keeps a node's runtime folder, in /tmp, from those who clean it: a lock on the folder tells systemd-tmpfiles to leave
it and everything below it alone, others go by the age of what they find. A folder that is removed nevertheless is made
again. Pure Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from workers.paths import Paths

TOUCH_SECONDS = 6 * 3600.0
"""Seconds between two times at which everything in the folder is marked as used: cleaners wait for days."""


class RuntimeFolder:
    """The runtime folder of `paths`, locked while this process lives."""

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
