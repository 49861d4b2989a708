"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all heads are made from
a short vector of each token, and so may be queries. A part of each head's query and key is rotated by positions; that
of the key is made from the layer's input, and is the same for all heads.

Weights that make the short vectors are whole on every tensor rank, which computes those of its own tokens; they are
gathered like the input of other layers. Core attention has heads of one width for queries, keys and values: zeros are
appended to what is narrower (decision 0067).

Shapes: s sequence, b micro-batch, h hidden, a heads, t tensor-parallel size; of a head n elements are not rotated and p
are, u are its value's; d = max(n + p, u).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from manta.workers.model.attention import HeadsAttention
from manta.workers.model.rotary import Rotary, turn_halves
from manta.workers.model.shared import INIT_STD, Shared, residual_std
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.recompute.modules import Recomputation, shared_recomputation
from manta.workers.parallel.tensor import compiled_operators
from manta.workers.parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    WholeLinear,
    paired_forward,
)
from manta.workers.parallel.tensor.rms_norm import RMSNorm
from manta.workers.parallel.tensor.sequence_parallel import enter

LATENT_EPSILON = 1e-6
"""Of the norms of short vectors, whatever that of other norms is, as in DeepSeek's code."""


class HeadParts(NamedTuple):
    """Widths of a head's parts, and the factor on queries."""

    nope: int
    rope: int
    value: int
    size: int
    """Width in core attention (d)."""
    factor: float
    """Makes up for core attention, which divides scores by sqrt(d)."""


class LatentAttention(HeadsAttention):
    """Attention with short vectors. Rows of the queries' projection are ordered (head, not rotated/rotated), those of
    keys and values (head, not rotated key/value)."""

    def __init__(self, shared: Shared, layer: int, rotary: Rotary):
        super().__init__(shared, layer)
        model, region = shared.spec.model, shared.region
        latent, h = model.latent_attention, model.hidden_size
        assert latent is not None
        own = latent.nope_size + latent.rope_size
        factor = model.score_factor * math.sqrt(model.head_size / own)
        self.parts = HeadParts(latent.nope_size, latent.rope_size, latent.value_size, model.head_size, factor)
        self.rotary, self.kv_rank = rotary, latent.kv_rank
        self.q_down: WholeLinear | None = None
        self.q_norm: RMSNorm | None = None
        if latent.q_rank is not None:
            self.q_down = WholeLinear(h, latent.q_rank, region, model.bias, INIT_STD)
            self.q_norm = RMSNorm(latent.q_rank, LATENT_EPSILON)
        self.q_up = ColumnParallelLinear(latent.q_rank or h, model.heads * own, region, model.bias, INIT_STD)
        self.kv_down = WholeLinear(h, latent.kv_rank + latent.rope_size, region, model.bias, INIT_STD)
        self.kv_norm = RMSNorm(latent.kv_rank, LATENT_EPSILON)
        width = latent.nope_size + latent.value_size
        self.kv_up = ColumnParallelLinear(latent.kv_rank, model.heads * width, region, model.bias, INIT_STD)
        self.output = RowParallelLinear(model.attention_width, h, region, model.bias, residual_std(model))

    def _projections(
        self, x: torch.Tensor, recompute_norm: Recomputation | None, run: ForwardPass
    ) -> tuple[torch.Tensor, ...]:
        """q, k and v [s, b, a/t, d]; if x is [b, s, h], these are [b, s, ...]."""
        if self.q_down is None or self.q_norm is None:
            recompute_norm = shared_recomputation(recompute_norm) if recompute_norm is not None else None
            q, short = self.q_up(x, recompute_norm), self.kv_down(x, recompute_norm)
        else:
            q_short, short = paired_forward(x, self.q_down, self.kv_down, recompute_norm)
            q = self.q_up(self.q_norm(q_short))
        kv_short, rotated = short.split([self.kv_rank, self.parts.rope], -1)
        kv = self.kv_up(self.kv_norm(kv_short))
        rotated = self._entered(rotated)
        length = run.positions.length
        shape = (1, length, 1, -1) if run.batch_first else (length, 1, 1, -1)
        cos, sin = (table.view(shape) for table in self.rotary.tables(q, run.positions))
        if torch.compiler.is_compiling():
            return _copied_heads(q, kv, rotated, cos, sin, self.parts)
        heads: tuple[torch.Tensor, ...] = _Heads.apply(q, kv, rotated, cos, sin, self.parts)
        return heads

    def _entered(self, rotated: torch.Tensor) -> torch.Tensor:
        """The rotated part of the keys, [s or s/t, b, p], for all tokens."""
        region = self.region
        if region.tensor_size == 1:
            return rotated
        if torch.compiler.is_compiling():
            return compiled_operators.entered(rotated, self.kv_up.weight, region.sequence_split)
        return enter(rotated, region)


class _Heads(torch.autograd.Function):
    """q, k and v from the results of products, in place as far as queries are wide enough; autograd is not informed
    of that, as in `rotary.py`. Backward needs nothing that forward computed."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        kv: torch.Tensor,
        rotated: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        parts: HeadParts,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.cos, ctx.sin, ctx.parts = cos, sin, parts
        own = parts.nope + parts.rope
        q = _padded(q.unflatten(2, (-1, own)), parts.size)
        if parts.factor != 1.0:
            q.mul_(parts.factor)
        turn_halves(*_halves(q[..., parts.nope : own]), cos, sin)
        turned = rotated.unsqueeze(2).clone(memory_format=torch.contiguous_format)
        turn_halves(*_halves(turned), cos, sin)
        kv = kv.unflatten(2, (-1, parts.nope + parts.value))
        k, v = q.new_empty(q.shape), q.new_empty(q.shape)
        k[..., : parts.nope].copy_(kv[..., : parts.nope])
        k[..., parts.nope : own].copy_(turned)
        k[..., own:].zero_()
        v[..., : parts.value].copy_(kv[..., parts.nope :])
        v[..., parts.value :].zero_()
        return q.view(q.shape), k, v

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin, parts = ctx.cos, ctx.sin, ctx.parts
        own, (grad_q, grad_k, grad_v) = parts.nope + parts.rope, grads
        grad_q = grad_q[..., :own].clone(memory_format=torch.contiguous_format)
        turn_halves(*_halves(grad_q[..., parts.nope :]), cos, -sin)
        if parts.factor != 1.0:
            grad_q.mul_(parts.factor)
        turned = grad_k[..., parts.nope : own].sum(2, keepdim=True)
        turn_halves(*_halves(turned), cos, -sin)
        grad_kv = torch.cat([grad_k[..., : parts.nope], grad_v[..., : parts.value]], -1)
        return grad_q.flatten(2), grad_kv.flatten(2), turned.squeeze(2), None, None, None


def _padded(x: torch.Tensor, size: int) -> torch.Tensor:
    """With zeros appended to the last dimension, in a tensor of its own unless it has that size."""
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _copied_heads(
    q: torch.Tensor, kv: torch.Tensor, rotated: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, parts: HeadParts
) -> tuple[torch.Tensor, ...]:
    """What `_Heads` computes, without changing anything in place, which compilers prefer."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = _halves(x)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    q = q.unflatten(2, (-1, parts.nope + parts.rope)) * parts.factor
    kv = kv.unflatten(2, (-1, parts.nope + parts.value))
    q = torch.cat([q[..., : parts.nope], turned(q[..., parts.nope :])], -1)
    shared = turned(rotated.unsqueeze(2)).expand(-1, -1, q.shape[2], -1)
    k = torch.cat([kv[..., : parts.nope], shared], -1)
    return tuple(_padded(x, parts.size) for x in (q, k, kv[..., parts.nope :]))
