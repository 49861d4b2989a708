"""GPT (Radford et al. 2019): pre-norm decoder with learned positions, layer norms, and an MLP with GELU.

Shapes: s sequence, b micro-batch, h hidden, f inner width of the MLP, t tensor-parallel size.
"""

from __future__ import annotations

import torch
from torch import nn

from manta.workers.config import ModelConfig
from manta.workers.model.attention import Attention
from manta.workers.model.layer import Embedding, Layer
from manta.workers.model.shared import INIT_STD, Shared, residual_std
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.recompute.modules import Recomputation
from manta.workers.parallel.tensor.layers import ColumnParallelLinear, LayerNorm, RowParallelLinear
from manta.workers.parallel.tensor.sequence_parallel import Region


class MLP(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, model: ModelConfig, region: Region):
        super().__init__()
        h, f = model.hidden_size, model.ffn_size
        self.up = ColumnParallelLinear(h, f, region, model.bias, INIT_STD)
        self.down = RowParallelLinear(f, h, region, model.bias, residual_std(model), model.activation)

    def forward(
        self, x: torch.Tensor, run: ForwardPass, recompute_norm: Recomputation | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """[s or s/t, b, h] -> the same, added to the residual if one is given."""
        up = self.up(x, recompute_norm, run.adapter_dropout)
        return self.down(up, residual, run.recompute.mlp_activation, run.adapter_dropout)


def embedding(shared: Shared) -> Embedding:
    """Embedding of tokens and positions."""
    return Embedding(shared, learned_positions=True)


def layer(shared: Shared, index: int) -> Layer:
    """Layer `index` of the model."""
    model = shared.spec.model
    norms = (norm(model), norm(model))
    return Layer(shared, index, Attention(shared, index), MLP(model, shared.region), norms)


def norm(model: ModelConfig) -> LayerNorm:
    """The norm before each block, and the final one."""
    return LayerNorm(model.hidden_size, model.bias, model.norm_epsilon)
