"""Initial values of parameters, as a function of (seed, layout-free name) only, so that all layouts start equal, and no
rank draws much more than it holds.

A parameter of up to WHOLE numbers is one draw, of which a rank takes its part. A larger one is divided into tiles of
the whole parameter, each drawn from a seed of its own: a rank draws the tiles that overlap with its part, several at a
time.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from workers.parallel.data.flat import overlap
from workers.parallel.tensor.shards import NamedShard

WHOLE = 2**22
"""Most numbers in one draw."""
TILE = 2**20
"""Numbers in a tile."""
TILE_COLUMNS = 1024
"""Most columns of a tile: parts of a matrix that is split along its columns are rarely narrower."""

Bounds = tuple[int, int]
"""[first, end) of rows or columns of a whole parameter."""


def fill_initial(entry: NamedShard, local: torch.Tensor, seed: int) -> None:
    """Fill `local`, shaped as this rank's part of the parameter; the padding of a vocabulary with zeros."""
    shard = entry.shard
    std = shard.std
    if std is None:
        local.fill_(shard.constant)
        return
    local.zero_()
    rows, columns = shard.rows_and_columns(tuple(local.shape))
    if rows[0] >= rows[1]:
        return
    part = local.view(local.shape[0], -1)  # a vector's second dimension is 1

    def fill(tile: Tile) -> None:
        (top, bottom), (left, right) = overlap(tile.rows, rows), overlap(tile.columns, columns)
        target = part[top - rows[0] : bottom - rows[0], left - columns[0] : right - columns[0]]
        (up, side), drawn = (tile.rows[0], tile.columns[0]), tile.draw(seed, entry.name, std)
        target.copy_(drawn[top - up : bottom - up, left - side : right - side])

    with ThreadPoolExecutor(_threads()) as pool:
        list(pool.map(fill, _tiles(shard.shape[0], math.prod(shard.shape[1:]), rows, columns)))


@dataclass(frozen=True)
class Tile:
    """A rectangle of a whole parameter that is one draw."""

    rows: Bounds
    columns: Bounds
    mark: str = ""
    """Distinguishes its seed from those of the parameter's other tiles."""

    def draw(self, seed: int, name: str, std: float) -> torch.Tensor:
        """The tile's values, of parameter `name`, normal with standard deviation `std`."""
        generator = torch.Generator().manual_seed(_name_seed(seed, name + self.mark))
        shape = self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        return torch.empty(shape).normal_(0.0, std, generator=generator)


def _tiles(height: int, width: int, rows: Bounds, columns: Bounds) -> Iterator[Tile]:
    """The tiles of a parameter of `height` x `width` that overlap with `rows` and `columns`."""
    if height * width <= WHOLE:
        yield Tile((0, height), (0, width))
        return
    wide = min(width, TILE_COLUMNS)
    high = TILE // wide
    for i in range(rows[0] // high, -(-rows[1] // high)):
        for j in range(columns[0] // wide, -(-columns[1] // wide)):
            tall = i * high, min((i + 1) * high, height)
            yield Tile(tall, (j * wide, min((j + 1) * wide, width)), f" {i} {j}")


def _threads() -> int:
    """Number of tiles that are drawn at a time while other ranks of the machine draw theirs: machines with GPUs have
    eight ranks, and more cores than that for each."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 8))


def _name_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
