"""Which part of each sample's sequence a context-parallel rank has, and how attention to the others is cut. Pure
Python."""

from __future__ import annotations

from manta.workers.config import ParallelConfig

Run = tuple[int, int]
"""Consecutive positions: the first of them, and one past the last."""

MASKED_ROWS = 1024
"""Most queries of a tile with a mask or with scores that are written out, so that these are not large."""
LARGEST_FUSED_HEAD = 256
"""Largest head of a GPU's flash attention, in elements."""


def runs_per_rank(layout: ParallelConfig) -> int:
    """Number of runs that the part of a context rank consists of."""
    return 2 if layout.context > 1 and layout.context_order != "contiguous" else 1


def runs_of(layout: ParallelConfig, length: int, index: int) -> tuple[Run, ...]:
    """Positions of context rank `index` in sequences of `length` tokens, in their order.

    The sequence is cut into equal runs. With two for each of c ranks (zigzag) rank i has the i-th from the beginning
    and the i-th from the end: under a causal mask the earlier one has as much less to attend to as the later one has
    more.
    """
    if runs_per_rank(layout) == 1:
        size = length // layout.context
        return ((index * size, (index + 1) * size),)
    size, last = length // (2 * layout.context), 2 * layout.context - 1 - index
    return (index * size, (index + 1) * size), (last * size, (last + 1) * size)


def shortest_unit(layout: ParallelConfig) -> int:
    """The sequence must be a multiple of this, so that all runs, and with sequence parallelism all tensor ranks' parts
    of them, are equally long."""
    tensor = layout.tensor if layout.sequence_parallel_on else 1
    return runs_per_rank(layout) * layout.context * tensor
