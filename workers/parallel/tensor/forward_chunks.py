"""Overlap of tensor-parallel communication with the product that depends on it, forward, in chunks (Wang et al., ASPLOS
2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models").

A product and its communication are cut along the sequence into c chunks: while one chunk is computed, the next one of
what enters the region is gathered, or the last one of what leaves it is summed. With sequence parallelism a chunk is
cut out of every rank's part. Gathered, its rows lie one rank's behind another's, apart from each other in the whole;
the products write to, or read from, their places there, so nothing is copied. Each element is the same product and the
same sum over ranks as without.

At most one communication is under way while one chunk is computed, so at most two chunks are there at once.

Shapes: s sequence, b micro-batch (all dimensions between rows and width), i input width, o output width, t
tensor-parallel size, n tokens of a chunk of one rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.comm.backend import DONE, Handle
from workers.parallel.tensor.region import Region
from workers.parallel.tensor.sequence_parallel import start_gather

Rows = tuple[int, int]
"""[first, end) of rows."""


def chunks_of(rows: int, count: int) -> list[Rows]:
    """`count` chunks whose numbers of rows differ by at most one; fewer if there are fewer rows."""
    count = max(1, min(rows, count))
    return [(rows * number // count, rows * (number + 1) // count) for number in range(count)]


def column_forward_in_chunks(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], region: Region
) -> tuple[torch.Tensor, ...]:
    """x W^T + b for each W, [s/t, b, i] -> [s, b, o/t], x gathered chunk by chunk."""
    x, ranks = x.contiguous(), region.tensor_size
    outputs = [x.new_empty((len(x) * ranks, *x.shape[1:-1], len(weight))) for weight in weights]
    chunks = chunks_of(len(x), region.forward_chunks)
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
    return tuple(outputs)


def _gathering(x: torch.Tensor, rows: Rows, region: Region) -> tuple[torch.Tensor, Handle]:
    gathered, gathering = start_gather(x[slice(*rows)], region)
    return gathered, gathering or DONE


def _of_each_rank(whole: torch.Tensor, rows: Rows, ranks: int) -> torch.Tensor:
    """The `rows` of every rank's part of the sequence: [s, b, o] -> [t, n, o], a view."""
    by_rank = whole.view(ranks, len(whole) // ranks, -1, whole.shape[-1])
    return by_rank[:, slice(*rows)].flatten(1, 2)


def row_sum_in_chunks(x: torch.Tensor, weight: torch.Tensor, region: Region) -> torch.Tensor:
    """The sum over ranks of x W^T, [s, b, i/t] -> [s or s/t, b, o]; each chunk is summed while the next one's product
    runs."""
    x, ranks = x.contiguous(), region.sequence_split
    total = x.new_empty((len(x) // ranks, *x.shape[1:-1], len(weight)))
    summing: Handle = DONE
    for rows in chunks_of(len(total), region.forward_chunks):
        chunk, width = total[slice(*rows)], len(weight)
        # Without sequence parallelism the sum is in place.
        partial = x.new_empty((ranks * len(chunk), *chunk.shape[1:])) if region.sequence_parallel else chunk
        region.products.output_into(partial.view(ranks, -1, width), _of_each_rank(x, rows, ranks), weight)
        summing.wait()  # some backends allow only one at a time
        if region.sequence_parallel:
            summing = region.comm.start_reduce_scatter("tensor", partial, chunk)[1]
        else:
            summing = region.comm.start_all_reduce("tensor", partial)
    summing.wait()
    return total
