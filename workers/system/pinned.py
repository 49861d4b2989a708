"""Host memory that a GPU copies to and from by itself: registered with the driver, which keeps its pages where they
are. Copies into other memory go through a buffer of the driver's, at a tenth of the speed, and hold up the thread that
asks for them. And the streams of the training thread's own copies."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import torch

Streams = tuple[torch.cuda.Stream, torch.cuda.Stream]


@cache
def copy_streams(device: torch.device) -> Streams:
    """Of this process, to host memory and back, as torch's streams belong to the process."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _take_back_error() -> None:
    """The runtime keeps an error of this thread until it is asked for, and torch asks behind each kernel: the next
    one would fail in its place. So one is run that may."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)


class PinnedMemory:
    """Registers the memory of a tensor until it is released; does nothing where there is no GPU."""

    def __init__(self, memory: torch.Tensor, on_gpu: bool):
        """`memory`: from its first byte to its last, of whole pages where it is mapped; `on_gpu`: whether what is
        copied lies on one."""
        self.error = 0
        """The driver's code where it refused, and copies stay slow; 0: it did not."""
        self._address: int | None = None
        if on_gpu and memory.numel():
            runtime = torch.cuda.cudart()
            size = memory.numel() * memory.element_size()
            self.error = int(runtime.cudaHostRegister(memory.data_ptr(), size, 0))
            if self.error:
                # Its limit is most likely that of locked memory (ulimit -l), which a user can raise.
                print(f"{size} bytes for copies cannot be pinned (CUDA error {self.error})", flush=True)
                _take_back_error()
            else:
                self._address = memory.data_ptr()

    def release(self) -> None:
        """Before the memory is given back. Nothing is being copied any more."""
        if self._address is not None:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._address = None
