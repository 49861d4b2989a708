"""How this process computes on its GPU."""

from __future__ import annotations

import torch

from workers.errors import ModelError

_NO_KERNEL = "No available kernel"
"""In what torch says where no attention kernel that is allowed takes its inputs."""


def use(device: torch.device) -> None:
    """Compute on `device` from now on; does nothing on a CPU.

    Sums of 16-bit products stay in fp32 whatever the library's default is, and attention by the kernel that keeps an
    s x s tensor for each head is nothing that it falls back to in silence: see `named`.
    """
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.enable_math_sdp(False)


def named(error: RuntimeError) -> Exception:
    """What to raise for an error of `scaled_dot_product_attention`: where no kernel is left, a sentence with a way
    out."""
    if _NO_KERNEL not in str(error):
        return error
    return ModelError(
        "no fused attention kernel of this GPU takes this model's attention (head size, precision, window): set "
        "train.attention: explicit, which keeps s x s numbers a head, or change model.head_dim or train.precision"
    )
