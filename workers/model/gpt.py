"""GPT: pre-norm transformer decoder with learned positions (Radford et al. 2019), one pipeline stage of it.

Shapes: s sequence, b micro-batch, h hidden, a heads, d head size, t tensor-parallel size. With sequence parallelism
the residual stream between the parallel blocks is [s/t, b, h].
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from workers.comm import Comm
from workers.config import JobSpec, ModelConfig
from workers.parallel.layers import (
    ColumnParallelLinear,
    LayerNorm,
    PositionEmbedding,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    VocabularyParallelOutput,
)
from workers.parallel.shards import NamedShard, named_shards

INIT_STD = 0.02


class Attention(nn.Module):
    """Causal multi-head self-attention; heads are split over the tensor group.

    Rows of the fused projection are ordered (head, q/k/v, d), so that any contiguous split holds whole heads.
    """

    def __init__(self, model: ModelConfig, comm: Comm, sequence_parallel: bool, recompute_core: bool):
        super().__init__()
        self.heads, self.head_size = model.heads // comm.size("tensor"), model.head_size
        self.recompute_core = recompute_core
        h = model.hidden_size
        self.qkv = ColumnParallelLinear(h, 3 * h, comm, sequence_parallel, model.bias, INIT_STD)
        self.output = RowParallelLinear(h, h, comm, sequence_parallel, model.bias, residual_std(model))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s or s/t, b, h] -> the same."""
        qkv = self.qkv(x)
        s, b, _ = qkv.shape
        q, k, v = qkv.view(s, b, self.heads, 3, self.head_size).permute(3, 1, 2, 0, 4).unbind(0)
        if self.recompute_core and torch.is_grad_enabled():
            # Selective recomputation (arXiv:2205.05198, section 5): keep q, k, v and do the core attention again.
            context = checkpoint(_core_attention, q, k, v, use_reentrant=False, preserve_rng_state=False)
        else:
            context = _core_attention(q, k, v)
        return self.output(context.permute(2, 0, 1, 3).reshape(s, b, self.heads * self.head_size))


def _core_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v under a causal mask: [b, a/t, s, d] each."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class MLP(nn.Module):
    """Two linear layers with GELU between them (exact, by erf)."""

    def __init__(self, model: ModelConfig, comm: Comm, sequence_parallel: bool):
        super().__init__()
        h, f = model.hidden_size, model.ffn_size
        self.up = ColumnParallelLinear(h, f, comm, sequence_parallel, model.bias, INIT_STD)
        self.down = RowParallelLinear(f, h, comm, sequence_parallel, model.bias, residual_std(model))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s or s/t, b, h] -> the same."""
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    """One transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: ModelConfig, comm: Comm, sequence_parallel: bool, recompute_core: bool):
        super().__init__()
        self.attention_norm = LayerNorm(model.hidden_size, model.bias)
        self.attention = Attention(model, comm, sequence_parallel, recompute_core)
        self.mlp_norm = LayerNorm(model.hidden_size, model.bias)
        self.mlp = MLP(model, comm, sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s or s/t, b, h] -> the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Embedding(nn.Module):
    """Token plus position embedding."""

    def __init__(self, spec: JobSpec, comm: Comm, sequence_parallel: bool):
        super().__init__()
        model = spec.model
        self.token = VocabularyParallelEmbedding(
            spec.vocabulary_size, model.hidden_size, comm, sequence_parallel, INIT_STD
        )
        self.position = PositionEmbedding(model.sequence_length, model.hidden_size, comm, sequence_parallel, INIT_STD)

    def forward(self, tokens_sb: torch.Tensor) -> torch.Tensor:
        """Tokens [s, b] -> [s or s/t, b, h]."""
        return self.position(self.token(tokens_sb))


class GPTStage(nn.Module):
    """The part of a GPT that one pipeline stage holds; parameter names are those of the whole model."""

    def __init__(self, spec: JobSpec, comm: Comm):
        super().__init__()
        model, layout = spec.model, spec.layout
        stage, stages = comm.index("pipeline"), comm.size("pipeline")
        sequence_parallel = layout.sequence_parallel_on
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.tied_on_one_stage = model.tie_embeddings and self.is_first and self.is_last
        self.tied_copy = model.tie_embeddings and self.is_last and not self.is_first
        self.embedding = Embedding(spec, comm, sequence_parallel) if self.is_first else None
        recompute = layout.recompute == "selective"
        self.layers = nn.ModuleDict(
            {str(i): Layer(model, comm, sequence_parallel, recompute) for i in stage_layers(model, stages, stage)}
        )
        self.final_norm = LayerNorm(model.hidden_size, model.bias) if self.is_last else None
        self.output: VocabularyParallelOutput | None = None
        if self.is_last:
            self.output = VocabularyParallelOutput(
                model.hidden_size, spec.vocabulary_size, comm, sequence_parallel, INIT_STD, model.tie_embeddings
            )
        if self.tied_on_one_stage and self.output is not None and self.embedding is not None:
            self.output.weight = self.embedding.token.weight
            self.output.shards.clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [s, b] on the first stage, else [s or s/t, b, h]; logits [s, b, v/t] on the last stage, else
        [s or s/t, b, h]."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.final_norm is not None and self.output is not None:
            x = self.output(self.final_norm(x))
        return x

    def named_shards(self) -> list[NamedShard]:
        """This stage's parameters under the names of the whole model."""
        return named_shards(self, {"output.weight": "embedding.token.weight"} if self.tied_copy else None)


def stage_layers(model: ModelConfig, stages: int, stage: int) -> range:
    """Global indices of the layers on `stage`."""
    count = model.layers // stages
    return range(stage * count, (stage + 1) * count)


def residual_std(model: ModelConfig) -> float:
    """Scaled initialisation of layers that write into the residual stream: std / sqrt(2 L) (Radford et al. 2019)."""
    return INIT_STD / math.sqrt(2 * model.layers)
