"""The process groups of one generation, built and torn down as a unit.

Layers and the pipeline hold one `Comm` for the life of the process and name the axis they talk along; the groups
behind the axes belong to a generation, so a later generation can put new groups under a live model (`close`, then
`connect`). An axis of size 1 needs no group and costs nothing, so a single process runs without torch.distributed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from workers.collectives import PointToPoint, add, maximum
from workers.compat import all_gather_single, reduce_scatter_single
from workers.errors import PeerLost
from workers.parallel.grid import Axis, RankGrid

# A dead peer is noticed through its process long before this; it only bounds a wait that nobody supervises.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
GROUP_AXES: tuple[Axis, ...] = ("tensor", "pipeline", "data", "embedding")


class Handle(Protocol):
    """A communication under way; `wait` raises PeerLost when the other side is gone."""

    def wait(self) -> None: ...


class _Done:
    """What a communication along an axis of size 1 returns."""

    def wait(self) -> None:
        """Nothing to wait for."""


class _Work:
    def __init__(self, work: dist.Work, tensor: torch.Tensor):
        self._work = work
        self._tensor = tensor  # the backend reads it until the wait is over

    def wait(self) -> None:
        with _naming_lost_peers():
            self._work.wait()


@contextmanager
def _naming_lost_peers() -> Iterator[None]:
    """Turn the backends' RuntimeErrors into PeerLost: inside a collective they mean that a peer went away."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"communication failed: {str(error).splitlines()[0]}") from error


class Comm:
    """All communication of one rank, by axis. Tensors must be contiguous."""

    def __init__(self, grid: RankGrid, rank: int, device: torch.device):
        self.grid, self.rank, self.device = grid, rank, device
        self.generation = 0
        self._ranks: dict[str, list[int]] = {axis: grid.group(axis, rank) for axis in (*GROUP_AXES, "context", "world")}
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        self._own: dict[str, PointToPoint] = {}
        self.checkpoint_group: dist.ProcessGroup | None = None

    def connect(self, store: dist.Store, generation: int) -> None:
        """Join the groups of `generation` through `store`; keys carry the generation. Raises PeerLost."""
        self.generation = generation
        with _naming_lost_peers():
            dist.init_process_group(
                backend="nccl" if self.device.type == "cuda" else "gloo",
                store=dist.PrefixStore(f"generation-{generation}", store),
                rank=self.rank,
                world_size=self.grid.world_size,
                timeout=COLLECTIVE_TIMEOUT,
            )
            self._groups["world"] = dist.group.WORLD
            for axis in GROUP_AXES:
                if self.size(axis) > 1:
                    self._groups[axis] = self._join(axis)
            if self.size("world") > 1:
                # Checkpoints are written by a thread of their own, whose messages must not mix with a step's.
                self.checkpoint_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        if self.device.type == "cpu":
            self._own = {
                axis: PointToPoint(group, self._ranks[axis], self.rank) for axis, group in self._groups.items() if group
            }

    def _join(self, axis: Axis) -> dist.ProcessGroup:
        # Only the members meet, and order along the axis is the order of ranks.
        return dist.new_group(self._ranks[axis], timeout=COLLECTIVE_TIMEOUT, use_local_synchronization=True)

    def close(self) -> None:
        """Leave all groups of this generation."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._groups.clear()
        self._own.clear()
        self.checkpoint_group = None

    def size(self, axis: Axis) -> int:
        """Number of ranks along `axis`."""
        return len(self._ranks[axis])

    def index(self, axis: Axis) -> int:
        """This rank's position along `axis`."""
        return self._ranks[axis].index(self.rank)

    def all_reduce(self, axis: Axis, tensor: torch.Tensor, largest: bool = False) -> None:
        """Sum of `tensor` over `axis` in place, or its element-wise maximum with `largest`."""
        if self.size(axis) == 1:
            return
        with _naming_lost_peers():
            if self._own:
                self._own[axis].all_reduce(tensor, maximum if largest else add)
            else:
                op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
                dist.all_reduce(tensor, op=op, group=self._groups[axis])

    def all_gather(self, axis: Axis, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Concatenation of every rank's `tensor` along dimension 0, into `out` where it is given."""
        size = self.size(axis)
        if size == 1 and out is None:
            return tensor
        if out is None:
            out = tensor.new_empty((tensor.shape[0] * size, *tensor.shape[1:]))
        with _naming_lost_peers():
            if size == 1:
                out.copy_(tensor)
            elif self._own:
                self._own[axis].all_gather(out, tensor)
            else:
                all_gather_single(out, tensor, group=self._groups[axis])
        return out

    def reduce_scatter(self, axis: Axis, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's slice along dimension 0 of the sum of every rank's `tensor`."""
        size = self.size(axis)
        if size == 1:
            return tensor
        out = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
        with _naming_lost_peers():
            if self._own:
                self._own[axis].reduce_scatter(out, tensor)
            else:
                reduce_scatter_single(out, tensor, group=self._groups[axis])
        return out

    def send(self, stage: int, tensor: torch.Tensor) -> Handle:
        """Start sending `tensor` to pipeline stage `stage` of the same replica; never blocks."""
        with _naming_lost_peers():
            work = dist.isend(tensor, self._ranks["pipeline"][stage], group=self._groups["pipeline"])
        return _Work(work, tensor) if work is not None else _Done()

    def receive(self, stage: int, tensor: torch.Tensor) -> Handle:
        """Start receiving into `tensor` from pipeline stage `stage` of the same replica."""
        with _naming_lost_peers():
            work = dist.irecv(tensor, self._ranks["pipeline"][stage], group=self._groups["pipeline"])
        return _Work(work, tensor) if work is not None else _Done()

    def barrier(self) -> None:
        """Wait until every rank of the generation is here."""
        self.all_reduce("world", torch.zeros(1, device=self.device))
