"""How the layers of a rank attend across context ranks, by the job's method.

Shapes: S rows of a rank, b samples, a heads, g key-value heads, d head size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from manta.workers.comm.comm import Comm
from manta.workers.config import ParallelConfig
from manta.workers.data.batches import Documents
from manta.workers.parallel.context.by_heads import HeadExchange
from manta.workers.parallel.context.gathered import GatheredAttention, Gathering
from manta.workers.parallel.context.kernels import TileKernels, WeightDropout
from manta.workers.parallel.context.ring import Ring, RingAttention
from manta.workers.parallel.context.tiles import Tile
from manta.workers.spec.sequence_runs import MASKED_ROWS, runs_of

_KEPT_TILES = 64
"""Tilings kept: one for each window, and with documents one for each micro-batch under way."""


class ContextAttention:
    """Attention of a rank's part of the sequence to all of it."""

    def __init__(self, comm: Comm, layout: ParallelConfig, length: int):
        """`length`: tokens of a sample."""
        runs = [runs_of(layout, length, index) for index in range(layout.context)]
        self.by_heads = HeadExchange(comm, runs) if layout.context_method == "all_to_all" else None
        """Exchanges rows for heads, around the attention that one rank computes; None: `attend` does it all."""
        self._ring = Ring(comm, runs) if layout.context_method == "ring" else None
        self._gathering = Gathering(comm, runs)
        self._tilings: OrderedDict[tuple[Documents | None, int | None, int | None], list[list[Tile]]] = OrderedDict()

    def stay_out(self, disable: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Keep everything here out of compiled layers; `disable`: wraps a function accordingly."""
        self.attend = disable(self.attend)  # type: ignore[method-assign]
        if self.by_heads is not None:
            self.by_heads.to_heads = disable(self.by_heads.to_heads)  # type: ignore[method-assign]
            self.by_heads.to_rows = disable(self.by_heads.to_rows)  # type: ignore[method-assign]

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        documents: Documents | None,
        window: int | None,
        written_out: bool,
        dropout: WeightDropout | None,
    ) -> torch.Tensor:
        """[S, b, a, d] from q [S, b, a, d] and k, v [S, b, g, d]; `written_out`: not by fused kernels. Raises
        PeerLost."""
        kernels = TileKernels(written_out, dropout)
        rows = MASKED_ROWS if window is not None or kernels.write_out(q) else None
        tiling = self._tiling(documents, window, rows)
        if self._ring is not None:
            result: torch.Tensor = RingAttention.apply(q, k, v, self._ring, tiling, kernels)
        else:
            result = GatheredAttention.apply(q, k, v, self._gathering, tiling[0], kernels)
        return result

    def _tiling(self, documents: Documents | None, window: int | None, rows: int | None) -> list[list[Tile]]:
        """The tiles of each hop, or all at once if keys are gathered; made once for all layers."""
        key = (documents, window, rows)
        if key not in self._tilings:
            ring, gathering = self._ring, self._gathering
            self._tilings[key] = [gathering.tiles(*key)] if ring is None else ring.tiles(*key)
            if len(self._tilings) > _KEPT_TILES:
                self._tilings.popitem(last=False)
        return self._tilings[key]
