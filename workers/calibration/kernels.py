"""Times of matrix products and of fused attention on one device, as the engine calls them.

Shapes: n tokens, i input width, o output width; s sequence, b micro-batch, a heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from workers.calibration.clock import Run, back_to_back_seconds, median_seconds
from workers.calibration.measurements import AttentionTime, ProductTime
from workers.parallel.tensor.products import TorchProducts

ON_CPU = ((64, 128, 128), (128, 256, 256), (256, 256, 1024), (256, 512, 512), (512, 1024, 256), (512, 512, 2048))
"""Products (n, i, o)."""
HEADS_ON_CPU = ((4, 4, 128, 32), (2, 8, 128, 64), (2, 4, 256, 32), (1, 8, 256, 64), (1, 4, 512, 64))
"""Attention (b, a, s, d)."""
Shapes = Sequence[tuple[int, ...]]


def product_times(
    device: torch.device, dtype: torch.dtype, shapes: Shapes | None = None, called: str = ""
) -> list[ProductTime]:
    """For each shape: forward, the gradient of the input, and that of the weights, which is added to an fp32 sum.
    `called`: name of the precision, if it differs from that of `dtype`."""
    products, times = TorchProducts(), []
    precision = called or str(dtype).removeprefix("torch.")
    for n, i, o in shapes or ON_CPU:
        x, grad = (torch.randn(n, width, device=device).to(dtype) for width in (i, o))
        weight = torch.randn(o, i, device=device).to(dtype)
        total = torch.zeros(o, i, device=device, dtype=torch.float32)
        runs: dict[str, Run] = {
            "forward": partial(products.output, x, weight),
            "input": partial(products.input_gradient, [grad], [weight]),
            "weight": partial(products.add_weight_gradient, total, grad, x, True),
        }
        for name, run in runs.items():
            times.append(ProductTime(name, precision, n, i, o, _seconds(run, device)))
    return times


def _seconds(run: Run, device: torch.device) -> float:
    return back_to_back_seconds(run, device) if device.type == "cuda" else median_seconds(run, device)


def attention_times(device: torch.device, dtype: torch.dtype, shapes: Shapes | None = None) -> list[AttentionTime]:
    """Forward and backward of causal attention, together; on a GPU, with `shapes`, also forward alone."""
    times = []
    for b, a, s, d in shapes or HEADS_ON_CPU:
        # If a rank has the whole model, a sample's tokens are contiguous.
        shape, order = ((b, s, a, d), (0, 2, 1, 3)) if shapes else ((s, b, a, d), (1, 2, 0, 3))
        leaves = tuple(torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
        grad = torch.randn(shape, device=device).to(dtype).permute(order)
        forward = _seconds(partial(_attend, leaves, order), device) if shapes else None
        both = _seconds(partial(_attend_and_back, leaves, order, grad), device)
        times.append(AttentionTime(b, a, s, d, both, forward))
    return times


def _attend(leaves: tuple[torch.Tensor, ...], order: tuple[int, ...]) -> torch.Tensor:
    q, k, v = (x.permute(order) for x in leaves)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _attend_and_back(leaves: tuple[torch.Tensor, ...], order: tuple[int, ...], grad: torch.Tensor) -> object:
    return torch.autograd.grad(_attend(leaves, order), leaves, grad)
