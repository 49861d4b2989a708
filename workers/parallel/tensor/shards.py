"""What each parameter is in the whole model: its name, its full shape, and which part of it this rank holds."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from workers.config import ParameterGroup


@dataclass(frozen=True)
class ParameterShard:
    """One parameter's place in the layout-free model."""

    shape: tuple[int, ...]
    """Full shape, without padding."""
    split_dim: int | None = None
    """Dimension split over the tensor group; None: every tensor rank holds the whole parameter."""
    start: int = 0
    """First index of this rank's part along split_dim. The part's length is that of the local tensor, which may extend
    past the full shape if the vocabulary is padded."""
    copies: int = 1
    """Number of neighbouring tensor ranks with the same part (if there are fewer key-value heads than tensor ranks)."""
    partial: bool = False
    """Whether every tensor rank holds the whole parameter but uses it for its own heads only: its gradient is the sum
    over ranks, even if they see the same part of the sequence."""
    group: ParameterGroup = "linear"
    """Kind of parameter, which weight decay depends on."""
    tied_across_stages: bool = False
    """Whether another stage holds the same parameter, so that its gradient is the sum of both: the token embedding,
    tied to the output layer."""
    shared_copy: bool = False
    """Whether this is the last stage's copy of a tied parameter; the original is the first stage's."""
    name: str | None = None
    """Layout-free name; None: the parameter's path in the model."""
    std: float | None = None
    """Standard deviation of its normal initialization; None: constant."""
    constant: float = 0.0
    """Value of its constant initialization."""

    def rows_and_columns(self, local: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
        """[first, end) of rows and columns, in the full shape, that a part of shape `local` holds, without padding; a
        vector has one column."""
        full = (*self.shape, 1)[:2]
        bounds = []
        for dim, (size, length) in enumerate(zip(full, (*local, 1)[:2], strict=True)):
            start = self.start if dim == self.split_dim else 0
            bounds.append((start, min(start + length, size)))
        return bounds[0], bounds[1]


class ShardedModule(nn.Module):
    """A module that describes its own parameters: `shards` maps their local names."""

    by_autograd = False
    """Whether autograd itself adds the gradients of its parameters. Otherwise they go to WeightGradients, under the
    zero-bubble schedules in the weights' pass (workers/parallel/tensor/weight_gradients.py)."""
    never_put_off = False
    """Whether they go there in the first half of backward even under those schedules."""

    def __init__(self) -> None:
        super().__init__()
        self.shards: dict[str, ParameterShard] = {}

    def add_parameter(self, name: str, local_shape: tuple[int, ...], shard: ParameterShard) -> nn.Parameter:
        """Register an empty parameter of `local_shape` (in the default dtype and device) described by `shard`."""
        parameter = nn.Parameter(torch.empty(local_shape))
        self.register_parameter(name, parameter)
        self.shards[name] = shard
        return parameter


@dataclass(frozen=True)
class NamedShard:
    """A parameter of this rank with its layout-free name."""

    name: str
    parameter: nn.Parameter = field(repr=False)
    shard: ParameterShard
    by_autograd: bool
    """Whether autograd adds its gradient; else WeightGradients does."""


def named_shards(model: nn.Module) -> list[NamedShard]:
    """All parameters below `model` with their descriptions, in the order of registration."""
    entries = []
    for prefix, module in model.named_modules():
        if isinstance(module, ShardedModule):
            for local, shard in module.shards.items():
                name = shard.name or (f"{prefix}.{local}" if prefix else local)
                entries.append(NamedShard(name, module.get_parameter(local), shard, module.by_autograd))
    return entries
