"""A model of one's own: attention and MLP read the same norm and are added to the residual stream together, as in GPT-J
and PaLM (arXiv:2204.02311, section 2), with squared ReLU in the MLP (Primer, arXiv:2109.08668).

Shapes: s sequence, b micro-batch, h hidden, f inner width of the MLP, t tensor-parallel size.
"""

from __future__ import annotations

import torch
from torch import nn

from manta.workers.config import ModelConfig
from manta.workers.errors import ModelError
from manta.workers.model.attention import Attention
from manta.workers.model.layer import Embedding
from manta.workers.model.shared import INIT_STD, Shared, residual_std
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.recompute.modules import recomputation
from manta.workers.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from manta.workers.parallel.tensor.rms_norm import RMSNorm
from manta.workers.parallel.tensor.sequence_parallel import Region


class SquaredReLU(nn.Module):
    """down(relu(up(x))^2)."""

    def __init__(self, model: ModelConfig, region: Region):
        super().__init__()
        self.up = ColumnParallelLinear(model.hidden_size, model.ffn_size, region, model.bias, INIT_STD)
        self.down = RowParallelLinear(model.ffn_size, model.hidden_size, region, model.bias, residual_std(model))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """[s or s/t, b, h] -> the same, added to the residual."""
        return self.down(torch.relu(self.up(x)).square(), residual)


class ParallelLayer(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, shared: Shared, index: int):
        super().__init__()
        model = shared.spec.model
        self.norm = norm(model)
        self.attention = Attention(shared, index, rotary=shared.rotary)
        self.mlp = SquaredReLU(model, shared.region)

    def forward(self, x: torch.Tensor, run: ForwardPass) -> torch.Tensor:
        """[s or s/t, b, h] -> the same."""
        normed = self.norm(x)
        recomputed_norm = recomputation(self.norm, x) if run.recompute.norm else None
        return self.mlp(normed, self.attention(normed, run, recomputed_norm, x))


def norm(model: ModelConfig) -> RMSNorm:
    """That of each layer, and the final one."""
    return RMSNorm(model.hidden_size, model.norm_epsilon)


class ParallelBlocks:
    """What Manta asks for."""

    def embedding(self, shared: Shared) -> Embedding:
        """Of tokens alone: positions are rotary."""
        return Embedding(shared, learned_positions=False)

    def layer(self, shared: Shared, index: int) -> ParallelLayer:
        """Layer `index` of the model."""
        return ParallelLayer(shared, index)

    def norm(self, model: ModelConfig) -> RMSNorm:
        """The final norm."""
        return norm(model)


def build(model: ModelConfig) -> ParallelBlocks:
    """The entry point. Raises ModelError for what the model does not do."""
    if model.dropout:
        raise ModelError("parallel_blocks has no dropout: leave model.dropout out")
    if model.options:
        raise ModelError(f"parallel_blocks takes no options, not {', '.join(model.options)}")
    return ParallelBlocks()
