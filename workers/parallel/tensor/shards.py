"""What each parameter is in the whole model: its name, its full shape, and which part of it this rank holds."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from workers.config import ParameterGroup

NORMAL_GROUP = 16
"""Numbers that torch draws from the normal distribution as one."""
BLOCK = 2**22
"""Numbers of a parameter that are drawn at a time."""


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

    def rows_and_columns(self, local: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
        """[first, end) in both dimensions of the full shape of what a part of shape `local` holds, padding left out;
        of a vector's only column all."""
        full = (*self.shape, 1)[:2]
        bounds = []
        for dim, (size, length) in enumerate(zip(full, (*local, 1)[:2], strict=True)):
            start = self.start if dim == self.split_dim else 0
            bounds.append((start, min(start + length, size)))
        return bounds[0], bounds[1]


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
    start equal. Of the whole tensor no more than BLOCK numbers are held at a time."""
    shard = entry.shard
    if shard.std is None:
        local.fill_(shard.constant)
        return
    local.zero_()  # rows of a padded vocabulary stay zero
    (first_row, last_row), (first, last) = shard.rows_and_columns(tuple(local.shape))
    if first_row >= last_row:
        return
    rows, columns = shard.shape[0], math.prod(shard.shape[1:])
    block_rows = max(1, BLOCK // columns) if rows * columns > BLOCK else rows
    generator = torch.Generator().manual_seed(_name_seed(seed, entry.name))
    for start, end, drawn in _normal_rows(rows, columns, block_rows, shard.std, generator):
        low, high = max(start, first_row), min(end, last_row)
        if low < high:
            part = drawn[low - start : high - start, first:last]
            local[low - first_row : high - first_row].copy_(part.reshape(high - low, *local.shape[1:]))
        if end >= last_row:
            return


def _normal_rows(
    rows: int, columns: int, block_rows: int, std: float, generator: torch.Generator
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """The rows of one normal draw of [rows, columns] in order, with the same bits: (first, end, values).

    torch draws normal numbers of a tensor in groups of NORMAL_GROUP, one after the other, and only the last, incomplete
    group in another way. So draws of whole groups, the last one with all that is left, are the one draw cut into
    pieces (tests/workers/parallel/tensor/test_shards.py compares them for the torch that is installed).
    """
    unit = NORMAL_GROUP // math.gcd(columns, NORMAL_GROUP)  # so many rows are whole groups
    step = max(unit, block_rows // unit * unit)
    start = 0
    while start < rows:
        end = start + step
        if rows - end < unit or (rows - end) * columns < NORMAL_GROUP:
            end = rows  # torch draws fewer numbers than a group one by one
        yield start, end, torch.empty(end - start, columns).normal_(0.0, std, generator=generator)
        start = end


def _name_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
