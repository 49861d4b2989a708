"""Context parallelism by heads (DeepSpeed-Ulysses, arXiv:2309.14509): around attention each rank exchanges its part of
the sequence, of all heads, for the whole sequence of its part of the heads, in which attention is that of one rank.

Shapes: s sequence, S rows of a rank, b samples, c context ranks, n heads of a rank's tensor-parallel part (queries, or
keys and values), d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from manta.workers.comm.comm import Comm
from manta.workers.parallel.context.tiles import segments
from manta.workers.spec.sequence_runs import Run


class HeadExchange:
    """Exchanges parts of the sequence for parts of the heads, and back."""

    def __init__(self, comm: Comm, runs: list[tuple[Run, ...]]):
        """`runs`: of each context rank."""
        self._comm, self._size, self.index = comm, len(runs), comm.index("context")
        self._segments = [segments(each) for each in runs]

    def to_heads(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[s, b, n/c, d] from each [S, b, n, d]."""
        exchanged: tuple[torch.Tensor, ...] = _ToHeads.apply(self, *tensors)
        return exchanged

    def to_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """[S, b, n, d] from [s, b, n/c, d]."""
        rows: torch.Tensor = _ToRows.apply(self, tensor)
        return rows

    def _of_heads(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        cut = zip(*(tensor.chunk(self._size, 2) for tensor in tensors), strict=True)
        outgoing = [[part.contiguous() for part in parts] for parts in cut]
        incoming = [[torch.empty_like(part) for part in outgoing[self.index]] for _ in range(self._size)]
        incoming[self.index] = outgoing[self.index]
        self._comm.start_all_to_all("context", outgoing, incoming).wait()
        return tuple(self._in_sequence(parts) for parts in zip(*incoming, strict=True))

    def _in_sequence(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """One tensor in the order of the sequence, from those of all ranks."""
        runs = [
            (each.first, part[each.rows(each.first, each.end)])
            for part, own in zip(parts, self._segments, strict=True)
            for each in own
        ]
        return torch.cat([rows for _, rows in sorted(runs, key=lambda run: run[0])])

    def _of_rows(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        outgoing = [
            [torch.cat([tensor[each.first : each.end] for each in own]) for tensor in tensors] for own in self._segments
        ]
        incoming = [[torch.empty_like(part) for part in outgoing[self.index]] for _ in range(self._size)]
        incoming[self.index] = outgoing[self.index]
        self._comm.start_all_to_all("context", outgoing, incoming).wait()
        return tuple(torch.cat(parts, 2) for parts in zip(*incoming, strict=True))


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        return exchange._of_heads(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.exchange._of_rows(grads)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, tensor: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        (rows,) = exchange._of_rows((tensor,))
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.exchange._of_heads(grads)
