"""A corpus as one sequence of tokens, read in place: nothing is copied, and opening it takes milliseconds."""

from __future__ import annotations

import bisect
from itertools import accumulate

import numpy as np

from workers.data.sources import CorpusFile
from workers.data.steady_file import SteadyFile

MAX_OPEN = 256
"""Files that are open at a time."""


class ByteCorpus:
    """The concatenated bytes of the files; one byte is one token (ids 0 to 255)."""

    def __init__(self, files: list[CorpusFile]):
        self._files = files
        self._ends = list(accumulate(file.size for file in files))
        self._open: dict[int, SteadyFile] = {}

    def __len__(self) -> int:
        """Number of tokens."""
        return self._ends[-1]

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) as int64. Raises IndexError outside the corpus, DataError if a file was
        removed, truncated, overwritten or replaced since the job began, DataUnreadable if its disk or mount does not
        work."""
        if start < 0 or start + length > len(self):
            raise IndexError(f"tokens {start} to {start + length} of a corpus of {len(self)}")
        tokens = np.empty(length, np.uint8)
        left, index = tokens.data, bisect.bisect_right(self._ends, start)
        while left:
            offset = start - (self._ends[index] - self._files[index].size)
            count = min(len(left), self._files[index].size - offset)
            self._opened(index).read_into(left[:count], offset)
            left, start, index = left[count:], start + count, index + 1
        return tokens.astype(np.int64)

    def _opened(self, index: int) -> SteadyFile:
        if index not in self._open:
            if len(self._open) >= MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            file = self._files[index]
            self._open[index] = SteadyFile(file.path, file.size, file.digest)
        return self._open[index]

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()
