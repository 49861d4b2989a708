"""The rank grid: the coordinates of each rank, and the ranks that share an axis. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manta.workers.config import ParallelConfig
from manta.workers.schedules.stages import end_ranks

Axis = Literal["tensor", "pipeline", "data", "context", "embedding", "world"]
AXES: tuple[Axis, ...] = ("tensor", "pipeline", "data", "embedding", "world")
"""Axes along which ranks communicate, by channel number; the names also say what their ranks differ in."""


@dataclass(frozen=True)
class Coordinates:
    """Position of a rank along each axis, from 0."""

    tensor: int
    pipeline: int
    data: int
    context: int


class RankGrid:
    """All ranks of a layout: rank = ((data * p + pipeline) * c + context) * t + tensor."""

    def __init__(self, layout: ParallelConfig):
        self.tensor, self.pipeline = layout.tensor, layout.pipeline
        self.data, self.context = layout.data, layout.context
        self.world_size = layout.world_size
        self._ends = end_ranks(layout)

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of `rank`. Raises IndexError for a rank outside the grid."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside a grid of {self.world_size} ranks")
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        data, pipeline = divmod(rest, self.pipeline)
        return Coordinates(tensor, pipeline, data, context)

    def rank(self, at: Coordinates) -> int:
        """Rank at coordinates `at`; the inverse of `coordinates`."""
        return ((at.data * self.pipeline + at.pipeline) * self.context + at.context) * self.tensor + at.tensor

    def group(self, axis: Axis, rank: int) -> list[int]:
        """Ranks that share every coordinate with `rank` except the one along `axis`, in order along it.

        `embedding` is the ranks of the first and the last stage of the rank's pipeline, which both need the token
        embedding if it is tied; for other ranks it is the rank alone. `world` is all ranks.
        """
        if axis == "world":
            return list(range(self.world_size))
        at = self.coordinates(rank)
        if axis == "embedding":
            if at.pipeline not in self._ends:
                return [rank]
            return [self.rank(Coordinates(at.tensor, stage, at.data, at.context)) for stage in self._ends]
        size = {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data, "context": self.context}[axis]
        base = {"tensor": at.tensor, "pipeline": at.pipeline, "data": at.data, "context": at.context}
        return [self.rank(Coordinates(**{**base, axis: position})) for position in range(size)]

    def groups(self, axis: Axis) -> list[list[int]]:
        """All distinct groups along `axis`, ordered by their first rank."""
        return [list(group) for group in sorted({tuple(self.group(axis, rank)) for rank in range(self.world_size)})]


def state_peers(layout: ParallelConfig, rank: int) -> list[int]:
    """The ranks whose whole state has the same bits as that of `rank`, including itself, in order: its data group,
    unless ZeRO splits the optimizer's state over it."""
    return [rank] if layout.zero else RankGrid(layout).group("data", rank)


def state_groups(layout: ParallelConfig) -> list[list[int]]:
    """All ranks, in groups with the same state, ordered by their first rank."""
    ranks = layout.world_size
    apart = ranks if layout.zero else ranks // layout.data  # distance between ranks of a data group
    return [list(range(first, ranks, apart)) for first in range(apart)]
