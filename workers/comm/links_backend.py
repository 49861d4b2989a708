"""Communication over our own TCP links, for tensors in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from workers.comm.backend import Handle, Tensors, Transfer
from workers.comm.collectives import Collectives, add, maximum
from workers.comm.grid import AXES, Axis, RankGrid
from workers.comm.links import Links
from workers.comm.secret import Secret
from workers.liveness.progress import Progress
from workers.system.ports import PortRange

_PIPELINE_CHANNEL = AXES.index("pipeline")


def linked_through_first(grid: RankGrid, rank: int) -> set[int]:
    """The ranks that `rank` is linked to if everything goes through rank 0."""
    return set(range(grid.world_size)) if rank == 0 else {0}


class LinksBackend:
    """A link to every rank of a common axis; the number of an axis in AXES is its channel."""

    def __init__(
        self,
        grid: RankGrid,
        rank: int,
        store: dist.Store,
        secret: Secret,
        host: str,
        is_over: Callable[[], bool],
        progress: Progress,
        ports: PortRange | None = None,
    ):
        """Connect. `secret`: shared with the other ranks; `host`: address of this rank, where it listens on one of
        `ports`; `progress` records which peer is waited for, and how long. Raises PeerLost."""
        ranks = {axis: grid.group(axis, rank) for axis in AXES}
        near = {peer for axis in AXES if axis != "world" for peer in ranks[axis]}
        # Sums over all ranks go through rank 0, so all ranks are linked to it.
        peers = near | linked_through_first(grid, rank)
        self.links = Links(rank, peers, store, secret, host, is_over, progress, ports)
        self._pipeline = ranks["pipeline"]
        self._along = {
            axis: Collectives(self.links, channel, ranks[axis], star=axis == "world")
            for channel, axis in enumerate(AXES)
        }

    def start_all_reduce(self, axis: Axis, tensor: torch.Tensor, largest: bool) -> Handle:
        return self._along[axis].start_all_reduce(tensor, maximum if largest else add)

    def start_all_gather(self, axis: Axis, out: torch.Tensor, tensor: torch.Tensor) -> Handle:
        return self._along[axis].start_all_gather(out, tensor)

    def start_reduce_scatter(self, axis: Axis, out: torch.Tensor, tensor: torch.Tensor) -> Handle:
        return self._along[axis].start_reduce_scatter(out, tensor)

    def start_all_to_all(self, axis: Axis, outgoing: Sequence[Tensors], incoming: Sequence[Tensors]) -> Handle:
        return self._along[axis].start_all_to_all(outgoing, incoming)

    def send(self, stage: int, tensor: torch.Tensor) -> Transfer:
        return self.links.send(self._pipeline[stage], _PIPELINE_CHANNEL, tensor)

    def receive(self, stage: int, tensor: torch.Tensor) -> Handle:
        return self.links.receive(self._pipeline[stage], _PIPELINE_CHANNEL, tensor)

    def interrupt(self) -> None:
        self.links.interrupt()

    def confirm(self) -> None:
        """Nothing to do: every wait reports errors itself."""

    def close(self) -> None:
        self.links.close()
