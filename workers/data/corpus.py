"""A corpus as one sequence of tokens, read in place: nothing is copied, and opening it takes milliseconds."""

from __future__ import annotations

import bisect
import os
from itertools import accumulate

import numpy as np

from workers.data.corpus_record import ADVICE, HEAD_BYTES, head_digest
from workers.data.read_errors import read_error
from workers.data.sources import CorpusFile
from workers.errors import DataError
from workers.system.regular_files import open_regular


class ByteCorpus:
    """The concatenated bytes of the files; one byte is one token (ids 0 to 255)."""

    def __init__(self, files: list[CorpusFile]):
        self._files = files
        self._ends = list(accumulate(file.size for file in files))
        self._descriptors: dict[int, int] = {}

    def __len__(self) -> int:
        """Number of tokens."""
        return self._ends[-1]

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) as int64. Raises IndexError outside the corpus, DataError if a file was
        removed, truncated or replaced since the job began, DataUnreadable if its disk or mount does not work."""
        if start < 0 or start + length > len(self):
            raise IndexError(f"tokens {start} to {start + length} of a corpus of {len(self)}")
        parts = []
        index = bisect.bisect_right(self._ends, start)
        while length > 0:
            file = self._files[index]
            offset = start - (self._ends[index] - file.size)
            descriptor = self._descriptor(index)
            try:
                part = os.pread(descriptor, min(length, file.size - offset), offset)
            except OSError as error:
                raise read_error(file.path, error) from error
            if len(part) != min(length, file.size - offset):
                raise DataError(
                    f"{file.path} became shorter while the job was running ({file.size} bytes at its start)"
                )
            parts.append(part)
            start, length, index = start + len(part), length - len(part), index + 1
        return np.frombuffer(b"".join(parts), dtype=np.uint8).astype(np.int64)

    def _descriptor(self, index: int) -> int:
        if index not in self._descriptors:
            if len(self._descriptors) >= 256:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            self._descriptors[index] = self._opened(self._files[index])
        return self._descriptors[index]

    def _opened(self, file: CorpusFile) -> int:
        try:
            with open_regular(file.path) as opened:
                descriptor = os.dup(opened.fileno())
            head = os.pread(descriptor, min(HEAD_BYTES, file.size), 0)
        except OSError as error:
            raise read_error(file.path, error) from error
        if file.head is not None and head_digest(head) != file.head:
            os.close(descriptor)
            raise DataError(f"{file.path} is not what it was when the job began: {ADVICE}")
        return descriptor

    def close(self) -> None:
        """Close the files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
