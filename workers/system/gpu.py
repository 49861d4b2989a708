"""How this process uses its GPU: how it computes on it, and host memory that the GPU copies to and from directly: that
is registered with the driver, which keeps its pages in place. Copies to and from other memory go through a buffer of
the driver, at a tenth of the speed, and block the thread that requests them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import cache

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import deterministic

from manta.workers.config import JobSpec
from manta.workers.errors import DeviceLost, ModelError

_NO_KERNEL = "No available kernel"
"""Part of torch's error message if no allowed attention kernel supports the inputs."""

_CHOSEN = ExitStack()
"""Keeps the context manager open that selects the attention kernels, since the selection ends with it."""

_HARDWARE = re.compile(
    r"uncorrectable (ECC|NVLink) error|hardware stack error|or a hardware error|busy or unavailable|"
    r"no CUDA-capable device|No CUDA GPUs are available|system not yet initialized|GPU is lost|"
    r"CUDA (error: )?unknown error",
    re.IGNORECASE,
)
"""Messages of CUDA, torch and NCCL that a GPU, its memory or its link has failed or is missing, which no program can
cause."""


def use(device: torch.device, same_bits: bool = False) -> None:
    """Compute on `device` from now on; does nothing on a CPU. `same_bits`: with deterministic kernels only.

    Sums of 16-bit products stay in fp32, whatever the library's default is. Attention never falls back silently to the
    kernel that keeps an s x s tensor for each head: see `named`.
    """
    if device.type != "cuda":
        return
    device = torch.device("cuda", device.index or 0)  # torch does not accept one without an index
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    kernels = attention_kernels(torch.cuda.get_device_capability(device), same_bits)
    _CHOSEN.close()
    _CHOSEN.enter_context(sdpa_kernel(list(kernels), set_priority=True))
    if same_bits:
        # A fixed workspace of cuBLAS, without which the order of its sums may differ from stream to stream.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Deterministic algorithms leave each compiled sum one block size. Without this variable, a second one is timed
        # for kernels that need many registers, and the choice may differ between processes. The compiler, imported
        # later, reads it; assigning its configuration would affect this thread only, not that of backward.
        os.environ.setdefault("TORCHINDUCTOR_DYNAMIC_SCALE_RBLOCK", "0")
        # An operation without a deterministic kernel is an error that names it. With warn_only, the backward of flash
        # attention would add in any order.
        torch.use_deterministic_algorithms(True)
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # which is never read


def leave() -> None:
    """Undo `use`: torch selects kernels by itself again."""
    _CHOSEN.close()
    torch.use_deterministic_algorithms(False)


def attention_kernels(capability: tuple[int, int], same_bits: bool) -> Sequence[SDPBackend]:
    """The kernels of `scaled_dot_product_attention` that a GPU of this compute capability may use, in the order in
    which they are tried, whatever torch's own order is.

    cuDNN's come first on Hopper and later GPUs, whose rate of products torch's flash attention 2 does not reach, and
    last on older ones. Their backward is not deterministic.
    """
    plain = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    if same_bits:
        return plain
    return (SDPBackend.CUDNN_ATTENTION, *plain) if capability >= (9, 0) else (*plain, SDPBackend.CUDNN_ATTENTION)


def use_for(spec: JobSpec, device: torch.device) -> None:
    """`use`, as the job requires."""
    use(device, spec.train.deterministic_kernels or spec.train.deterministic == "elastic")


def named(error: RuntimeError) -> Exception:
    """The error to raise for one of `scaled_dot_product_attention`: if no kernel supports the inputs, a ModelError that
    says what to change."""
    if _NO_KERNEL not in str(error):
        return error
    return ModelError(
        "no fused attention kernel of this GPU supports this model's attention (head size, precision, window): set "
        "train.attention: explicit, which keeps s x s numbers a head, or change model.head_dim or train.precision"
    )


def as_lost(error: Exception) -> Exception:
    """`error`, or DeviceLost if it says that the GPU itself has failed: the job can continue on another one."""
    lines = str(error).splitlines() if isinstance(error, RuntimeError) else []
    line = next((line.strip() for line in lines if _HARDWARE.search(line)), None)
    if line is None:
        return error
    lost = DeviceLost(f"the GPU has failed: {line}")
    lost.__cause__ = error
    return lost


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
