"""Causal self-attention of all families; heads are split over the tensor group.

Shapes: s sequence, b micro-batch, h hidden, a heads, g key-value heads, d head size, t tensor-parallel size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from manta.workers.model.core_attention import (
    attention_of_nothing,
    cached_attention,
    explicit_attention,
    fused_attention,
)
from manta.workers.model.rotary import Rotary
from manta.workers.model.shared import INIT_STD, Shared, first_dropout, residual_std
from manta.workers.parallel.context.kernels import WeightDropout
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.recompute.modules import Recomputation
from manta.workers.parallel.tensor.dropout import derived_keys
from manta.workers.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, paired_forward


class HeadsAttention(nn.Module, ABC):
    """softmax(q k^T / sqrt(d)) v of heads that a subclass projects, and the product after it."""

    output: RowParallelLinear

    def __init__(self, shared: Shared, layer: int):
        super().__init__()
        spec, region = shared.spec, shared.region
        model, t = spec.model, region.tensor_size
        self.region, self.visible, self.place = region, shared.visible(layer), first_dropout(layer)
        self.layer, self.across = layer, shared.across
        self.rate, self.explicit = model.dropout, spec.attention_is_explicit
        self.heads, self.head_size, self.value_size = model.heads // t, model.head_size, model.value_size
        self.key_value_heads = max(1, model.key_value_heads // t)

    @abstractmethod
    def _projections(
        self, x: torch.Tensor, recompute_norm: Recomputation | None, run: ForwardPass
    ) -> tuple[torch.Tensor, ...]:
        """q [s, b, a/t, d], k and v [s, b, g/t, d]; if x is [b, s, h], these are [b, s, ...]."""

    def forward(
        self, x: torch.Tensor, run: ForwardPass, recompute_norm: Recomputation | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """[s or s/t, b, h] -> the same, added to the residual if one is given."""
        q, k, v = self._projections(x, recompute_norm, run)
        if not q.numel():
            context = attention_of_nothing(q, k, v)
        elif run.cache is not None:
            context = cached_attention(q, *run.cache.extended(self.layer, k, v), self.visible)
        elif self.across is None:
            context = self._attended(q, k, v, run)
        elif (exchange := self.across.by_heads) is not None:
            q, k, v = exchange.to_heads(q, k, v)
            context = exchange.to_rows(self._attended(q, k, v, run, exchange.index * q.shape[2]))
        else:
            keys_ba = self._dropout_keys(run, q)
            dropout = None if keys_ba is None else WeightDropout(self.rate, keys_ba)
            context = self.across.attend(q, k, v, run.documents, self.visible.window, self.explicit, dropout)
        if self.value_size < self.head_size:  # the rest are zeros, like that of the values
            context = context[..., : self.value_size]
        y: torch.Tensor = self.output(context.flatten(2), residual, dropout=run.adapter_dropout)
        return y

    def _attended(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: ForwardPass, first_head: int = 0
    ) -> torch.Tensor:
        """Attention within the whole sequence, of the rank's heads from number `first_head` on."""
        recompute = run.recompute.core_attention
        if self.explicit:
            return self._explicit(q, k, v, run, recompute, first_head)
        return fused_attention(q, k, v, self.visible, run.documents, run.batch_first, recompute, self.region.comm)

    def _explicit(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: ForwardPass, recompute: bool, first_head: int
    ) -> torch.Tensor:
        if run.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        keys_ba = self._dropout_keys(run, q, first_head)
        context = explicit_attention(
            q, k, v, self.visible, run.documents, recompute, self.rate, keys_ba, self.region.comm
        )
        return context.transpose(0, 1) if run.batch_first else context

    def _dropout_keys(self, run: ForwardPass, q: torch.Tensor, first_head: int = 0) -> torch.Tensor | None:
        """Keys of the weights' dropout, int32 [b, heads of q], if there is any; q are the rank's heads from number
        `first_head` on."""
        if self.rate == 0.0 or run.keys_b is None:
            return None
        first = self.region.comm.index("tensor") * self.heads + first_head
        heads = torch.arange(first, first + q.shape[2], dtype=torch.int32, device=q.device)
        return derived_keys(derived_keys(run.keys_b, self.place).unsqueeze(1), heads)


class Attention(HeadsAttention):
    """softmax(q k^T / sqrt(d)) v, with a product before it and another one after it.

    Rows of the fused projection are ordered (head, q/k/v, d), so that any contiguous split holds whole heads. With
    fewer key-value heads there are two projections, with rows (head, d) and (key-value head, k/v, d).
    """

    def __init__(
        self,
        shared: Shared,
        layer: int,
        rotary: Rotary | None = None,
        head_norms: tuple[nn.Module, nn.Module] | None = None,
    ):
        """`rotary` rotates queries and keys; `head_norms` first normalize them, each head by itself."""
        super().__init__(shared, layer)
        model, region = shared.spec.model, shared.region
        h, d = model.hidden_size, model.head_size
        self.rotary, self.fused = rotary, model.key_value_heads == model.heads
        if self.fused:
            self.qkv = ColumnParallelLinear(h, 3 * model.attention_width, region, model.bias, INIT_STD)
        else:
            units = model.key_value_heads
            self.q = ColumnParallelLinear(h, model.attention_width, region, model.bias, INIT_STD)
            self.kv = ColumnParallelLinear(h, 2 * units * d, region, model.bias, INIT_STD, units)
        self.output = RowParallelLinear(model.attention_width, h, region, model.bias, residual_std(model))
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if head_norms is not None:
            self.q_norm, self.k_norm = head_norms

    def _projections(
        self, x: torch.Tensor, recompute_norm: Recomputation | None, run: ForwardPass
    ) -> tuple[torch.Tensor, ...]:
        """q [s, b, a/t, d], k and v [s, b, g/t, d]; if x is [b, s, h], these are [b, s, ...]."""
        rotary = self.rotary if self.q_norm is None else None  # with norms of heads, the rotation follows them
        if self.fused:
            qkv = self.qkv(x, recompute_norm, run.adapter_dropout)
            if rotary is not None:
                qkv = rotary(qkv, self.head_size, 3, 2, run)
            q, k, v = qkv.view(*qkv.shape[:2], self.heads, 3, self.head_size).unbind(3)
        else:
            q, kv = paired_forward(x, self.q, self.kv, recompute_norm, run.adapter_dropout)
            if rotary is not None:
                q = rotary(q, self.head_size, 1, 1, run)
                kv = rotary(kv, self.head_size, 2, 1, run)
            q = q.view(*q.shape[:2], self.heads, self.head_size)
            k, v = kv.view(*kv.shape[:2], self.key_value_heads, 2, self.head_size).unbind(3)
        if self.q_norm is None or self.k_norm is None:
            return q, k, v
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q = self.rotary(q, self.head_size, 1, 1, run)
            k = self.rotary(k, self.head_size, 1, 1, run)
        return q, k, v
