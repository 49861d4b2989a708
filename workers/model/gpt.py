"""GPT: pre-norm transformer decoder with learned positions (Radford et al. 2019), one rank's part of it.

Shapes: s sequence, b micro-batch, h hidden, a heads, g key-value heads, d head size, t tensor-parallel size. With
sequence parallelism the residual stream between the parallel blocks is [s/t, b, h].
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from workers.config import JobSpec, ModelConfig
from workers.model.core_attention import explicit_attention, fused_attention
from workers.parallel.pipeline.forward_pass import ForwardPass
from workers.parallel.pipeline.stages import stage_layers
from workers.parallel.recompute.modules import Again, again, checkpointed
from workers.parallel.tensor.dropout import derived_keys, dropout
from workers.parallel.tensor.layers import (
    ColumnParallelLinear,
    LayerNorm,
    PositionEmbedding,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    VocabularyParallelOutput,
)
from workers.parallel.tensor.linear_autograd import column_parallel_pair
from workers.parallel.tensor.region import Region
from workers.parallel.tensor.sequence_parallel import first_position

INIT_STD = 0.02


# Places in the model at which dropout happens; keys of different places are independent.
EMBEDDING_PLACE = 0
PLACES_A_LAYER = 3


class Dropout:
    """Dropout of the residual stream at one place in the model."""

    def __init__(self, rate: float, place: int, region: Region):
        self.rate, self.place, self.region = rate, place, region

    def __call__(self, x: torch.Tensor, keys_b: torch.Tensor) -> torch.Tensor:
        """[s or s/t, b, h] -> the same, for samples with these keys."""
        return dropout(x, derived_keys(keys_b, self.place), self.rate, first_position(self.region, x.shape[0]))


class Attention(nn.Module):
    """Causal self-attention; heads are split over the tensor group.

    Rows of the fused projection are ordered (head, q/k/v, d), so that any contiguous split holds whole heads. With
    fewer key-value heads there are two projections, of rows (head, d) and (key-value head, k/v, d).
    """

    def __init__(self, spec: JobSpec, region: Region, place: int):
        super().__init__()
        model, t = spec.model, region.tensor_size
        h, d = model.hidden_size, model.head_size
        self.region, self.place, self.rate = region, place, model.dropout
        self.explicit = spec.attention_is_explicit
        self.heads, self.head_size = model.heads // t, d
        self.key_value_heads = max(1, model.key_value_heads // t)
        self.fused = model.key_value_heads == model.heads
        if self.fused:
            self.qkv = ColumnParallelLinear(h, 3 * h, region, model.bias, INIT_STD)
        else:
            units = model.key_value_heads
            self.q = ColumnParallelLinear(h, h, region, model.bias, INIT_STD)
            self.kv = ColumnParallelLinear(h, 2 * units * d, region, model.bias, INIT_STD, units)
        self.output = RowParallelLinear(h, h, region, model.bias, residual_std(model))

    def forward(
        self, x: torch.Tensor, run: ForwardPass, norm_again: Again | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """[s or s/t, b, h] -> the same, added to the residual where it is given."""
        q, k, v = self._projections(x, norm_again)
        recompute = run.recompute.core_attention
        if self.explicit:
            context = self._explicit(q, k, v, run, recompute)
        else:
            context = fused_attention(q, k, v, run.batch_first, recompute, self.region.comm)
        return self.output(context.flatten(2), residual)

    def _projections(self, x: torch.Tensor, norm_again: Again | None) -> tuple[torch.Tensor, ...]:
        """q [s, b, a/t, d], k and v [s, b, g/t, d]; [b, s, ...] where x is [b, s, h]."""
        if self.fused:
            qkv = self.qkv(x, norm_again)
            return qkv.view(*qkv.shape[:2], self.heads, 3, self.head_size).unbind(3)
        if torch.compiler.is_compiling():
            q, kv = self.q(x), self.kv(x)
        else:
            first, second = (self.q.weight, self.q.bias), (self.kv.weight, self.kv.bias)
            q, kv = column_parallel_pair(x, first, second, self.region, norm_again)
        k, v = kv.view(*kv.shape[:2], self.key_value_heads, 2, self.head_size).unbind(3)
        return q.view(*q.shape[:2], self.heads, self.head_size), k, v

    def _explicit(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: ForwardPass, recompute: bool
    ) -> torch.Tensor:
        if run.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        keys_ba = None
        if self.rate > 0.0 and run.keys_b is not None:
            first = self.region.comm.index("tensor") * self.heads
            heads = torch.arange(first, first + self.heads, dtype=torch.int32, device=q.device)
            keys_ba = derived_keys(derived_keys(run.keys_b, self.place).unsqueeze(1), heads)
        context = explicit_attention(q, k, v, recompute, self.rate, keys_ba, self.region.comm)
        return context.transpose(0, 1) if run.batch_first else context


class MLP(nn.Module):
    """Two linear layers with GELU between them (exact, by erf)."""

    def __init__(self, model: ModelConfig, region: Region):
        super().__init__()
        h, f = model.hidden_size, model.ffn_size
        self.up = ColumnParallelLinear(h, f, region, model.bias, INIT_STD)
        self.down = RowParallelLinear(f, h, region, model.bias, residual_std(model), gelu=True)

    def forward(
        self, x: torch.Tensor, run: ForwardPass, norm_again: Again | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """[s or s/t, b, h] -> the same, added to the residual where it is given."""
        return self.down(self.up(x, norm_again), residual, run.recompute.mlp_activation)


class Layer(nn.Module):
    """One transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: JobSpec, region: Region, index: int):
        super().__init__()
        model, place = spec.model, 1 + index * PLACES_A_LAYER
        self.attention_norm = LayerNorm(model.hidden_size, model.bias)
        self.attention = Attention(spec, region, place)
        self.attention_dropout = Dropout(model.dropout, place + 1, region)
        self.mlp_norm = LayerNorm(model.hidden_size, model.bias)
        self.mlp = MLP(model, region)
        self.mlp_dropout = Dropout(model.dropout, place + 2, region)

    def forward(self, x: torch.Tensor, run: ForwardPass) -> torch.Tensor:
        """[s or s/t, b, h] -> the same."""
        # Dropout lies between a block and the residual; without it the block's last product adds the residual itself.
        residual = x if run.keys_b is None else None
        y = self.attention(self.attention_norm(x), run, self._norm_again(self.attention_norm, x, run), residual)
        x = y if run.keys_b is None else x + self.attention_dropout(y, run.keys_b)
        residual = x if run.keys_b is None else None
        y = self.mlp(self.mlp_norm(x), run, self._norm_again(self.mlp_norm, x, run), residual)
        return y if run.keys_b is None else x + self.mlp_dropout(y, run.keys_b)

    @staticmethod
    def _norm_again(norm: LayerNorm, x: torch.Tensor, run: ForwardPass) -> Again | None:
        return again(norm, x) if run.recompute.norm else None


class Embedding(nn.Module):
    """Token plus position embedding."""

    def __init__(self, spec: JobSpec, region: Region):
        super().__init__()
        model = spec.model
        self.token = VocabularyParallelEmbedding(spec.vocabulary_size, model.hidden_size, region, INIT_STD)
        self.position = PositionEmbedding(model.sequence_length, model.hidden_size, region, INIT_STD)
        self.dropout = Dropout(model.dropout, EMBEDDING_PLACE, region)

    def forward(self, tokens_sb: torch.Tensor, run: ForwardPass) -> torch.Tensor:
        """Tokens [s, b] -> [s or s/t, b, h]."""
        x = self.position(self.token(tokens_sb), run.batch_first)
        return x if run.keys_b is None else self.dropout(x, run.keys_b)


class GPTChunk(nn.Module):
    """One virtual stage: the embedding in the first, the final norm and the output layer in the last."""

    def __init__(self, spec: JobSpec, region: Region, index: int, count: int):
        """Virtual stage `index` of `count`, in model order."""
        super().__init__()
        model = spec.model
        self.region, self.index = region, index
        self.is_first, self.is_last = index == 0, index == count - 1
        self.sequence_is_whole = count == 1 and region.tensor_size == 1  # so nobody else sees the order of its tokens
        self.embedding = Embedding(spec, region) if self.is_first else None
        self.layers = nn.ModuleDict({str(i): Layer(spec, region, i) for i in stage_layers(model.layers, count, index)})
        self.final_norm = LayerNorm(model.hidden_size, model.bias) if self.is_last else None
        self.output: VocabularyParallelOutput | None = None
        if self.is_last:
            self.output = VocabularyParallelOutput(model.hidden_size, spec.vocabulary_size, region, INIT_STD)

    def forward(self, x: torch.Tensor, run: ForwardPass) -> torch.Tensor:
        """Tokens [s, b] in the first virtual stage, else [s or s/t, b, h]; logits [s, b, v/t] in the last one, perhaps
        a view of [b, s, v], else [s or s/t, b, h]."""
        if self.sequence_is_whole and run.keys_b is None:
            run = replace(run, batch_first=True)
            x = x.t().contiguous()
        if self.embedding is not None:
            x = self.embedding(x, run)
        for name, layer in self.layers.items():
            whole = run.recompute.whole_layer(int(name))
            x = checkpointed(self.region.comm, layer, x, run) if whole else layer(x, run)
        if self.final_norm is not None and self.output is not None:
            x = self.output(self.final_norm(x))
        return x.transpose(0, 1) if run.batch_first else x


def residual_std(model: ModelConfig) -> float:
    """Scaled initialisation of layers that write into the residual stream: std / sqrt(2 L) (Radford et al. 2019)."""
    return INIT_STD / math.sqrt(2 * model.layers)
