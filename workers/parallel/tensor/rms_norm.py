"""RMS norm, x / sqrt(mean(x^2) + epsilon) times a weight (Zhang & Sennrich 2019, arXiv:1910.07467). Backward keeps the
input and one number per row.

16-bit inputs are normalized in fp32 and rounded before they are multiplied by the weight, like Llama. Shapes: n rows, h
width.
"""

from __future__ import annotations

from typing import Any

import torch

from manta.workers.parallel.tensor.shards import ParameterShard, ShardedModule


class RMSNorm(ShardedModule):
    """RMS norm over the last dimension."""

    by_autograd = True

    def __init__(self, size: int, epsilon: float, partial: bool = False):
        """`partial`: each tensor rank normalizes heads of its own, so the weight's gradient is the sum over ranks."""
        super().__init__()
        self.epsilon = epsilon
        shard = ParameterShard((size,), group="norm", constant=1.0, partial=partial)
        self.weight = self.add_parameter("weight", (size,), shard)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., h] -> [..., h]."""
        if torch.compiler.is_compiling():
            return _normed(x, _inverse_root(x, self.epsilon)) * self.weight
        result: torch.Tensor = _RMSNorm.apply(x, self.weight, self.epsilon)
        return result


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        inverse_n1 = _inverse_root(x, epsilon)
        ctx.save_for_backward(x, weight, inverse_n1)
        return _normed(x, inverse_n1).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, inverse_n1 = ctx.saved_tensors
        grad, normed = grads[0], _normed(x, inverse_n1)
        grad_weight = (grad * normed).reshape(-1, x.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        wide_grad, wide = (grad * weight).to(inverse_n1.dtype), x * inverse_n1
        along = (wide_grad * wide).mean(-1, keepdim=True)
        grad_x = wide_grad.addcmul_(wide, along, value=-1.0).mul_(inverse_n1)
        return grad_x.to(x.dtype), grad_weight, None


def _inverse_root(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + epsilon) of each row, in at least fp32: [..., 1]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()


def _normed(x: torch.Tensor, inverse_n1: torch.Tensor) -> torch.Tensor:
    """In the precision of x, as a new tensor."""
    return (x * inverse_n1).to(x.dtype)
