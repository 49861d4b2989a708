"""A file that is read while a job trains and must stay what it was: one that is overwritten is an error, and does not
become other samples."""

from __future__ import annotations

import hashlib
import os

from manta.workers.data.read_errors import read_error
from manta.workers.errors import DataError, DataNotStored
from manta.workers.system.regular_files import open_regular

SAMPLE_BYTES = 4096
ADVICE = "put it back as it was, or submit a new job"
"""Advice for a file of the corpus that has changed."""


def digest_of(descriptor: int, size: int) -> str:
    """SHA-256 of SAMPLE_BYTES each at the beginning, in the middle and at the end of the first `size` bytes of a file.
    Raises OSError."""
    last = max(size - SAMPLE_BYTES, 0)
    samples = (os.pread(descriptor, min(SAMPLE_BYTES, size), start) for start in (0, last // 2, last))
    return hashlib.sha256(b"".join(samples)).hexdigest()


class UnchangedFile:
    """An open file whose first `size` bytes stay what they are, as far as samples of them tell. It may grow, be
    replaced by another file, or be deleted."""

    changed: type[DataError] = DataError
    """What is raised if it is not what it was."""
    advice = ADVICE

    def __init__(self, path: str, size: int, digest: str | None = None):
        """`digest`: of the samples (`digest_of`); None: of the present ones. Raises DataError, DataUnreadable."""
        self.path, self._size, self._digest = path, size, digest
        self._modified = -1
        try:
            self._file = open_regular(path, buffering=0)
        except OSError as error:
            raise read_error(path, error) from error
        try:
            self._check()
        except DataError:
            self.close()
            raise

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the bytes from `start`. Raises DataError if the file was truncated or overwritten,
        DataUnreadable if its disk or mount does not work."""
        self._check()
        while buffer:
            try:
                count = os.preadv(self._file.fileno(), [buffer], start)
            except OSError as error:
                raise read_error(self.path, error) from error
            if not count:
                raise self._shorter()
            buffer, start = buffer[count:], start + count

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _check(self) -> None:
        """Compare size and samples, the latter only if the modification time has changed. Raises DataError."""
        try:
            now = os.fstat(self._file.fileno())
            if now.st_size < self._size:
                raise self._shorter()
            if now.st_mtime_ns == self._modified:
                return
            digest = digest_of(self._file.fileno(), self._size)
        except OSError as error:
            raise read_error(self.path, error) from error
        if self._digest not in (None, digest):
            raise self.changed(f"{self.path} is not what it was when the job began: {self.advice}")
        self._modified, self._digest = now.st_mtime_ns, digest

    def _shorter(self) -> DataError:
        return self.changed(f"{self.path} became shorter while the job was running ({self._size} bytes at its start)")


class CachedFile(UnchangedFile):
    """One that can be made anew."""

    changed = DataNotStored
    advice = "it is recreated at the next start"
