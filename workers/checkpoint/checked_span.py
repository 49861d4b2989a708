"""A moving window over a verified file, contiguous in memory, so that its contents can be used in place."""

from __future__ import annotations

import numpy

from workers.checkpoint.checksums import BLOCK_BYTES, CheckedFile

ALIGNMENT = 64
"""Alignment in bytes of the address of a piece for which memory is allocated; others are wherever their block is."""


SPAN_BYTES = 4 * BLOCK_BYTES + 2 * ALIGNMENT
"""Memory of a span, unless a piece needs more: several blocks, since a part of the last one is moved to the beginning
when memory runs out; but few, so that they stay in the processor's cache."""


class CheckedSpan:
    """The most recently read blocks of one file. If pieces are requested in the file's order, everything is read and
    verified once: blocks that the next piece also needs are kept."""

    def __init__(self, file: CheckedFile):
        self._file = file
        self._memory = numpy.empty(0, numpy.uint8)
        self._start = 0
        """First block in memory."""
        self._first, self._end = 0, 0
        """Blocks in memory: [first, end)."""

    def piece(self, at: int, count: int) -> numpy.ndarray:
        """Bytes [at, at + count) of the file, [count] uint8, valid until the next call. Raises DamagedCheckpoint,
        UnreadableCheckpoint, or ValueError if the file is shorter."""
        if at < 0 or count < 0 or at + count > self._file.size:
            raise ValueError(f"there are no bytes {at} to {at + count}")
        size = self._file.block_bytes
        first, end = at // size, max(at // size + 1, -(-(at + count) // size))
        if not self._first <= first <= self._end or self._start + (end - self._first) * size > len(self._memory):
            self._make_room(first, end, -(at - first * size) % ALIGNMENT)
        for number in range(self._end, end):
            begin = self._start + (number - self._first) * size
            self._file.read_block(number, self._memory[begin : begin + size].data)
            self._end = number + 1
        begin = self._start + at - self._first * size
        return self._memory[begin : begin + count]

    def _make_room(self, first: int, end: int, start: int) -> None:
        """Keep the blocks from `first` on, and have memory up to `end`; the first one must be `start` bytes after an
        aligned address."""
        size = self._file.block_bytes
        kept = self._end - first if self._first <= first < self._end else 0
        held = self._start + (first - self._first) * size
        memory, room = self._memory, 2 * ALIGNMENT + (end - first) * size
        if len(memory) < room:
            memory = numpy.empty(max(room, min(SPAN_BYTES, 2 * ALIGNMENT + self._file.size)), numpy.uint8)
        start += -memory.ctypes.data % ALIGNMENT
        count = min(kept * size, self._file.size - first * size)
        if kept:
            memory[start : start + count] = self._memory[held : held + count]  # numpy handles the overlap
        self._memory, self._start, self._first, self._end = memory, start, first, first + kept
