"""Locks that keep a second service from a home, or from an SQLite file."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path
from typing import IO, Self

log = logging.getLogger(__name__)


class LockedFile:
    """A file that is locked until it is closed, and made again if somebody removes it meanwhile."""

    def __init__(self, path: Path):
        """Raises OSError, BlockingIOError if another process has locked it."""
        self._path, self._text = path, ""
        self._file = _locked(path)
        self._is_taken = False

    def write(self, text: str) -> None:
        """Replace the content. Raises OSError."""
        self._text = text
        self._file.seek(0)
        self._file.truncate()
        self._file.write(text)
        self._file.flush()

    def keep(self) -> None:
        """Lock a new file if this one was removed or replaced. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                return
        try:
            new = _locked(self._path)
        except BlockingIOError:
            if not self._is_taken:
                log.error("%s was removed, and another process has made and locked it: end one of the two", self._path)
            self._is_taken = True
            return
        self._file.close()
        self._file = new
        self.write(self._text)

    def close(self) -> None:
        """Unlock it."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _locked(path: Path) -> IO[str]:
    file = path.open("a")  # leaves what whoever has locked it has written
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file
