"""The matrix products of tensor parallelism (arXiv:1909.08053, section 3; arXiv:2205.05198, section 4.2.2), forward
and backward, with their communication started as early and awaited as late as the mathematics allows.

Shapes: s sequence, b micro-batch, i input width, o output width, t tensor-parallel size, n = s b tokens. With sequence
parallelism what enters a column-parallel product, and what leaves a row-parallel one, is [s/t, b, h].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from workers.comm.comm import Comm
from workers.parallel.tensor.weight_gradients import WeightGradients

Again = Callable[[], torch.Tensor]
"""Computes a product's input once more in backward, instead of keeping it."""

Weights = Sequence[nn.Parameter]
Biases = Sequence[nn.Parameter | None]


class Region:
    """What a parallel layer needs to know about its stage."""

    def __init__(self, comm: Comm, sequence_parallel: bool, weight_gradients: WeightGradients):
        self.comm, self.sequence_parallel, self.weight_gradients = comm, sequence_parallel, weight_gradients
        self.tensor_size = comm.size("tensor")
        """Ranks that share each layer (t)."""
        self.sequence_split = self.tensor_size if sequence_parallel else 1
        """Ranks over which the sequence is split outside of the parallel blocks."""


def column_forward(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], region: Region
) -> tuple[torch.Tensor, ...]:
    """x W^T + b for one or more W that are split over their rows; x is gathered once."""
    whole = region.comm.all_gather("tensor", x.contiguous()) if region.sequence_parallel else x
    return tuple([F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True)])


def column_backward(
    grads: Sequence[torch.Tensor],
    x: torch.Tensor,
    weights: Weights,
    biases: Biases,
    region: Region,
) -> torch.Tensor:
    """The gradient of x; those of weights and biases go to `region.weight_gradients`.

    Under sequence parallelism the gathered input was not kept: it is gathered again while the input's gradient is
    computed, whose reduction in turn runs while the weights' gradients are.
    """
    comm, store = region.comm, region.weight_gradients
    if region.tensor_size == 1 and len(weights) == 1:
        return _backward_alone(grads[0], x, weights[0], biases[0], store)
    grads_no = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
    gathering = None
    if region.sequence_parallel and not store.keeping:
        gathering = comm.start_all_gather("tensor", x.contiguous())
    grad_ni = grads_no[0] @ weights[0]
    for number in range(1, len(weights)):
        grad_ni.addmm_(grads_no[number], weights[number])
    grad_x = grad_ni.view(*grads[0].shape[:-1], -1)
    reducing = None
    if region.sequence_parallel:
        if gathering is not None:
            gathering[1].wait()
        grad_x, reducing = comm.start_reduce_scatter("tensor", grad_x)
    elif region.tensor_size > 1:
        reducing = comm.start_all_reduce("tensor", grad_x)

    def add_weight_gradients() -> None:
        whole = x
        if region.sequence_parallel:
            whole = gathering[0] if gathering is not None else comm.all_gather("tensor", x.contiguous())
        whole_ni = whole.reshape(-1, whole.shape[-1])
        for grad_no, weight, bias in zip(grads_no, weights, biases, strict=True):
            store.add_product(weight, grad_no, whole_ni)
            if bias is not None:
                store.add_sum(bias, grad_no)

    store.submit(add_weight_gradients)
    if reducing is not None:
        reducing.wait()
    return grad_x


def row_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    region: Region,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over ranks of x W^T, with W split over its columns, plus b and the residual once."""
    if region.tensor_size == 1:
        if residual is None:
            return F.linear(x, weight, bias)
        # The product is added to what is there: one pass over the result less.
        y = (residual.clone() if bias is None else residual + bias).contiguous()
        y.view(-1, y.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
        return y
    y = F.linear(x, weight)
    if region.sequence_parallel:
        y = region.comm.reduce_scatter("tensor", y)
    else:
        region.comm.all_reduce("tensor", y)
    if bias is not None:
        y.add_(bias)
    return y if residual is None else y.add_(residual)


def row_backward(
    local_grad: torch.Tensor,
    input_of: Callable[[], torch.Tensor],
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    region: Region,
) -> torch.Tensor:
    """The gradient of the input, which `input_of` gives (it may have to be computed again, beside the gathering of
    the gradient); those of weight and bias go to `region.weight_gradients`."""
    store, grad, gathering = region.weight_gradients, local_grad, None
    if region.tensor_size == 1:
        return _backward_alone(grad, input_of(), weight, bias, store)
    if region.sequence_parallel:
        grad, gathering = region.comm.start_all_gather("tensor", local_grad)
    x = input_of()
    if gathering is not None:
        gathering.wait()
    grad_no = grad.view(-1, weight.shape[0])
    grad_x = (grad_no @ weight).view(*grad.shape[:-1], weight.shape[1])

    def add_weight_gradient() -> None:
        store.add_product(weight, grad_no, x.reshape(-1, weight.shape[1]))
        if bias is not None:
            store.add_sum(bias, local_grad.view(-1, weight.shape[0]))

    store.submit(add_weight_gradient)
    return grad_x


def _backward_alone(
    grad: torch.Tensor, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, store: WeightGradients
) -> torch.Tensor:
    """The gradient of the input of a whole product, with nobody to talk to. A product of matrices leaves the caches
    without a trace of the interpreter, so as much as possible is done before the first one."""
    grad_no, x_ni = grad.reshape(-1, weight.shape[0]), x.reshape(-1, weight.shape[1])
    if bias is not None:
        store.submit(lambda: store.add_sum(bias, grad_no))
    grad_ni = grad_no @ weight
    store.submit(lambda: store.add_product(weight, grad_no, x_ni))
    return grad_ni.view(x.shape)


# Autograd does not see the parameters of these products, which are hidden in tuples: it would only pass on that they
# have no gradients. So there is a gradient only where x has one, and that it has in all layers.


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, region: Region, again: Again | None, weights: Weights, biases: Biases
    ) -> tuple[torch.Tensor, ...]:
        # Parameters stay attributes: within a recomputed layer, saved tensors come back as others.
        ctx.region, ctx.again, ctx.weights, ctx.biases = region, again, weights, biases
        ctx.save_for_backward(x if again is None else None)
        return column_forward(x, weights, biases, region)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        again, ctx.again = ctx.again, None  # it holds what nobody needs any more
        x = ctx.saved_tensors[0] if again is None else _recomputed(again, ctx.region.comm)
        grad_x = column_backward(grads, x, ctx.weights, ctx.biases, ctx.region)
        return grad_x, None, None, None, None


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        parameters: tuple[nn.Parameter, nn.Parameter | None],
        region: Region,
    ) -> torch.Tensor:
        ctx.region, ctx.parameters, ctx.added = region, parameters, residual is not None
        ctx.save_for_backward(x)
        return row_forward(x, *parameters, region, residual)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight, bias = ctx.parameters
        grad_x = row_backward(grads[0].contiguous(), lambda: x, weight, bias, ctx.region)
        return grad_x, grads[0] if ctx.added else None, None, None


class _GeluRowParallel(torch.autograd.Function):
    """GELU and the product after it, so that the activation's gradient takes the memory of the product's."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        parameters: tuple[nn.Parameter, nn.Parameter | None],
        region: Region,
        recompute: bool,
    ) -> torch.Tensor:
        ctx.region, ctx.parameters, ctx.added = region, parameters, residual is not None
        active = F.gelu(x)
        ctx.save_for_backward(x, None if recompute else active)
        return row_forward(active, *parameters, region, residual)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, active), (weight, bias), region = ctx.saved_tensors, ctx.parameters, ctx.region

        def input_of() -> torch.Tensor:
            return _recomputed(lambda: F.gelu(x), region.comm) if active is None else active

        grad_x = row_backward(grads[0].contiguous(), input_of, weight, bias, region)
        torch.ops.aten.gelu_backward.grad_input(grad_x, x, grad_input=grad_x)
        return grad_x, grads[0] if ctx.added else None, None, None, None


class _LookUp(torch.autograd.Function):
    """Rows of a table, whose gradient goes straight to the flat buffer."""

    @staticmethod
    def forward(ctx: Any, rows_sb: torch.Tensor, weight: nn.Parameter, store: WeightGradients) -> torch.Tensor:
        ctx.store, ctx.weight = store, weight
        ctx.save_for_backward(rows_sb)
        return F.embedding(rows_sb, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        (rows_sb,) = ctx.saved_tensors
        store, weight, grad = ctx.store, ctx.weight, grads[0]
        store.submit(lambda: store.add_rows(weight, rows_sb.reshape(-1), grad.reshape(-1, grad.shape[-1])))
        return None, None, None


def _recomputed(again: Again, comm: Comm) -> torch.Tensor:
    with comm.step.phase("recompute"), torch.no_grad():
        return again()


def column_parallel(
    x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, region: Region, again: Again | None = None
) -> torch.Tensor:
    """x W^T + b: [s or s/t, b, i] -> [s, b, o/t], W [o/t, i]. With `again`, x is not kept for backward."""
    return _ColumnParallel.apply(x, region, again, (weight,), (bias,))[0]


def column_parallel_pair(
    x: torch.Tensor,
    first: tuple[nn.Parameter, nn.Parameter | None],
    second: tuple[nn.Parameter, nn.Parameter | None],
    region: Region,
    again: Again | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two such products of the same x, given as (weight, bias), which is gathered and reduced once."""
    return _ColumnParallel.apply(x, region, again, *zip(first, second, strict=True))


def row_parallel(
    x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, region: Region, residual: torch.Tensor | None
) -> torch.Tensor:
    """The sum over ranks of x W^T, plus b and the residual once: [s, b, i/t] -> [s or s/t, b, o], W [o, i/t]."""
    return _RowParallel.apply(x, residual, (weight, bias), region)


def gelu_row_parallel(
    x: torch.Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    region: Region,
    residual: torch.Tensor | None,
    recompute: bool,
) -> torch.Tensor:
    """The same of gelu(x), exact by erf. With `recompute`, gelu(x) is not kept for backward, but x is."""
    return _GeluRowParallel.apply(x, residual, (weight, bias), region, recompute)


def look_up(rows_sb: torch.Tensor, weight: nn.Parameter, region: Region) -> torch.Tensor:
    """Rows [s, b] of weight [v, h] -> [s, b, h]."""
    return _LookUp.apply(rows_sb, weight, region.weight_gradients)
