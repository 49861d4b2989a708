"""Attention of one rank's queries as the sum over tiles, forward and backward, in the order in which they are added.

Shapes: S rows of the rank, b samples, a heads, g key-value heads, d head size. Tensors of queries are [b, a, S, d] in
the memory order of [S, b, a, d].
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from manta.workers.parallel.context.kernels import TileKernels
from manta.workers.parallel.context.tiles import Tile


class Merged:
    """Results of tiles, merged by the log-sums of their softmax, in at least fp32."""

    def __init__(self, q: torch.Tensor, kernels: TileKernels):
        self._q, self._kernels = q, kernels
        wide = torch.promote_types(q.dtype, torch.float32)
        b, a, length, d = q.shape
        self._out = q.new_zeros(length, b, a, d, dtype=wide).permute(1, 2, 0, 3)
        self._log_sums = q.new_full((b, a, length), float("-inf"), dtype=wide)

    def add(self, tiles: Iterable[Tile], k: torch.Tensor, v: torch.Tensor) -> None:
        """Add attention to the tiles' keys, rows of k and v [b, g, rows, d]."""
        for tile in tiles:
            at, keys = (tile.samples, slice(None), tile.queries), (tile.samples, slice(None), tile.keys)
            part, part_log_sums = self._kernels.attend(self._q[at], k[keys], v[keys], tile)
            before = self._log_sums[at]
            total = torch.logaddexp(before, part_log_sums)
            out = self._out[at].mul_((before - total).exp_().unsqueeze(-1))
            out.addcmul_(part.to(out.dtype), (part_log_sums - total).exp_().unsqueeze(-1))
            before.copy_(total)

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(output [S, b, a, d] in the queries' precision, log-sums [b, a, S])."""
        return self._out.permute(2, 0, 1, 3).to(self._q.dtype), self._log_sums


class Backward:
    """Gradients of tiles, added up in at least fp32."""

    def __init__(
        self, grad: torch.Tensor, q: torch.Tensor, out: torch.Tensor, log_sums: torch.Tensor, kernels: TileKernels
    ):
        """`grad` and `out` [b, a, S, d] and `log_sums` [b, a, S]: of all keys."""
        self._given, self._kernels = (grad, q, out, log_sums), kernels
        wide = torch.promote_types(q.dtype, torch.float32)
        self._grad_q = torch.zeros_like(q.permute(2, 0, 1, 3), dtype=wide, memory_format=torch.contiguous_format)

    def add(
        self, tiles: Iterable[Tile], k: torch.Tensor, v: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor
    ) -> None:
        """Add the gradients of attention to the tiles' keys; those of the keys and values to `grad_k` and `grad_v`,
        shaped like k and v."""
        grad, q, out, log_sums = self._given
        for tile in tiles:
            at, keys = (tile.samples, slice(None), tile.queries), (tile.samples, slice(None), tile.keys)
            parts = self._kernels.gradients(grad[at], q[at], k[keys], v[keys], out[at], log_sums[at], tile)
            for total, part in zip(
                (self._grad_q.permute(1, 2, 0, 3)[at], grad_k[keys], grad_v[keys]), parts, strict=True
            ):
                total.add_(part)

    def grad_q(self) -> torch.Tensor:
        """[S, b, a, d], in the queries' precision."""
        return self._grad_q.to(self._given[1].dtype)
