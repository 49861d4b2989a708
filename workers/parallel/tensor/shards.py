"""What each parameter is in the whole model: its name, its full shape, the part of it that this rank holds, and its
initial values.

Initial values are a function of (seed, layout-free name) only, so that all layouts start equal, and no rank draws much
more than it holds. A parameter of up to SINGLE_DRAW_ELEMENTS numbers is one draw, of which a rank takes its part. A
larger one is divided into tiles of the full parameter, each drawn from a seed of its own: a rank draws the tiles that
overlap with its part, several at a time.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import nn

from manta.workers.config import ParameterGroup


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
    of_expert: bool = False
    """Whether it belongs to one of the experts of a layer, of which expert-parallel ranks have different ones."""
    group: ParameterGroup = "linear"
    """Kind of parameter, which weight decay depends on."""
    tied_across_stages: bool = False
    """Whether another stage holds it too, as the token embedding tied to the output: gradients are then summed."""
    shared_copy: bool = False
    """Whether this is the last stage's copy of a tied parameter; the original is the first stage's."""
    name: str | None = None
    """Layout-free name; None: the parameter's path in the model."""
    beside: str | None = None
    """Layout-free name within the module that its own is a part of, for a parameter of one of several logical
    matrices."""
    std: float | None = None
    """Standard deviation of its normal initialization; None: another, or constant."""
    bound: float | None = None
    """Largest absolute value of its uniform initialization; None: another, or constant."""
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
    never_deferred = False
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
                owner, own = (prefix, local) if shard.beside is None else (prefix.rpartition(".")[0], shard.beside)
                name = shard.name or (f"{owner}.{own}" if owner else own)
                entries.append(NamedShard(name, module.get_parameter(local), shard, module.by_autograd))
    return entries


SINGLE_DRAW_ELEMENTS = 2**22
"""Most numbers in one draw."""
TILE = 2**20
"""Numbers in a tile."""
TILE_COLUMNS = 1024
"""Most columns of a tile: parts of a matrix that is split along its columns are rarely narrower."""

_Bounds = tuple[int, int]
"""[first, end) of rows or columns of a whole parameter."""


def fill_initial(entry: NamedShard, local: torch.Tensor, seed: int) -> None:
    """Fill `local`, shaped as this rank's part of the parameter; the padding of a vocabulary with zeros."""
    shard = entry.shard
    if shard.std is None and shard.bound is None:
        local.fill_(shard.constant)
        return
    local.zero_()
    rows, columns = shard.rows_and_columns(tuple(local.shape))
    if rows[0] >= rows[1]:
        return
    part = local.view(local.shape[0], -1)  # a vector's second dimension is 1

    def fill(tile: _Tile) -> None:
        (up, low), (side, end) = tile.rows, tile.columns
        top, bottom, left, right = max(up, rows[0]), min(low, rows[1]), max(side, columns[0]), min(end, columns[1])
        target = part[top - rows[0] : bottom - rows[0], left - columns[0] : right - columns[0]]
        drawn = tile.draw(seed, entry.name, shard)
        target.copy_(drawn[top - up : bottom - up, left - side : right - side])

    with ThreadPoolExecutor(_threads()) as pool:
        list(pool.map(fill, _tiles(shard.shape[0], math.prod(shard.shape[1:]), rows, columns)))


@dataclass(frozen=True)
class _Tile:
    """A rectangle of a whole parameter that is one draw."""

    rows: _Bounds
    columns: _Bounds
    mark: str = ""
    """Distinguishes its seed from those of the parameter's other tiles."""

    def draw(self, seed: int, name: str, shard: ParameterShard) -> torch.Tensor:
        """The tile's values, of parameter `name`."""
        generator = torch.Generator().manual_seed(_name_seed(seed, name + self.mark))
        shape = self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        if shard.bound is not None:
            return torch.empty(shape).uniform_(-shard.bound, shard.bound, generator=generator)
        assert shard.std is not None
        return torch.empty(shape).normal_(0.0, shard.std, generator=generator)


def _tiles(height: int, width: int, rows: _Bounds, columns: _Bounds) -> Iterator[_Tile]:
    """The tiles of a parameter of `height` x `width` that overlap with `rows` and `columns`."""
    if height * width <= SINGLE_DRAW_ELEMENTS:
        yield _Tile((0, height), (0, width))
        return
    wide = min(width, TILE_COLUMNS)
    high = TILE // wide
    for i in range(rows[0] // high, -(-rows[1] // high)):
        for j in range(columns[0] // wide, -(-columns[1] // wide)):
            tall = i * high, min((i + 1) * high, height)
            yield _Tile(tall, (j * wide, min((j + 1) * wide, width)), f" {i} {j}")


def _threads() -> int:
    """Number of tiles that are drawn at a time while other ranks of the machine draw theirs: machines with GPUs have
    eight ranks, and more cores than that for each."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 8))


def _name_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
