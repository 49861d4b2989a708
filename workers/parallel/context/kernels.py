"""Attention of one tile, forward and backward, by a fused kernel where one computes what is needed, else written out.

Backward takes the output and the log-sums of all keys of a query, not those of the tile: then the tiles' gradients add
up to that of the whole (arXiv:2205.14135, appendix B.2). Results are at least fp32 where they are written out; fused
kernels return outputs and gradients in the inputs' precision.

Shapes: b samples, a heads, g key-value heads (g divides a), n queries, m keys, d head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from manta.workers.parallel.context.tiles import Tile
from manta.workers.parallel.tensor.dropout import derived_keys, kept
from manta.workers.spec.sequence_runs import LARGEST_FUSED_HEAD


@dataclass(frozen=True)
class WeightDropout:
    """Dropout of attention weights, keyed by (sample, head), row and column."""

    rate: float
    keys_ba: torch.Tensor
    """int32 [b, a]."""

    def mask(self, tile: Tile, queries: int, keys: int) -> torch.Tensor:
        """bool [b, a, n, m], true where a weight is kept."""
        first = tile.first_query
        rows = torch.arange(first, first + queries, dtype=torch.int32, device=self.keys_ba.device)
        row_keys = derived_keys(self.keys_ba[tile.samples].unsqueeze(-1), rows)
        return kept(row_keys, keys, self.rate, tile.first_key)


class TileKernels:
    """Attention of tiles in one precision."""

    def __init__(self, written_out: bool, dropout: WeightDropout | None):
        """`written_out`: even where a fused kernel could compute; always with `dropout`."""
        self._dropout, self._written_out = dropout, written_out or dropout is not None

    def write_out(self, q: torch.Tensor, tile: Tile | None = None) -> bool:
        """Whether attention of q to the keys of `tile` (of any without a mask) is written out: so it is where no fused
        kernel supports it. Those of GPUs have no masks, 16 bits, and heads up to `LARGEST_FUSED_HEAD`."""
        if self._written_out or not q.is_cuda:
            return self._written_out
        is_masked, d = tile is not None and tile.window is not None, q.shape[-1]
        return is_masked or q.element_size() > 2 or d % 8 > 0 or d > LARGEST_FUSED_HEAD

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output [b, a, n, d], log-sums of the scores' exponentials [b, a, n]) of q [b, a, n, d] and k, v
        [b, g, m, d]."""
        if not self.write_out(q, tile):
            if q.is_cuda:
                results = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, tile.causal)
                return results[0], results[1]
            causal = tile.causal and tile.window is None
            out, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=_band(tile, q, k)
            )
            return out, log_sums
        scores = _scores(q, k, tile)
        log_sums = torch.logsumexp(scores, -1)
        weights = scores.sub_(log_sums.unsqueeze(-1)).exp_()
        if self._dropout is not None:
            weights.mul_(self._dropout.mask(tile, *scores.shape[2:])).mul_(1.0 / (1.0 - self._dropout.rate))
        out = _by_group(weights, k) @ v.to(weights.dtype)
        return out.view(q.shape), log_sums

    def gradients(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        log_sums: torch.Tensor,
        tile: Tile,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tile's parts of the gradients of q, k and v; `grad`, `out` [b, a, n, d] and `log_sums` [b, a, n] belong
        to all keys of the queries."""
        if not self.write_out(q, tile):
            if q.is_cuda:
                return _flash_gradients(grad, q, k, v, out, log_sums, tile)
            causal = tile.causal and tile.window is None
            grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, log_sums, 0.0, causal, attn_mask=_band(tile, q, k)
            )
            return grad_q, grad_k, grad_v
        weights = _scores(q, k, tile).sub_(log_sums.unsqueeze(-1)).exp_()
        wide, grad = weights.dtype, grad.to(weights.dtype)
        per_group = (k.shape[0], k.shape[1], -1)
        grad_weights = (grad.reshape(*per_group, q.shape[3]) @ v.to(wide).transpose(2, 3)).view(weights.shape)
        dropped = weights
        if self._dropout is not None:
            mask, scale = self._dropout.mask(tile, *weights.shape[2:]), 1.0 / (1.0 - self._dropout.rate)
            dropped = (weights * mask).mul_(scale)
            grad_weights.mul_(mask).mul_(scale)
        grad_v = _by_group(dropped, k).transpose(2, 3) @ grad.reshape(*per_group, q.shape[3])
        means = (grad * out.to(wide)).sum(-1, keepdim=True)
        grad_scores = _by_group(grad_weights.sub_(means).mul_(weights), k).mul_(1.0 / math.sqrt(q.shape[-1]))
        grad_q = (grad_scores @ k.to(wide)).view(q.shape)
        grad_k = grad_scores.transpose(2, 3) @ q.to(wide).reshape(*per_group, q.shape[3])
        return grad_q, grad_k, grad_v


def _flash_gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    tile: Tile,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`TileKernels.gradients` by the kernel of GPUs."""
    no_generator = torch.empty(2, dtype=torch.uint64, device=q.device)  # there is no dropout
    lengths = None, None, q.shape[2], k.shape[2]  # the first two: of samples of different lengths, which there are none
    grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *(grad, q, k, v, out, log_sums.contiguous(), *lengths, 0.0, tile.causal, no_generator, no_generator[:1])
    )
    return grad_q, grad_k, grad_v


def _by_group(weights: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[b, a, n, m] -> [b, g, a/g n, m]: queries of the heads that share keys and values are rows of one product."""
    return weights.view(k.shape[0], k.shape[1], -1, k.shape[2])


def _scores(q: torch.Tensor, k: torch.Tensor, tile: Tile) -> torch.Tensor:
    """q k^T / sqrt(d), -inf where a query does not see a key, at least fp32 [b, a, n, m]."""
    rows = q.reshape(k.shape[0], k.shape[1], -1, q.shape[3])
    scores = (rows @ k.transpose(2, 3)).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores.view(*q.shape[:3], k.shape[2]).mul_(1.0 / math.sqrt(q.shape[-1]))
    if tile.causal or tile.window is not None:
        scores.masked_fill_(_hidden(tile, q, k), float("-inf"))
    return scores


def _band(tile: Tile, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """[n, m], zero where a query sees a key, otherwise -inf; None if no window hides any."""
    if tile.window is None:
        return None
    return q.new_zeros(q.shape[2], k.shape[2]).masked_fill_(_hidden(tile, q, k), float("-inf"))


def _hidden(tile: Tile, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """bool [n, m], true where a query does not see a key."""
    queries = torch.arange(tile.first_query, tile.first_query + q.shape[2], device=q.device)
    distance = queries.unsqueeze(1) - torch.arange(tile.first_key, tile.first_key + k.shape[2], device=q.device)
    later = distance < 0
    return later if tile.window is None else later.logical_or_(distance >= tile.window)
