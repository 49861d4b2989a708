"""The sum of the tensor ranks' partial outputs where it belongs to no matrix product, as in the token embedding; the
matrix products of workers/parallel/tensor/linear.py do their own communication (arXiv:2205.05198, section 4.2.2).

Activations are [s, b, h]: sequence, micro-batch, hidden. Sequence parallelism splits dimension 0.
"""

from __future__ import annotations

from typing import Any

import torch

from workers.comm.comm import Comm


class _ReduceFromTensorRegion(torch.autograd.Function):
    """g of arXiv:1909.08053: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm) -> torch.Tensor:
        x = x.contiguous().clone()
        comm.all_reduce("tensor", x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _ReduceScatterSequence(torch.autograd.Function):
    """g-bar of arXiv:2205.05198: reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm) -> torch.Tensor:
        ctx.comm = comm
        return comm.reduce_scatter("tensor", x.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.comm.all_gather("tensor", grads[0].contiguous()), None


def leave_tensor_region(x: torch.Tensor, comm: Comm, sequence_parallel: bool) -> torch.Tensor:
    """Sum the tensor ranks' partial outputs: [s, b, h] -> [s/t, b, h] with sequence parallelism, else [s, b, h]."""
    if comm.size("tensor") == 1:
        return x
    return (_ReduceScatterSequence if sequence_parallel else _ReduceFromTensorRegion).apply(x, comm)
