"""The rank grid: the coordinates of each rank, and the ranks that share an axis. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from manta.workers.config import ParallelConfig
from manta.workers.schedules.stages import end_ranks

Axis = Literal["tensor", "pipeline", "data", "context", "holders", "embedding", "world", "expert", "expert_holders"]
AXES: tuple[Axis, ...] = (
    *("tensor", "pipeline", "data", "embedding", "world", "context", "holders", "expert", "expert_holders"),
)
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
        self.data, self.context, self.expert = layout.data, layout.context, layout.exchange_size
        self.world_size = layout.world_size
        self._ends = end_ranks(layout)

    @property
    def holders(self) -> Axis:
        """The axis of the ranks that hold the same parameters: that of the ranks that share the batch, which need no
        second communicator, unless several ranks share each sample."""
        return "data" if self.context == 1 else "holders"

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that this layout communicates along: `holders` and `context` only if ranks share samples, those of
        experts only if these are spread over holders."""
        unused: set[Axis] = set() if self.context > 1 else {"context", "holders"}
        unused |= set() if self.expert > 1 else {"expert", "expert_holders"}
        return tuple(axis for axis in AXES if axis not in unused)

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
        embedding if it is tied; for other ranks it is the rank alone. `holders` is the ranks with the same parameters,
        which differ in `data` and `context`, in the order of both; `expert` is the neighbors among these over which
        experts are spread, and `expert_holders` those with the same experts. `world` is all ranks.
        """
        if axis == "world":
            return list(range(self.world_size))
        at = self.coordinates(rank)
        if axis in ("holders", "expert", "expert_holders"):
            places = product(range(self.data), range(self.context))
            holders = [self.rank(Coordinates(at.tensor, at.pipeline, data, context)) for data, context in places]
            group, own = divmod(at.data * self.context + at.context, self.expert)
            if axis == "expert":
                return holders[group * self.expert : (group + 1) * self.expert]
            return holders[own :: self.expert] if axis == "expert_holders" else holders
        if axis == "embedding":
            if at.pipeline not in self._ends:
                return [rank]
            return [self.rank(Coordinates(at.tensor, stage, at.data, at.context)) for stage in self._ends]
        return [self.rank(replace(at, **{axis: position})) for position in range(getattr(self, axis))]

    def groups(self, axis: Axis) -> list[list[int]]:
        """All distinct groups along `axis`, ordered by their first rank."""
        groups: dict[int, list[int]] = {}
        for rank in range(self.world_size):
            if rank not in groups:
                group = self.group(axis, rank)
                groups |= dict.fromkeys(group, group)
        return [group for rank, group in groups.items() if rank == group[0]]


def state_peers(layout: ParallelConfig, rank: int) -> list[int]:
    """The ranks whose whole state has the same bits as that of `rank`, including itself, in order: all that hold the
    same parameters, experts included, unless ZeRO splits the optimizer's state over them."""
    return [rank] if layout.zero else RankGrid(layout).group("expert_holders", rank)


def state_groups(layout: ParallelConfig) -> list[list[int]]:
    """All ranks, in groups with the same state, ordered by their first rank."""
    if layout.zero:
        return [[rank] for rank in range(layout.world_size)]
    return RankGrid(layout).groups("expert_holders")
