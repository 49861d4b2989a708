"""Times of matrix products and of fused attention on one device, as the engine calls them.

Shapes: n tokens, i input width, o output width; s sequence, b micro-batch, a heads, d head size.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from workers.calibration.clock import Run, median_seconds
from workers.calibration.measurements import AttentionTime, ProductTime
from workers.parallel.tensor.products import TorchProducts

ON_CPU = ((64, 128, 128), (128, 256, 256), (256, 256, 1024), (256, 512, 512), (512, 1024, 256), (512, 512, 2048))
ON_GPU = ((2048, 2048, 2048), (4096, 4096, 4096), (2048, 4096, 16384), (8192, 4096, 4096), (4096, 8192, 8192))
"""Products (n, i, o)."""
HEADS_ON_CPU = ((4, 4, 128, 32), (2, 8, 128, 64), (2, 4, 256, 32), (1, 8, 256, 64), (1, 4, 512, 64))
HEADS_ON_GPU = ((2, 16, 2048, 128), (1, 16, 4096, 128), (4, 16, 1024, 64))
"""Attention (b, a, s, d)."""


def product_times(device: torch.device, dtype: torch.dtype) -> list[ProductTime]:
    """Of each shape: forward, the gradient of the input, and that of the weights, which is added to a sum in fp32."""
    products, found = TorchProducts(), []
    for n, i, o in ON_GPU if device.type == "cuda" else ON_CPU:
        x, grad = (torch.randn(n, width, device=device).to(dtype) for width in (i, o))
        weight = torch.randn(o, i, device=device).to(dtype)
        total = torch.zeros(o, i, device=device, dtype=torch.float32)
        runs: dict[str, Run] = {
            "forward": partial(products.output, x, weight),
            "input": partial(products.input_gradient, [grad], [weight]),
            "weight": partial(products.add_weight_gradient, total, grad, x, True),
        }
        for name, run in runs.items():
            found.append(ProductTime(name, str(dtype).removeprefix("torch."), n, i, o, median_seconds(run, device)))
    return found


def attention_times(device: torch.device, dtype: torch.dtype) -> list[AttentionTime]:
    """Forward and backward of causal attention."""
    found = []
    for b, a, s, d in HEADS_ON_GPU if device.type == "cuda" else HEADS_ON_CPU:
        shape = (s, b, a, d)
        q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
        grad = torch.randn(b, a, s, d, device=device).to(dtype)

        run = partial(_attention, (q, k, v), grad)
        found.append(AttentionTime(b, a, s, d, median_seconds(run, device)))
    return found


def _attention(leaves: tuple[torch.Tensor, torch.Tensor, torch.Tensor], grad: torch.Tensor) -> object:
    q, k, v = (x.permute(1, 2, 0, 3) for x in leaves)
    context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.autograd.grad(context, leaves, grad)
