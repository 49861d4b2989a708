"""Bytes of a checkpoint as a read-only file object, for readers that need one."""

from __future__ import annotations

import io
from abc import abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class ReadOnlyBytes(io.RawIOBase):
    """A position in `size` bytes, which `fill` provides."""

    def __init__(self, size: int):
        self.size, self._position = size, 0

    @abstractmethod
    def fill(self, wanted: memoryview, at: int) -> int:
        """Copy the bytes from `at` on into `wanted`, which does not extend past the end; returns how many."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if position < 0:
            raise ValueError(f"there is no byte {position}")
        self._position = position
        return position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill `buffer`; shorter only at the end."""
        wanted = memoryview(buffer).cast("B")[: max(0, self.size - self._position)]
        count = self.fill(wanted, self._position)
        self._position += count
        return count
