"""Host memory that a GPU copies to and from directly: it is registered with the driver, which keeps its pages in place.
Copies to and from other memory go through a buffer of the driver, at a tenth of the speed, and block the thread that
requests them. Also the streams of the training thread's own copies."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import torch

Streams = tuple[torch.cuda.Stream, torch.cuda.Stream]


@cache
def copy_streams(device: torch.device) -> Streams:
    """Streams of this process for copies to host memory and back; torch's streams belong to the process."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _take_back_error() -> None:
    """The runtime keeps a thread's error until it is asked for, and torch asks after each kernel, so the next kernel
    would appear to fail. This runs a kernel that may fail."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)


class PinnedMemory:
    """Registers the memory of a tensor until it is released; does nothing without a GPU."""

    def __init__(self, memory: torch.Tensor, on_gpu: bool):
        """`memory`: registered from its first byte to its last, which are complete pages if it is mapped; `on_gpu`:
        whether what is copied is on a GPU."""
        self.error = 0
        """The driver's error code if it refused, so that copies stay slow; 0: it did not."""
        self._address: int | None = None
        if on_gpu and memory.numel():
            runtime = torch.cuda.cudart()
            size = memory.numel() * memory.element_size()
            self.error = int(runtime.cudaHostRegister(memory.data_ptr(), size, 0))
            if self.error:
                # The limit is most likely that of locked memory (ulimit -l), which a user can raise.
                print(f"{size} bytes for copies cannot be pinned (CUDA error {self.error})", flush=True)
                _take_back_error()
            else:
                self._address = memory.data_ptr()

    def release(self) -> None:
        """To be called before the memory is given back, when nothing is being copied any more."""
        if self._address is not None:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._address = None
