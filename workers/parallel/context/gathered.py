"""Context parallelism by gathering: each layer gathers the keys and values of the whole sequence, in forward and again
in backward, where the gradients are summed over the ranks and scattered to the owners.

Shapes: s sequence, S rows of a rank, b samples, a heads, g key-value heads, d head size.
"""

from __future__ import annotations

from typing import Any

import torch

from manta.workers.comm.comm import Comm
from manta.workers.data.batches import Documents
from manta.workers.parallel.context.kernels import TileKernels
from manta.workers.parallel.context.merging import Backward, Merged
from manta.workers.parallel.context.tiles import Segment, Tile, segments, tiles
from manta.workers.spec.sequence_runs import Run


class Gathering:
    """Gathers keys and values in the order of the sequence."""

    def __init__(self, comm: Comm, runs: list[tuple[Run, ...]]):
        """`runs`: of each context rank."""
        self._comm, self.own = comm, segments(runs[comm.index("context")])
        self._all = segments(run for each in runs for run in each)
        """Runs of all ranks, at their rows among all ranks' rows."""
        self._in_sequence = sorted(self._all, key=lambda segment: segment.first)

    def gather(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[s, b, 2, g, d]: keys and values of the whole sequence, from this rank's [S, b, g, d]."""
        rows = self._comm.all_gather("context", torch.stack((k, v), 2))
        if self._in_sequence == self._all:
            return rows
        return torch.cat([rows[each.rows(each.first, each.end)] for each in self._in_sequence])

    def scatter(self, grad: torch.Tensor) -> torch.Tensor:
        """[S, b, 2, g, d]: the sum over ranks of gradients [s, b, 2, g, d] of what was gathered."""
        if self._in_sequence != self._all:
            grad = torch.cat([grad[each.first : each.end] for each in self._all])
        return self._comm.reduce_scatter("context", grad)

    def tiles(self, documents: Documents | None, window: int | None, rows: int | None) -> list[Tile]:
        """Tiles of this rank's queries: each run with all keys before it, and with itself."""
        found: list[Tile] = []
        for run in self.own:
            keys = [Segment(0, run.first, 0), Segment(run.first, run.end, run.first)]
            found += tiles([run], keys, documents, window, rows)
        return found


class GatheredAttention(torch.autograd.Function):
    """Attention of a rank's queries to the keys and values of all ranks. Kept for backward: q, k and v of this rank,
    the output, and the log-sums."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        gathering: Gathering,
        of: list[Tile],
        kernels: TileKernels,
    ) -> torch.Tensor:
        """[S, b, a, d] from q [S, b, a, d] and k, v [S, b, g, d]."""
        merged = Merged(q.permute(1, 2, 0, 3), kernels)
        merged.add(of, *_keys_and_values(gathering.gather(k, v)))
        out, log_sums = merged.results()
        ctx.gathering, ctx.of, ctx.kernels = gathering, of, kernels
        ctx.save_for_backward(q, k, v, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, log_sums = ctx.saved_tensors
        all_kv = ctx.gathering.gather(k, v)
        grad_kv = torch.zeros_like(all_kv, dtype=log_sums.dtype)
        grad, q, out = (x.permute(1, 2, 0, 3) for x in (grads[0].contiguous(), q, out))
        backward = Backward(grad, q, out, log_sums, ctx.kernels)
        backward.add(ctx.of, *_keys_and_values(all_kv), *_keys_and_values(grad_kv))
        grad_k, grad_v = ctx.gathering.scatter(grad_kv).to(k.dtype).unbind(2)
        return backward.grad_q(), grad_k, grad_v, None, None, None


def _keys_and_values(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v, [b, g, s, d] each."""
    k, v = kv.permute(2, 1, 3, 0, 4)
    return k, v
