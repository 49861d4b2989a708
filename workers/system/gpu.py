"""How this process computes on its GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import deterministic

from workers.config import JobSpec
from workers.errors import DeviceLost, ModelError

_NO_KERNEL = "No available kernel"
"""In what torch says where no attention kernel that is allowed takes its inputs."""

_CHOSEN = ExitStack()
"""Holds the choice of attention kernels, which ends with the block that torch offers for it."""

_HARDWARE = re.compile(
    r"uncorrectable (ECC|NVLink) error|hardware stack error|or a hardware error|busy or unavailable|"
    r"no CUDA-capable device|No CUDA GPUs are available|system not yet initialized|GPU is lost|"
    r"CUDA (error: )?unknown error",
    re.IGNORECASE,
)
"""How CUDA, torch and NCCL say that a GPU, its memory or its link has failed, or is not there: no program does that."""


def use(device: torch.device, same_bits: bool = False) -> None:
    """Compute on `device` from now on; does nothing on a CPU. `same_bits`: by kernels that give the same each time.

    Sums of 16-bit products stay in fp32 whatever the library's default is, and attention by the kernel that keeps an
    s x s tensor for each head is nothing that it falls back to in silence: see `named`.
    """
    if device.type != "cuda":
        return
    device = torch.device("cuda", device.index or 0)  # torch takes none that says only that it is a GPU
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    kernels = attention_kernels(torch.cuda.get_device_capability(device), same_bits)
    _CHOSEN.close()
    _CHOSEN.enter_context(sdpa_kernel(list(kernels), set_priority=True))
    if same_bits:
        # Of these cuBLAS takes the size of its workspace, without which it may add in another order on each stream.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Deterministic algorithms leave each compiled sum one size of blocks. With this a second one is tried where
        # kernels need many registers, and the faster one on the day taken, which another process may not take. It is
        # read when the compiler is imported, which is later; an assignment would be for one thread, not backward's.
        os.environ.setdefault("TORCHINDUCTOR_DYNAMIC_SCALE_RBLOCK", "0")
        # What torch has no such kernel for is an error that names it. Were it a warning, flash attention's backward
        # would take that for leave to add in any order.
        torch.use_deterministic_algorithms(True)
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # with what is never read


def leave() -> None:
    """Choose attention kernels, and among kernels at all, as torch does by itself again."""
    _CHOSEN.close()
    torch.use_deterministic_algorithms(False)


def attention_kernels(capability: tuple[int, int], same_bits: bool) -> Sequence[SDPBackend]:
    """Those of `scaled_dot_product_attention` that a GPU of this compute capability may use, the first that takes the
    inputs first, whatever torch's own order is.

    cuDNN's are made for Hopper and what came after it, where flash attention 2, which torch brings, does not reach its
    products; on older ones that comes first. cuDNN's have no backward that gives the same bits each time.
    """
    plain = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    if same_bits:
        return plain
    return (SDPBackend.CUDNN_ATTENTION, *plain) if capability >= (9, 0) else (*plain, SDPBackend.CUDNN_ATTENTION)


def use_for(spec: JobSpec, device: torch.device) -> None:
    """`use`, as the job wants it."""
    use(device, spec.train.deterministic_kernels or spec.train.deterministic == "elastic")


def named(error: RuntimeError) -> Exception:
    """What to raise for an error of `scaled_dot_product_attention`: where no kernel is left, a sentence with a way
    out."""
    if _NO_KERNEL not in str(error):
        return error
    return ModelError(
        "no fused attention kernel of this GPU takes this model's attention (head size, precision, window): set "
        "train.attention: explicit, which keeps s x s numbers a head, or change model.head_dim or train.precision"
    )


def as_lost(error: Exception) -> Exception:
    """`error`; where it says that the GPU itself has failed, DeviceLost in its place: the machine's fault, which
    another GPU does not have."""
    lines = str(error).splitlines() if isinstance(error, RuntimeError) else []
    said = next((line.strip() for line in lines if _HARDWARE.search(line)), None)
    if said is None:
        return error
    lost = DeviceLost(f"the GPU has failed: {said}")
    lost.__cause__ = error
    return lost
