"""The communication of one generation, built and torn down as a unit.

Layers and the pipeline hold one `Comm` for the life of the process and name the axis they talk along; what is behind
the axes belongs to a generation, so a later generation can be put under a live model (`close`, then `connect`).
On CPU that is the links of `workers.links`, on GPUs process groups of torch.distributed. An axis of size 1 costs
nothing, so a single process needs neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from workers.collectives import Collectives, add, maximum
from workers.compat import all_gather_single, reduce_scatter_single
from workers.errors import PeerLost
from workers.links import Links, address_towards
from workers.parallel.grid import Axis, RankGrid

# A dead peer is noticed through its process long before this; it only bounds a wait that nobody supervises.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
AXES: tuple[Axis, ...] = ("tensor", "pipeline", "data", "embedding", "world")


class Handle(Protocol):
    """A communication under way; `wait` raises PeerLost when the other side is gone."""

    def wait(self) -> None: ...


class _Work:
    """A torch.distributed operation under way."""

    def __init__(self, work: dist.Work | None, tensor: torch.Tensor):
        self._work = work
        self._tensor = tensor  # the backend uses it until the wait is over

    def wait(self) -> None:
        if self._work is not None:
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
        self._ranks: dict[str, list[int]] = {axis: grid.group(axis, rank) for axis in (*AXES, "context")}
        self._links: Links | None = None
        self._collectives: dict[str, Collectives] = {}
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        self.checkpoint_group: dist.ProcessGroup | None = None
        """Group of all ranks for the thread that writes checkpoints; None for a single rank."""

    def connect(self, store: dist.Store, generation: int, store_host: str) -> None:
        """Meet the other ranks of `generation` through `store` on `store_host`. Raises PeerLost."""
        self.generation = generation
        prefixed = dist.PrefixStore(f"generation-{generation}", store)
        with _naming_lost_peers():
            if self.device.type == "cpu":
                self._connect_links(prefixed, generation, address_towards(store_host))
            dist.init_process_group(
                backend="cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
                store=prefixed,
                rank=self.rank,
                world_size=self.grid.world_size,
                timeout=COLLECTIVE_TIMEOUT,
            )
            if self.device.type == "cuda":
                self._connect_groups()
            # Checkpoints are written by a thread of their own, whose messages must not mix with a step's.
            self.checkpoint_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)

    def _connect_links(self, store: dist.Store, generation: int, host: str) -> None:
        near = {peer for axis in AXES if axis != "world" for peer in self._ranks[axis]}
        # Sums over all ranks go through rank 0, so everybody knows it and it knows everybody.
        peers = set(self._ranks["world"]) if self.rank == 0 else near | {0}
        self._links = Links(self.rank, peers, store, generation, host)
        for channel, axis in enumerate(AXES):
            self._collectives[axis] = Collectives(self._links, channel, self._ranks[axis], star=axis == "world")

    def _connect_groups(self) -> None:
        self._groups["world"] = dist.group.WORLD
        for axis in AXES:
            if axis != "world" and self.size(axis) > 1:
                # Only the members meet, and order along the axis is the order of ranks.
                self._groups[axis] = dist.new_group(
                    self._ranks[axis], timeout=COLLECTIVE_TIMEOUT, use_local_synchronization=True
                )

    def close(self) -> None:
        """Leave this generation."""
        if self._links is not None:
            self._links.close()
            self._links = None
        if dist.is_initialized():
            dist.destroy_process_group()
        self._collectives.clear()
        self._groups.clear()
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
        if self._links is not None:
            self._collectives[axis].all_reduce(tensor, maximum if largest else add)
            return
        with _naming_lost_peers():
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            dist.all_reduce(tensor, op=op, group=self._groups[axis])

    def all_gather(self, axis: Axis, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Concatenation of every rank's `tensor` along dimension 0, into `out` where it is given."""
        size = self.size(axis)
        if size == 1 and out is None:
            return tensor
        if out is None:
            out = tensor.new_empty((tensor.shape[0] * size, *tensor.shape[1:]))
        if size == 1:
            out.copy_(tensor)
        elif self._links is not None:
            self._collectives[axis].all_gather(out, tensor)
        else:
            with _naming_lost_peers():
                all_gather_single(out, tensor, group=self._groups[axis])
        return out

    def reduce_scatter(self, axis: Axis, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's slice along dimension 0 of the sum of every rank's `tensor`."""
        size = self.size(axis)
        if size == 1:
            return tensor
        out = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
        if self._links is not None:
            self._collectives[axis].reduce_scatter(out, tensor)
        else:
            with _naming_lost_peers():
                reduce_scatter_single(out, tensor, group=self._groups[axis])
        return out

    def send(self, stage: int, tensor: torch.Tensor) -> Handle:
        """Start sending `tensor` to pipeline stage `stage` of the same replica; never blocks."""
        peer = self._ranks["pipeline"][stage]
        if self._links is not None:
            return self._links.send(peer, AXES.index("pipeline"), tensor)
        with _naming_lost_peers():
            return _Work(dist.isend(tensor, peer, group=self._groups["pipeline"]), tensor)

    def receive(self, stage: int, tensor: torch.Tensor) -> Handle:
        """Start receiving into `tensor` from pipeline stage `stage` of the same replica."""
        peer = self._ranks["pipeline"][stage]
        if self._links is not None:
            return self._links.receive(peer, AXES.index("pipeline"), tensor)
        with _naming_lost_peers():
            return _Work(dist.irecv(tensor, peer, group=self._groups["pipeline"]), tensor)

    def barrier(self) -> None:
        """Wait until every rank of the generation is here."""
        self.all_reduce("world", torch.zeros(1, device=self.device))
