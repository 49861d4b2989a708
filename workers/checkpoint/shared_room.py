"""Memory that this process and one that it starts both see, without a name that anybody else could open it by."""

from __future__ import annotations

import mmap
import os

import numpy
import torch


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
        """Where `content`, bytes, begins in this memory; None where it lies elsewhere."""
        address = numpy.frombuffer(content, numpy.uint8).ctypes.data
        offset = address - self.tensor.data_ptr()
        return offset if offset >= 0 and offset + len(content) <= self.bytes else None

    def close(self) -> None:
        """Pass it on no more. The memory stays for as long as the tensor does."""
        os.close(self.descriptor)
