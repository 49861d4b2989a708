"""Memory shared by this process and a child process, without a name by which others could open it."""

from __future__ import annotations

import mmap
import os
from typing import Protocol

import numpy
import torch


class Room(Protocol):
    """Memory as an open file: a process that receives the file sees every byte."""

    bytes: int
    """Size of the memory in bytes."""
    descriptor: int
    """File descriptor, to be passed on."""

    def offset_of(self, content: memoryview) -> int | None:
        """Where `content`, bytes, begins in this memory; None if it is elsewhere."""
        ...


def offset_within(start: int, size: int, content: memoryview) -> int | None:
    """Where `content`, bytes, begins in `size` bytes at the address `start`; None if it is elsewhere."""
    offset: int = numpy.frombuffer(content, numpy.uint8).ctypes.data - start
    return offset if offset >= 0 and offset + len(content) <= size else None


class MappedFile:
    """A file that this process has mapped anyway, as shared memory."""

    def __init__(self, descriptor: int, memory: mmap.mmap):
        """`memory`: all of the file `descriptor`, mapped for writing."""
        self.descriptor, self.bytes = descriptor, len(memory)
        self._start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()

    def offset_of(self, content: memoryview) -> int | None:
        """See Room."""
        return offset_within(self._start, self.bytes, content)


class SharedRoom:
    """A tensor in shared memory. The memory is freed with the last process that uses it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        """Filled with zeros, so that all pages are allocated now."""
        self.bytes = max(1, dtype.itemsize * torch.Size(shape).numel())
        self.descriptor = os.memfd_create("manta-checkpoint")
        """File descriptor of the memory, to be passed on."""
        os.ftruncate(self.descriptor, self.bytes)
        self._memory = mmap.mmap(self.descriptor, self.bytes)
        count = torch.Size(shape).numel()
        self.tensor = torch.frombuffer(self._memory, dtype=dtype, count=count).view(shape).zero_()
        """The tensor, with the requested shape."""

    def offset_of(self, content: memoryview) -> int | None:
        """See Room."""
        return offset_within(self.tensor.data_ptr(), self.bytes, content)

    def close(self) -> None:
        """Stop passing it on. The memory exists as long as the tensor does."""
        os.close(self.descriptor)
