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

from manta.workers.comm.backend import DONE, Handle
from manta.workers.parallel.recompute.modules import Recomputation, in_backward
from manta.workers.parallel.tensor.adapters import Adaptation
from manta.workers.parallel.tensor.products import Gelu
from manta.workers.parallel.tensor.sequence_parallel import Region, gather, start_gather, start_sum, sum_partial
from manta.workers.parallel.tensor.weight_gradients import WeightGradients

Weights = Sequence[nn.Parameter]
Biases = Sequence[nn.Parameter | None]


def column_forward(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    region: Region,
    adapted: Adaptation | None = None,
) -> tuple[torch.Tensor, ...]:
    """x W^T + b for one or more W that are split over their rows, plus what adapters add; x is gathered once."""
    if region.forward_chunks > 1 and region.sequence_parallel:
        return column_forward_in_chunks(x, weights, biases, region, adapted)
    full = gather(x, region)
    outputs = region.products.outputs(full, weights, biases)
    if adapted is not None:
        adapted.add_outputs(outputs, full)
    return outputs


def _trained(weights: Sequence[nn.Parameter | None]) -> bool:
    """Whether any of these is trained."""
    return any(weight is not None and weight.requires_grad for weight in weights)


def column_backward(
    grads: Sequence[torch.Tensor],
    x: torch.Tensor | None,
    weights: Weights,
    biases: Biases,
    region: Region,
    adapted: Adaptation | None = None,
) -> torch.Tensor:
    """The gradient of x; the gradients of trained weights, biases and adapters go to `region.weight_gradients`. x may
    be None if no weight is trained and there is no adapter.

    With sequence parallelism the gathered input was not kept: it is gathered again while the input's gradient is
    computed, and the reduction of that gradient runs while the weights' gradients are computed.
    """
    store = region.weight_gradients
    if region.tensor_size == 1 and len(weights) == 1 and adapted is None:
        return _backward_alone(grads[0], x, weights[0], biases[0], region)
    grads_no = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
    # The input of frozen weights is not needed. Deferred work must not refer to the graph, which would keep more.
    needed = x.detach() if x is not None and (_trained(weights) or adapted is not None) else None
    gathered = None if store.keeping or needed is None else start_gather(needed, region)
    grad_ni = region.products.input_gradient(grads_no, weights)
    inner_grads_nr = [] if adapted is None else adapted.add_input_gradient(grad_ni, grads_no)
    grad_x = grad_ni.view(*grads[0].shape[:-1], grad_ni.shape[-1])
    if gathered is not None and gathered[1] is not None:
        gathered[1].wait()
    grad_x, reducing = start_sum(grad_x, region)

    def add_weight_gradients() -> None:
        if needed is not None:
            full = gathered[0] if gathered is not None else gather(needed, region)
            trained = [each for each in zip(weights, grads_no, strict=True) if each[0].requires_grad]
            whole_ni = full.reshape(-1, full.shape[-1])
            if trained:
                store.add_products([weight for weight, _ in trained], [grad_no for _, grad_no in trained], whole_ni)
            if adapted is not None:
                adapted.add_weight_gradients(store, grads_no, inner_grads_nr, whole_ni)
        for grad_no, bias in zip(grads_no, biases, strict=True):
            if bias is not None and bias.requires_grad:
                store.add_sum(bias, grad_no)

    if needed is not None or _trained(biases):
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
    adapted: Adaptation | None = None,
) -> torch.Tensor:
    """The sum over ranks of x W^T, with W split over its columns, and of what adapters add to it, plus b and the
    residual once."""
    products = region.products
    if region.tensor_size == 1:
        y = products.output(x, weight, bias) if residual is None else products.output_added(x, weight, bias, residual)
        if adapted is not None:
            adapted.add_outputs([y], x)
        return y
    if region.forward_chunks > 1:
        y = row_sum_in_chunks(x, weight, region, adapted)
    else:
        partial = products.output(x, weight)
        if adapted is not None:
            adapted.add_outputs([partial], x)
        y = sum_partial(partial, region)
        del partial
    if bias is not None:
        y.add_(bias)
    return y if residual is None else y.add_(residual)


def row_backward(
    local_grad: torch.Tensor,
    input_of: Callable[[], torch.Tensor],
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    region: Region,
    adapted: Adaptation | None = None,
) -> torch.Tensor:
    """The gradient of the input. `input_of` returns the input if the weight is trained or has adapters (it may have to
    be recomputed, which overlaps with the gradient's gather). The gradients of weight and bias, if trained, and of
    adapters go to `region.weight_gradients`."""
    store = region.weight_gradients
    if region.tensor_size == 1 and adapted is None:
        return _backward_alone(local_grad, input_of() if weight.requires_grad else None, weight, bias, region)
    grad, gathering = start_gather(local_grad, region)
    x = input_of().detach() if weight.requires_grad or adapted is not None else None
    if gathering is not None:
        gathering.wait()
    grad_no = grad.view(-1, weight.shape[0])
    grad_ni = region.products.input_gradient([grad_no], [weight])
    inner_grads_nr = [] if adapted is None else adapted.add_input_gradient(grad_ni, [grad_no])

    def add_weight_gradient() -> None:
        x_ni = None if x is None else x.reshape(-1, weight.shape[1])
        if x_ni is not None and weight.requires_grad:
            store.add_product(weight, grad_no, x_ni)
        if x_ni is not None and adapted is not None:
            adapted.add_weight_gradients(store, [grad_no], inner_grads_nr, x_ni)
        if bias is not None and bias.requires_grad:
            store.add_sum(bias, local_grad.view(-1, weight.shape[0]))

    if _trained((weight, bias)) or adapted is not None:
        store.submit(add_weight_gradient)
    return grad_ni.view(*grad.shape[:-1], weight.shape[1])


def _backward_alone(
    grad: torch.Tensor, x: torch.Tensor | None, weight: nn.Parameter, bias: nn.Parameter | None, region: Region
) -> torch.Tensor:
    """The gradient of the input of a product that is not split, without communication. A matrix product evicts the
    interpreter from the caches, so as much as possible is done before the first one."""
    store, grad_no = region.weight_gradients, grad.reshape(-1, weight.shape[0])
    # Detached from the graph, which would keep the pass's input as long as this is deferred.
    x_ni = x.detach().reshape(-1, weight.shape[1]) if x is not None and weight.requires_grad else None
    if bias is not None and bias.requires_grad:
        store.submit(lambda: store.add_sum(bias, grad_no))
    grad_ni = region.products.input_gradient([grad_no], [weight])
    if x_ni is not None:
        store.submit(lambda: store.add_product(weight, grad_no, x_ni))
    return grad_ni.view(*grad.shape[:-1], weight.shape[1])


# Autograd does not see the parameters of these products, which are hidden in tuples: it would only pass on that they
# have no gradients. So there is a gradient only if x requires one, which it does in all layers.


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        region: Region,
        recompute_input: Recomputation | None,
        weights: Weights,
        biases: Biases,
        adapted: Adaptation | None,
    ) -> tuple[torch.Tensor, ...]:
        # Parameters stay attributes: within a recomputed layer, saved tensors are restored as different objects.
        ctx.region, ctx.recompute_input, ctx.weights, ctx.biases = region, recompute_input, weights, biases
        ctx.adapted, ctx.needs_input = adapted, adapted is not None or _trained(weights)
        ctx.save_for_backward(x if recompute_input is None and ctx.needs_input else None)
        return column_forward(x, weights, biases, region, adapted)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        recompute_input = ctx.recompute_input
        ctx.recompute_input = None  # it refers to memory that is not needed any more
        recomputes = recompute_input is not None and ctx.needs_input
        x = in_backward(recompute_input, ctx.region.comm) if recomputes else ctx.saved_tensors[0]
        grad_x = column_backward(grads, x, ctx.weights, ctx.biases, ctx.region, ctx.adapted)
        return grad_x, None, None, None, None, None


def _needs_input(parameters: tuple[nn.Parameter, nn.Parameter | None], adapted: Adaptation | None) -> bool:
    """Whether backward needs the input of a product."""
    return parameters[0].requires_grad or adapted is not None


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        parameters: tuple[nn.Parameter, nn.Parameter | None],
        region: Region,
        adapted: Adaptation | None,
    ) -> torch.Tensor:
        ctx.region, ctx.parameters, ctx.added, ctx.adapted = region, parameters, residual is not None, adapted
        ctx.save_for_backward(x if _needs_input(parameters, adapted) else None)
        return row_forward(x, *parameters, region, residual, adapted)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight, bias = ctx.parameters
        grad_x = row_backward(grads[0].contiguous(), lambda: x, weight, bias, ctx.region, ctx.adapted)
        return grad_x, grads[0] if ctx.added else None, None, None, None


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
        kind: Gelu,
        adapted: Adaptation | None,
    ) -> torch.Tensor:
        ctx.region, ctx.parameters, ctx.added, ctx.kind = region, parameters, residual is not None, kind
        ctx.adapted = adapted
        active = region.products.gelu(x, kind)
        ctx.save_for_backward(x, active if _needs_input(parameters, adapted) and not recompute else None)
        return row_forward(active, *parameters, region, residual, adapted)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, active), (weight, bias), region = ctx.saved_tensors, ctx.parameters, ctx.region
        kind = ctx.kind

        def input_of() -> torch.Tensor:
            return in_backward(lambda: region.products.gelu(x, kind), region.comm) if active is None else active

        grad_x = row_backward(grads[0].contiguous(), input_of, weight, bias, region, ctx.adapted)
        grad_x = region.products.gelu_gradient(grad_x, x, kind)
        return grad_x, grads[0] if ctx.added else None, None, None, None, None, None


class _GatedRowParallel(torch.autograd.Function):
    """SwiGLU and the product after it, in the same way."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: torch.Tensor,
        up: torch.Tensor,
        residual: torch.Tensor | None,
        parameters: tuple[nn.Parameter, nn.Parameter | None],
        region: Region,
        recompute: bool,
        adapted: Adaptation | None,
    ) -> torch.Tensor:
        ctx.region, ctx.parameters, ctx.added, ctx.adapted = region, parameters, residual is not None, adapted
        active = region.products.swiglu(gate, up)
        ctx.save_for_backward(gate, up, active if _needs_input(parameters, adapted) and not recompute else None)
        return row_forward(active, *parameters, region, residual, adapted)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gate, up, active), (weight, bias), region = ctx.saved_tensors, ctx.parameters, ctx.region

        def input_of() -> torch.Tensor:
            return in_backward(lambda: region.products.swiglu(gate, up), region.comm) if active is None else active

        grad_active = row_backward(grads[0].contiguous(), input_of, weight, bias, region, ctx.adapted)
        grad_gate, grad_up = region.products.swiglu_gradients(grad_active, gate, up)
        return grad_gate, grad_up, grads[0] if ctx.added else None, None, None, None, None


class _EmbeddingLookup(torch.autograd.Function):
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


def column_parallel(
    x: torch.Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    region: Region,
    recompute_input: Recomputation | None = None,
    adapted: Adaptation | None = None,
) -> torch.Tensor:
    """x W^T + b: [s or s/t, b, i] -> [s, b, o/t], W [o/t, i]. With `recompute_input`, x is not kept for backward."""
    return _ColumnParallel.apply(x, region, recompute_input, (weight,), (bias,), adapted)[0]


def column_parallel_pair(
    x: torch.Tensor,
    first: tuple[nn.Parameter, nn.Parameter | None],
    second: tuple[nn.Parameter, nn.Parameter | None],
    region: Region,
    recompute_input: Recomputation | None = None,
    adapted: Adaptation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two such products of the same x, given as (weight, bias), which is gathered and reduced once."""
    return _ColumnParallel.apply(x, region, recompute_input, *zip(first, second, strict=True), adapted)


def row_parallel(
    x: torch.Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    region: Region,
    residual: torch.Tensor | None,
    adapted: Adaptation | None = None,
) -> torch.Tensor:
    """The sum over ranks of x W^T, plus b and the residual once: [s, b, i/t] -> [s or s/t, b, o], W [o, i/t]."""
    return _RowParallel.apply(x, residual, (weight, bias), region, adapted)


def gelu_row_parallel(
    x: torch.Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    region: Region,
    residual: torch.Tensor | None,
    recompute: bool,
    kind: Gelu = "gelu",
    adapted: Adaptation | None = None,
) -> torch.Tensor:
    """The sum over ranks of gelu(x) W^T, with gelu of that kind, plus b and the residual once:
    [s, b, i/t] -> [s or s/t, b, o], W [o, i/t]. With `recompute`, gelu(x) is not kept for backward, but x is."""
    return _GeluRowParallel.apply(x, residual, (weight, bias), region, recompute, kind, adapted)


def gated_row_parallel(
    gate: torch.Tensor,
    up: torch.Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    region: Region,
    residual: torch.Tensor | None,
    recompute: bool,
    adapted: Adaptation | None = None,
) -> torch.Tensor:
    """The sum over ranks of (silu(gate) up) W^T, plus b and the residual once: [s, b, i/t] each -> [s or s/t, b, o],
    W [o, i/t]. With `recompute` only gate and up are kept for backward."""
    return _GatedRowParallel.apply(gate, up, residual, (weight, bias), region, recompute, adapted)


def embedding_lookup(rows_sb: torch.Tensor, weight: nn.Parameter, region: Region) -> torch.Tensor:
    """Rows [s, b] of weight [v, h] -> [s, b, h]."""
    return _EmbeddingLookup.apply(rows_sb, weight, region.weight_gradients)


_Rows = tuple[int, int]
"""[first, end) of rows."""


def chunks_of(rows: int, count: int) -> list[_Rows]:
    """`count` chunks whose numbers of rows differ by at most one; fewer if there are fewer rows."""
    count = max(1, min(rows, count))
    return [(rows * number // count, rows * (number + 1) // count) for number in range(count)]


# Overlap of communication with the product that depends on it, forward, in chunks (Wang et al., ASPLOS 2023, "Overlap
# Communication with Dependent Computation via Decomposition in Large Deep Learning Models"). A product and its
# communication are cut along the sequence into c chunks: while one chunk is computed, the next one of what enters the
# region is gathered, or the last one of what leaves it is summed; so at most two chunks are there at once. With
# sequence parallelism a chunk is cut out of every rank's part. Gathered, its rows lie one rank's behind another's,
# apart from each other in the whole; the products write to, or read from, their places there, so nothing is copied.
# Each element is the same product and the same sum over ranks as without.


def column_forward_in_chunks(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    region: Region,
    adapted: Adaptation | None = None,
) -> tuple[torch.Tensor, ...]:
    """x W^T + b for each W, plus what adapters add, [s/t, b, i] -> [s, b, o/t], x gathered chunk by chunk."""
    x, ranks = x.contiguous(), region.tensor_size
    outputs = [x.new_empty((len(x) * ranks, *x.shape[1:-1], len(weight))) for weight in weights]
    chunks, keys = chunks_of(len(x), region.forward_chunks), None if adapted is None else adapted.row_keys()
    ahead = _gathering(x, chunks[0], region)
    for number, rows in enumerate(chunks):
        gathered, gathering = ahead
        gathering.wait()
        if number + 1 < len(chunks):
            ahead = _gathering(x, chunks[number + 1], region)
        for output, weight, bias in zip(outputs, weights, biases, strict=True):
            # No name for its view, which would keep the chunk alive while the next but one is gathered.
            chunk_tno = _of_each_rank(output, rows, ranks)
            region.products.output_into(chunk_tno, gathered.view(ranks, -1, x.shape[-1]), weight, bias)
        if adapted is not None:
            of_rows = None if keys is None else _of_each_rank(keys.unsqueeze(-1), rows, ranks)
            inner_nr = adapted.inner(gathered.view(-1, x.shape[-1]), of_rows)
            _add_to_chunk(adapted, outputs, inner_nr, rows, ranks)
    return tuple(outputs)


def _add_to_chunk(
    adapted: Adaptation, ys: Sequence[torch.Tensor], inner_nr: Sequence[torch.Tensor], rows: _Rows, ranks: int
) -> None:
    """Add what adapters make of `inner_nr`, of the tokens of a chunk, to these tokens' rows of the results."""
    by_rank = zip(*(_of_each_rank(y, rows, ranks) for y in ys), strict=True)
    for number, ys_no in enumerate(by_rank):
        adapted.add(ys_no, [each.chunk(ranks)[number] for each in inner_nr])


def _gathering(x: torch.Tensor, rows: _Rows, region: Region) -> tuple[torch.Tensor, Handle]:
    gathered, gathering = start_gather(x[slice(*rows)], region)
    return gathered, gathering or DONE


def _of_each_rank(full: torch.Tensor, rows: _Rows, ranks: int) -> torch.Tensor:
    """The `rows` of every rank's part of the sequence: [s, b, o] -> [t, n, o], a view; n: tokens of a chunk of one
    rank's part."""
    by_rank = full.view(ranks, len(full) // ranks, -1, full.shape[-1])
    return by_rank[:, slice(*rows)].flatten(1, 2)


def row_sum_in_chunks(
    x: torch.Tensor, weight: torch.Tensor, region: Region, adapted: Adaptation | None = None
) -> torch.Tensor:
    """The sum over ranks of x W^T and of what adapters add, [s, b, i/t] -> [s or s/t, b, o], each chunk during the next
    one's product."""
    x, ranks = x.contiguous(), region.sequence_split
    total = x.new_empty((len(x) // ranks, *x.shape[1:-1], len(weight)))
    summing: Handle = DONE
    inner_nr = [] if adapted is None else adapted.inner(x.view(-1, x.shape[-1]), adapted.row_keys())
    for rows in chunks_of(len(total), region.forward_chunks):
        chunk, width = total[slice(*rows)], len(weight)
        # Without sequence parallelism the sum is in place.
        partial = x.new_empty((ranks * len(chunk), *chunk.shape[1:])) if region.sequence_parallel else chunk
        region.products.output_into(partial.view(ranks, -1, width), _of_each_rank(x, rows, ranks), weight)
        if adapted is not None:
            inner = [each.view(*x.shape[:-1], each.shape[-1]) for each in inner_nr]
            of_rows = [_of_each_rank(each, rows, ranks).flatten(0, 1) for each in inner]
            adapted.add([partial.view(-1, width)], of_rows)
        summing.wait()  # some backends allow only one at a time
        if region.sequence_parallel:
            summing = region.comm.start_reduce_scatter("tensor", partial, chunk)[1]
        else:
            summing = region.comm.start_all_reduce("tensor", partial)
    summing.wait()
    return total
