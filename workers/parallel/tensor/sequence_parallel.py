"""Sequence parallelism (Korthikanti et al., arXiv:2205.05198, section 4.2.2): norms, dropout and residuals, which lie
outside of the tensor-parallel regions, are split along the sequence over the same t ranks.

What enters a region is gathered (the paper's g: all-gather forward, reduce-scatter backward), what leaves it is summed
and scattered (g-bar: reduce-scatter forward, all-gather backward). Without sequence parallelism these are the f and g
of arXiv:1909.08053, section 3: nothing on entering, an all-reduce on leaving. The products of `linear` call these
functions in their own forward and backward; `leave` is for what leaves a region without a product. Parameters that
every rank holds whole have seen only a part of the sequence, so their gradients are summed once a step.

Shapes: s sequence, b micro-batch, h hidden, t tensor-parallel size; the sequence is dimension 0.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from manta.workers.comm.backend import Handle
from manta.workers.comm.comm import Comm
from manta.workers.parallel.tensor.products import Products
from manta.workers.parallel.tensor.weight_gradients import WeightGradients


class Region:
    """A tensor-parallel region (arXiv:1909.08053, section 3): within it every rank has a part of a layer's width."""

    def __init__(self, comm: Comm, sequence_parallel: bool, products: Products, forward_chunks: int = 1):
        self.comm, self.sequence_parallel, self.products = comm, sequence_parallel, products
        self.weight_gradients = WeightGradients(products)
        self.tensor_size = comm.size("tensor")
        """Ranks that share each layer (t)."""
        self.sequence_split = self.tensor_size if sequence_parallel else 1
        """Ranks that the sequence is split over outside of the region."""
        self.forward_chunks = forward_chunks if self.tensor_size > 1 else 1
        """Number of chunks in which a forward product overlaps with its communication (`column_forward_in_chunks`)."""

    def within_a_rank(self) -> Region:
        """The region of layers that every rank has as a whole, and applies to the tokens that it has outside of the
        tensor-parallel region."""
        alone = copy.copy(self)
        alone.sequence_parallel, alone.tensor_size, alone.sequence_split, alone.forward_chunks = False, 1, 1, 1
        return alone


def gather(x: torch.Tensor, region: Region) -> torch.Tensor:
    """Gather the input of a region: [s/t, b, h] -> [s, b, h]; without sequence parallelism x itself."""
    return region.comm.all_gather("tensor", x.contiguous()) if region.sequence_parallel else x


def start_gather(x: torch.Tensor, region: Region) -> tuple[torch.Tensor, Handle | None]:
    """Begin to `gather`: (result, handle to wait for, or None if it is there)."""
    return region.comm.start_all_gather("tensor", x.contiguous()) if region.sequence_parallel else (x, None)


def start_sum(partial: torch.Tensor, region: Region) -> tuple[torch.Tensor, Handle | None]:
    """Begin to sum the ranks' partial results, at the end of a region or, for gradients, at its beginning: [s, b, h] ->
    [s/t, b, h] with sequence parallelism, otherwise in place: (result, handle to wait for, or None if it is there)."""
    if region.sequence_parallel:
        return region.comm.start_reduce_scatter("tensor", partial)
    return partial, region.comm.start_all_reduce("tensor", partial) if region.tensor_size > 1 else None


def sum_partial(partial: torch.Tensor, region: Region) -> torch.Tensor:
    """The sum of the ranks' partial results: [s, b, h] -> [s/t, b, h] with sequence parallelism, else in place."""
    total, summing = start_sum(partial, region)
    if summing is not None:
        summing.wait()
    return total


class _Leave(torch.autograd.Function):
    """g of arXiv:1909.08053, or g-bar of arXiv:2205.05198."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: Region) -> torch.Tensor:
        ctx.region = region
        x = x.contiguous()
        return sum_partial(x if region.sequence_parallel else x.clone(), region)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather(grads[0], ctx.region), None


def leave(x: torch.Tensor, region: Region) -> torch.Tensor:
    """Sum the ranks' partial results: [s, b, h] -> [s/t, b, h] with sequence parallelism, otherwise [s, b, h]. Backward
    passes the gradient to each rank."""
    if region.tensor_size == 1:
        return x
    left: torch.Tensor = _Leave.apply(x, region)
    return left


class _Enter(torch.autograd.Function):
    """f of arXiv:1909.08053, or g of arXiv:2205.05198."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: Region) -> torch.Tensor:
        ctx.region = region
        return gather(x, region) if region.sequence_parallel else x.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].contiguous()
        return sum_partial(grad if ctx.region.sequence_parallel else grad.clone(), ctx.region), None


def enter(x: torch.Tensor, region: Region) -> torch.Tensor:
    """Gather what no product gathers: [s/t, b, h] -> [s, b, h] with sequence parallelism, otherwise x. Backward sums
    the ranks' gradients."""
    entered: torch.Tensor = _Enter.apply(x, region)
    return entered


def sum_replicated_gradients(gradients: Sequence[torch.Tensor], comm: Comm) -> None:
    """Sum, in place and in one message, the gradients [n] of parameters that every tensor rank holds as a whole (norms,
    positions, biases of row-parallel products): each rank has seen only its part of the sequence, or of the heads."""
    if gradients:
        together = torch.cat(list(gradients))
        comm.all_reduce("tensor", together)
        for gradient, total in zip(gradients, together.split([len(each) for each in gradients]), strict=True):
            gradient.copy_(total)
