"""Memory that this process and one that it starts both see, without a name by which others could open it."""

from __future__ import annotations

import mmap
import os
from typing import Protocol

import numpy
import torch


class Room(Protocol):
    """Memory as an open file: a process that gets the file sees every byte."""

    bytes: int
    """Its size."""
    descriptor: int
    """Of the file, to be passed on."""

    def offset_of(self, content: memoryview) -> int | None:
        """Where `content`, bytes, begins in this memory; None where it lies elsewhere."""
        ...


def offset_within(start: int, size: int, content: memoryview) -> int | None:
    """Where `content`, bytes, begins in `size` bytes at the address `start`; None where it lies elsewhere."""
    offset: int = numpy.frombuffer(content, numpy.uint8).ctypes.data - start
    return offset if offset >= 0 and offset + len(content) <= size else None


class MappedFile:
    """A file that is mapped in this process anyway, as such memory."""

    def __init__(self, descriptor: int, memory: mmap.mmap):
        """`memory`: all of the file `descriptor`, mapped for writing."""
        self.descriptor, self.bytes = descriptor, len(memory)
        self._start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()

    def offset_of(self, content: memoryview) -> int | None:
        """See Room."""
        return offset_within(self._start, self.bytes, content)


class SharedRoom:
    """A tensor in such memory. It is freed with the last process that has it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        """Filled with zeros, so that no page has to be given later."""
        self.bytes = max(1, dtype.itemsize * torch.Size(shape).numel())
        self.descriptor = os.memfd_create("manta-checkpoint")
        """Of the memory as a file, to be passed on."""
        os.ftruncate(self.descriptor, self.bytes)
        self._memory = mmap.mmap(self.descriptor, self.bytes)
        count = torch.Size(shape).numel()
        self.tensor = torch.frombuffer(self._memory, dtype=dtype, count=count).view(shape).zero_()
        """Shape as asked for."""

    def offset_of(self, content: memoryview) -> int | None:
        """See Room."""
        return offset_within(self.tensor.data_ptr(), self.bytes, content)

    def close(self) -> None:
        """Pass it on no more. The memory stays for as long as the tensor does."""
        os.close(self.descriptor)
