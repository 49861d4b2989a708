"""Core attention, softmax(q k^T / sqrt(d)) v under a causal mask, possibly with a sliding window: by torch's fused
kernels, or written out.

Shapes: s sequence, b micro-batch, a heads of this rank, g key-value heads, d head size; n = b g.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from manta.workers.comm.comm import Comm
from manta.workers.data.batches import Documents
from manta.workers.parallel.recompute.modules import checkpointed, in_backward
from manta.workers.parallel.tensor.dropout import derived_keys, kept
from manta.workers.system import gpu


class Visible:
    """Which tokens each token attends to: itself and all before it, or with a window only the nearest of these."""

    def __init__(self, window: int | None):
        """`window`: number of tokens, itself included; None: all."""
        self.window = window
        self._bands: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    def band(self, length: int, like: torch.Tensor) -> torch.Tensor | None:
        """[s, s], zero where a row's token attends to a column's, otherwise -inf; None if no window applies. All layers
        share it: from a bool mask, kernels would make one like this for each layer, and keep it for backward."""
        if self.window is None or length <= self.window:
            return None
        key = (length, like.dtype, like.device)
        if key not in self._bands:
            band = torch.zeros(length, length, dtype=like.dtype, device=like.device)
            self._bands[key] = band.masked_fill_(self.hidden(length, like.device), float("-inf"))
        return self._bands[key]

    def bands(self) -> list[torch.Tensor]:
        """The masks made so far."""
        return list(self._bands.values())

    def hidden(self, length: int, device: torch.device) -> torch.Tensor:
        """bool [s, s], true where a row's token does not attend to a column's, without regard to documents."""
        later = torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)
        return later if self.window is None else later.logical_or_(torch.ones_like(later).tril_(-self.window))


def fused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Visible,
    documents: Documents | None,
    batch_first: bool,
    recompute: bool,
    comm: Comm,
) -> torch.Tensor:
    """[s, b, a, d], or [b, s, a, d] with `batch_first`, from q of this shape and from k and v that may have fewer heads
    (g divides a), by scaled_dot_product_attention.

    Its kernels keep no s x s tensor for backward, and the next product keeps their result anyway, so recomputation
    would only save the log-sums of the softmax: one fp32 number per token and head.
    """
    if documents is not None:
        return _within_documents(q, k, v, visible, documents, batch_first, recompute, comm)
    order, back = ((0, 2, 1, 3), (0, 2, 1, 3)) if batch_first else ((1, 2, 0, 3), (2, 0, 1, 3))
    q, k, v = q.permute(order), k.permute(order), v.permute(order)
    grouped, band = q.shape[1] != k.shape[1], visible.band(q.shape[2], q)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _attend(q, k, v, band, band is None, grouped)

    context = checkpointed(comm, attend, q, k, v) if recompute else attend(q, k, v)
    return context.permute(back)


def _within_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Visible,
    documents: Documents,
    batch_first: bool,
    recompute: bool,
    comm: Comm,
) -> torch.Tensor:
    """Like `fused_attention`, but within documents: the tokens of all samples form one row, which is split at the
    beginnings of documents."""
    shape = q.shape if batch_first else (q.shape[1], q.shape[0], *q.shape[2:])
    q, k, v = ((x if batch_first else x.transpose(0, 1)).reshape(-1, *x.shape[2:]) for x in (q, k, v))
    grouped, band = q.shape[1] != k.shape[1], visible.band(documents.length, q)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = zip(*(x.transpose(0, 1).split(documents.lengths, 1) for x in (q, k, v)), strict=True)
        return torch.cat([attend_one(*(x.unsqueeze(0) for x in part)) for part in parts])

    def attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        count = q.shape[2]
        mask = None if band is None or count <= (visible.window or count) else band[:count, :count]
        return _attend(q, k, v, mask, mask is None, grouped)[0].transpose(0, 1)

    context = (checkpointed(comm, attend, q, k, v) if recompute else attend(q, k, v)).view(shape)
    return context if batch_first else context.transpose(0, 1)


def attention_of_nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[s, b, a, d] of a micro-batch without samples, which kernels do not compute; backward goes through it."""
    return q.new_zeros(*q.shape[:-1], v.shape[-1]) + (q.sum() + k.sum() + v.sum())


def cached_attention(
    q_bsad: torch.Tensor, k_btgd: torch.Tensor, v_btgd: torch.Tensor, visible: Visible
) -> torch.Tensor:
    """[b, s, a, d], attention of the last s of t tokens. No gradients."""
    count, length = q_bsad.shape[1], k_btgd.shape[1]
    first = 0 if visible.window is None else max(0, length - count + 1 - visible.window)  # no token looks further back
    q, k, v = (x.transpose(1, 2) for x in (q_bsad, k_btgd[:, first:], v_btgd[:, first:]))
    mask = None
    if count > 1:
        mask = ~visible.hidden(length, q.device)[-count:, first:]
    return _attend(q, k, v, mask, False, q.shape[1] != k.shape[1]).transpose(1, 2)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, grouped: bool
) -> torch.Tensor:
    """scaled_dot_product_attention [b, a, s, d]. Raises ModelError if no fused kernel of a GPU supports it."""
    if grouped and q.is_cuda and (mask is not None or q.dtype == torch.float32):
        # The only kernel for masks, and for fp32, needs as many heads of keys as of queries.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        grouped = False
    try:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)
    except RuntimeError as error:
        raise gpu.named(error) from error


def explicit_attention(
    q_sbad: torch.Tensor,
    k_sbgd: torch.Tensor,
    v_sbgd: torch.Tensor,
    visible: Visible,
    documents: Documents | None,
    recompute: bool,
    rate: float,
    head_keys_ba: torch.Tensor | None,
    comm: Comm,
) -> torch.Tensor:
    """[s, b, a, d] by batched matrix products, with dropout of the weights at `rate` keyed by (sample, head).

    Kept for backward: q, k, v, and without `recompute` the softmax, the mask and the weights after dropout, s x s a
    head each (arXiv:2205.05198, section 4.1: 5 a s^2 b bytes in 16 bits).
    """
    s, b, a, d = q_sbad.shape
    n = b * k_sbgd.shape[2]
    # All queries of the heads that share keys and values are rows of one product: [n, a/g s, d] with [n, s, d].
    q = q_sbad.reshape(s, n, -1, d).permute(1, 2, 0, 3).reshape(n, -1, d)
    k, v = (x.reshape(s, n, d).transpose(0, 1) for x in (k_sbgd, v_sbgd))
    keys_n = head_keys_ba.reshape(-1) if head_keys_ba is not None else None
    context = _ExplicitAttention.apply(q, k, v, (visible, documents), rate, keys_n, recompute, comm)
    return context.view(b, a, s, d).permute(2, 0, 1, 3)


class _ExplicitAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sees: tuple[Visible, Documents | None],
        rate: float,
        keys_n: torch.Tensor | None,
        recompute: bool,
        comm: Comm,
    ) -> torch.Tensor:
        softmax, mask, weights = _attention_weights(q, k, sees, rate, keys_n)
        ctx.sees, ctx.rate, ctx.recompute, ctx.comm = sees, rate, recompute, comm
        if recompute:
            ctx.save_for_backward(q, k, v, keys_n, None, None, None)
        else:
            ctx.save_for_backward(q, k, v, keys_n, softmax, mask, weights)
        return torch.bmm(weights.view(*q.shape[:2], -1), v)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, keys_n, softmax, mask, weights = ctx.saved_tensors
        if ctx.recompute:
            inputs = (q, k, ctx.sees, ctx.rate, keys_n)
            softmax, mask, weights = in_backward(lambda: _attention_weights(*inputs), ctx.comm)
        rows = (*q.shape[:2], k.shape[1])
        grad_v = torch.bmm(weights.view(rows).transpose(1, 2), grads[0])
        grad = torch.bmm(grads[0], v.transpose(1, 2)).view_as(softmax)
        if mask is not None:
            grad.mul_(mask).mul_(1.0 / (1.0 - ctx.rate))
        grad_scores = torch._softmax_backward_data(grad, softmax, -1, softmax.dtype).view(rows)
        scale = 1.0 / math.sqrt(q.shape[-1])
        grad_q = _scaled_product(grad_scores, k, scale)
        grad_k = _scaled_product(grad_scores.transpose(1, 2), q, scale)
        return grad_q, grad_k, grad_v, None, None, None, None, None


def _scaled_product(left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.baddbmm(left.new_empty(1, 1, 1), left, right, beta=0.0, alpha=scale)


def _attention_weights(
    q: torch.Tensor, k: torch.Tensor, sees: tuple[Visible, Documents | None], rate: float, keys_n: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(softmax, mask of dropout, softmax after dropout), [b a, s, s] each; without dropout the last is the first."""
    s = k.shape[1]
    scores = _scaled_product(q, k.transpose(1, 2), 1.0 / math.sqrt(q.shape[-1])).view(-1, s, s)
    (visible, documents), minus_infinity = sees, float("-inf")
    scores.masked_fill_(visible.hidden(s, q.device), minus_infinity)
    if documents is not None:
        earlier_bss = torch.arange(s) < documents.first_tokens().unsqueeze(-1)
        by_sample = scores.view(len(earlier_bss), -1, s, s)
        by_sample.masked_fill_(earlier_bss.unsqueeze(1).to(q.device), minus_infinity)
    softmax = torch.softmax(scores, -1)
    del scores  # the mask needs this memory
    if keys_n is None:
        return softmax, None, softmax
    positions = torch.arange(s, dtype=torch.int32, device=q.device)
    mask = kept(derived_keys(keys_n.unsqueeze(-1), positions), s, rate)
    return softmax, mask, (softmax * mask).mul_(1.0 / (1.0 - rate))
