"""What all layers of a rank's model share: their state, and the standard deviations of initial weights."""

from __future__ import annotations

import math

import torch

from manta.workers.config import JobSpec, ModelConfig
from manta.workers.model.core_attention import Visible
from manta.workers.model.rotary import Rotary
from manta.workers.parallel.context.attention import ContextAttention
from manta.workers.parallel.experts.dispatch import exchange_of, own_experts
from manta.workers.parallel.experts.exchange import Exchange
from manta.workers.parallel.recompute.offload import HostBlocks
from manta.workers.parallel.tensor.positions import Positions
from manta.workers.parallel.tensor.sequence_parallel import Region

# Places in the model that have dropout; keys of different places are independent.
EMBEDDING_DROPOUT = 0
DROPOUTS_PER_LAYER = 3
ADAPTED_INPUTS_PER_LAYER = 4


class Shared:
    """The job, its tensor-parallel region, and tables that many layers share."""

    def __init__(self, spec: JobSpec, region: Region):
        self.spec, self.region, model = spec, region, spec.model
        self.rotary: Rotary | None = None
        """None if positions are learned."""
        if model.parts.rotary:
            self.rotary = Rotary(model.rope_or_default, model.rotated_size, model.sequence_length)
        self.host_blocks = HostBlocks()
        """Host memory for offloaded activations."""
        self.across: ContextAttention | None = None
        """Attention across context ranks; None if no ranks share samples."""
        if spec.layout.context > 1:
            self.across = ContextAttention(region.comm, spec.layout, model.sequence_length)
        self.exchange: Exchange | None = None
        """The way of tokens to experts, and which of a layer's experts this rank has; None without experts."""
        self.own_experts = range(0)
        if model.moe is not None:
            self.exchange = exchange_of(region.comm, spec.layout, model.moe)
            self.own_experts = own_experts(region.comm, spec.layout, model.moe.experts)
        self.router_biases: torch.Tensor | None = None
        """What is added to scores for the choice of experts, fp32 [layers with experts, E], the same on all ranks; None
        without. Steps move it (`model.moe.balance.bias_rate`)."""
        if model.moe is not None and model.has_router_bias:
            self.router_biases = torch.zeros(len(model.expert_layers), model.moe.experts, dtype=torch.float32)
        self._visible = {window: Visible(window) for window in {model.window(i) for i in range(model.layers)}}

    def prepare(self, x: torch.Tensor, positions: Positions) -> None:
        """Create the tables that layers need for inputs like x at these positions: compiled layers cannot create
        any."""
        if self.rotary is not None:
            self.rotary.tables(x, positions)
        if self.across is None or self.across.by_heads is not None:
            for visible in self._visible.values():
                visible.band(self.spec.model.sequence_length, x)

    def router_bias(self, layer: int) -> torch.Tensor | None:
        """Of `router_biases`, the part of one layer, [E], a view."""
        return None if self.router_biases is None else self.router_biases[self.spec.model.expert_layers.index(layer)]

    def all_tables(self) -> list[torch.Tensor]:
        """The tables made so far."""
        turning = [] if self.rotary is None else self.rotary.all_tables()
        return [*turning, *(band for each in self._visible.values() for band in each.bands())]

    def visible(self, layer: int) -> Visible:
        """Which tokens each token of a layer attends to."""
        return self._visible[self.spec.model.window(layer)]


def first_dropout(layer: int) -> int:
    """The first of a layer's places of dropout: attention weights, the attention's output, the MLP's output."""
    return 1 + layer * DROPOUTS_PER_LAYER


def first_adapter_dropout(model: ModelConfig, layer: int) -> int:
    """The first of a layer's places of dropout of the inputs of adapters, one for each input of linear layers. They
    follow the places of all layers."""
    return first_dropout(model.layers) + layer * ADAPTED_INPUTS_PER_LAYER


INIT_STD = 0.02


def residual_std(model: ModelConfig) -> float:
    """Scaled initialisation of layers that write into the residual stream: std / sqrt(2 L) (Radford et al. 2019)."""
    return INIT_STD / math.sqrt(2 * model.layers)
