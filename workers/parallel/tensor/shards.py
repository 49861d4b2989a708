"""What each parameter is in the whole model: its name, its full shape, and which part of it this rank holds."""

from __future__ import annotations

import hashlib
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
    """Dimension split over the tensor group; None: every tensor rank holds all of it."""
    start: int = 0
    """First index of this rank's part along split_dim; the part's length is the local tensor's, which may reach
    past the full shape where the vocabulary is padded."""
    copies: int = 1
    """Neighbouring tensor ranks that hold the same part (key-value heads fewer than tensor ranks)."""
    partial: bool = False
    """Whether each tensor rank has only seen its own heads with it, all of which it holds: its gradient is the sum over
    ranks, also where they see the same part of the sequence."""
    group: ParameterGroup = "linear"
    """What kind of parameter it is, on which weight decay depends."""
    tied_across_stages: bool = False
    """Whether another stage holds the same parameter, so that its gradient is the sum of both: the token embedding that
    is tied to the output layer."""
    shared_copy: bool = False
    """Whether this is the last stage's copy of it; the first stage's is the original."""
    name: str | None = None
    """Layout-free name; None: the parameter's path in the model."""
    std: float | None = None
    """Standard deviation of its normal initialisation; None: constant."""
    constant: float = 0.0
    """Value of its constant initialisation."""


class ShardedModule(nn.Module):
    """A module that describes its own parameters: `shards` maps their local names."""

    by_autograd = False
    """Whether autograd itself adds the gradients of its parameters. Those of the others go to WeightGradients, under
    the zero-bubble schedules in the weights' pass (workers/parallel/tensor/weight_gradients.py)."""

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


def fill_initial(entry: NamedShard, local: torch.Tensor, seed: int) -> None:
    """Fill `local`, shaped as the parameter, as a function of (seed, layout-free name) alone, so that all layouts
    start equal."""
    shard = entry.shard
    if shard.std is None:
        local.fill_(shard.constant)
        return
    generator = torch.Generator().manual_seed(_name_seed(seed, entry.name))
    whole = torch.empty(shard.shape, dtype=torch.float32).normal_(0.0, shard.std, generator=generator)
    local.zero_()  # rows of a padded vocabulary stay zero
    part = whole if shard.split_dim is None else _cut(whole, shard.split_dim, shard.start, local)
    local[tuple(slice(0, length) for length in part.shape)].copy_(part)


def _cut(whole: torch.Tensor, dim: int, start: int, local: torch.Tensor) -> torch.Tensor:
    end = min(start + local.shape[dim], whole.shape[dim])
    return whole.narrow(dim, start, max(0, end - start)) if start < end else whole.narrow(dim, 0, 0)


def _name_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
