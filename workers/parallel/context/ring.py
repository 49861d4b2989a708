"""Context parallelism around a ring (arXiv:2310.01889): keys and values travel from rank to rank, each hop beside the
attention to those that arrived with the one before; in backward they travel once more, and their gradients with them.

A rank's own tiles come first, then those of the rank before it, and so on: the order of all sums follows from the
layout, never from what arrives when. Shapes: S rows of a rank, b samples, a heads, g key-value heads, d head size.
"""

from __future__ import annotations

from typing import Any

import torch

from manta.workers.comm.backend import Handle
from manta.workers.comm.comm import Comm
from manta.workers.data.batches import Documents
from manta.workers.parallel.context.kernels import TileKernels
from manta.workers.parallel.context.merging import Backward, Merged
from manta.workers.parallel.context.tiles import Tile, segments, tiles
from manta.workers.spec.sequence_runs import Run


class Ring:
    """This rank's place in the ring."""

    def __init__(self, comm: Comm, runs: list[tuple[Run, ...]]):
        """`runs`: of each context rank."""
        self._comm, self.size, self._index = comm, len(runs), comm.index("context")
        self._segments = [segments(each) for each in runs]

    def tiles(self, documents: Documents | None, window: int | None, rows: int | None) -> list[list[Tile]]:
        """Tiles of this rank's queries with the keys that are here after each number of hops, its own first."""
        own = self._segments[self._index]
        sources = [self._segments[(self._index - hops) % self.size] for hops in range(self.size)]
        return [list(tiles(own, keys, documents, window, rows)) for keys in sources]

    def start_hop(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Handle]:
        """Begin to send a contiguous tensor to the next rank: (what arrives from the rank before, handle)."""
        arriving = torch.empty_like(tensor)
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        incoming: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        outgoing[(self._index + 1) % self.size] = [tensor]
        incoming[(self._index - 1) % self.size] = [arriving]
        return arriving, self._comm.start_all_to_all("context", outgoing, incoming)


class RingAttention(torch.autograd.Function):
    """Attention of a rank's queries to the keys and values of all ranks. Kept for backward: q, k and v of this rank,
    the output, and the log-sums."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ring: Ring,
        of: list[list[Tile]],
        kernels: TileKernels,
    ) -> torch.Tensor:
        """[S, b, a, d] from q [S, b, a, d] and k, v [S, b, g, d]."""
        merged, here = Merged(q.permute(1, 2, 0, 3), kernels), torch.stack((k, v))
        for hops, some in enumerate(of):
            following = ring.start_hop(here) if hops + 1 < ring.size else None
            merged.add(some, *_keys_and_values(here))
            if following is not None:
                here = _arrived(*following)
        out, log_sums = merged.results()
        ctx.ring, ctx.of, ctx.kernels = ring, of, kernels
        ctx.save_for_backward(q, k, v, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, log_sums = ctx.saved_tensors
        ring: Ring = ctx.ring
        here, coming = torch.stack((k, v)), None
        grad, q, out = (x.permute(1, 2, 0, 3) for x in (grads[0].contiguous(), q, out))
        backward = Backward(grad, q, out, log_sums, ctx.kernels)
        for hops, some in enumerate(ctx.of):
            following = ring.start_hop(here) if hops + 1 < ring.size else None
            own = torch.zeros_like(here, dtype=log_sums.dtype)
            backward.add(some, *_keys_and_values(here), *_keys_and_values(own))
            # The sum of the ranks before arrives during this rank's own part. What is sent stays until it is taken.
            sent = own if coming is None else _arrived(*coming).add_(own)
            coming = ring.start_hop(sent)
            if following is not None:
                here = _arrived(*following)
        assert coming is not None
        grad_k, grad_v = _arrived(*coming).to(k.dtype)
        return backward.grad_q(), grad_k, grad_v, None, None, None


def _arrived(tensor: torch.Tensor, work: Handle) -> torch.Tensor:
    work.wait()
    return tensor


def _keys_and_values(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v [b, g, S, d], from both [2, S, b, g, d]."""
    k, v = kv.permute(0, 2, 3, 1, 4)
    return k, v
