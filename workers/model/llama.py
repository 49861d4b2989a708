"""Llama (Touvron et al. 2023, arXiv:2302.13971; Llama 3, arXiv:2407.21783): pre-norm decoder with RMS norms, rotary
positions, grouped-query attention and SwiGLU. With `sliding_window` it is Mistral 7B (arXiv:2310.06825),
with `moe` Mixtral (arXiv:2401.04088).

Shapes: s sequence, b micro-batch, h hidden, f inner width of the MLP, t tensor-parallel size.
"""

from __future__ import annotations

import torch
from torch import nn

from manta.workers.config import ModelConfig
from manta.workers.model.attention import Attention
from manta.workers.model.layer import Embedding, Layer
from manta.workers.model.shared import INIT_STD, Shared, residual_std
from manta.workers.parallel.experts.layer import ExpertMLP, Spreads
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.recompute.modules import Recomputation
from manta.workers.parallel.tensor.layers import ColumnParallelLinear, GatedRowParallelLinear, paired_forward
from manta.workers.parallel.tensor.rms_norm import RMSNorm
from manta.workers.parallel.tensor.sequence_parallel import Region


class SwiGLU(nn.Module):
    """down(silu(gate(x)) up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, model: ModelConfig, region: Region):
        super().__init__()
        h, f = model.hidden_size, model.ffn_size
        self.gate = ColumnParallelLinear(h, f, region, model.bias, INIT_STD)
        self.up = ColumnParallelLinear(h, f, region, model.bias, INIT_STD)
        self.down = GatedRowParallelLinear(f, h, region, model.bias, residual_std(model))

    def forward(
        self, x: torch.Tensor, run: ForwardPass, recompute_norm: Recomputation | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """[s or s/t, b, h] -> the same, added to the residual if one is given."""
        gate, up = paired_forward(x, self.gate, self.up, recompute_norm, run.adapter_dropout)
        return self.down(gate, up, residual, run.recompute.mlp_activation, run.adapter_dropout)


def embedding(shared: Shared) -> Embedding:
    """Embedding of tokens only."""
    return Embedding(shared, learned_positions=False)


def layer(shared: Shared, index: int) -> Layer:
    """Layer `index` of the model."""
    model = shared.spec.model
    norms = (norm(model), norm(model))
    attention = Attention(shared, index, rotary=shared.rotary)
    return Layer(shared, index, attention, mlp(shared, index), norms)


def mlp(shared: Shared, index: int) -> SwiGLU | ExpertMLP:
    """The MLP of layer `index`, or its experts."""
    model = shared.spec.model
    if not model.has_experts(index):
        return SwiGLU(model, shared.region)
    spreads = Spreads(INIT_STD, residual_std(model))
    own = shared.exchange, shared.own_experts, shared.spec.layout.expert_split == 1
    return ExpertMLP(model, index, shared.region, spreads, shared.router_bias(index), *own)


def norm(model: ModelConfig) -> RMSNorm:
    """The norm before each block, and the final one."""
    return RMSNorm(model.hidden_size, model.norm_epsilon)
