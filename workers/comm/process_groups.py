"""Communication over process groups of torch.distributed: NCCL on GPUs, gloo on a CPU.

Every axis has a communicator of its own, and on GPUs a stream with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from workers.comm.backend import Handle, Started, Tensors, Transfer, naming_lost_peers
from workers.comm.compat import all_gather_single, reduce_scatter_single
from workers.comm.grid import AXES, Axis, RankGrid

# A dead peer is noticed through its process long before this; it only bounds a wait that nobody supervises.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
# Messages towards later and towards earlier ranks of a pipeline: on GPUs each has its own communicator, so that two
# neighbours that send to each other never wait for each other.
_DIRECTIONS = ("pipeline_up", "pipeline_down")


class _Work:
    """A torch.distributed operation under way."""

    def __init__(self, work: dist.Work | None, *tensors: torch.Tensor):
        self._work = work
        self._tensors = tensors  # the backend uses them until the wait is over

    def wait(self) -> None:
        if self._work is not None:
            with naming_lost_peers():
                self._work.wait()

    @property
    def done(self) -> bool:
        return self._work is None or self._work.is_completed()


class ProcessGroups:
    """The process groups of one rank. An interrupt does not end a wait that has begun: there the process is killed."""

    def __init__(self, grid: RankGrid, rank: int, device: torch.device, store: dist.Store):
        """Meet the other ranks through `store`. Raises PeerLost."""
        self._device = device
        self._ranks: dict[Axis, list[int]] = {axis: grid.group(axis, rank) for axis in AXES}
        self._indices = {axis: ranks.index(rank) for axis, ranks in self._ranks.items()}
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        with naming_lost_peers():
            dist.init_process_group(
                backend="nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=grid.world_size,
                timeout=COLLECTIVE_TIMEOUT,
            )
            try:
                self._make_groups()
                if device.type == "cuda":
                    self._open_channels()
            except BaseException:
                self.close()
                raise

    def _make_groups(self) -> None:
        self._groups["world"] = dist.group.WORLD
        # A group's name counts the groups that its members have made before, so all must have made as many: the
        # embedding's, which ranks between the ends do not have, comes last.
        named: list[tuple[str, Axis]] = [("tensor", "tensor"), ("data", "data")]
        named += [(direction, "pipeline") for direction in _DIRECTIONS]
        for name, axis in (*named, ("embedding", "embedding")):
            if len(self._ranks[axis]) > 1:
                # Only the members meet, and order along the axis is the order of ranks.
                self._groups[name] = dist.new_group(
                    self._ranks[axis], timeout=COLLECTIVE_TIMEOUT, use_local_synchronization=True, group_desc=name
                )

    def _open_channels(self) -> None:
        """Use every NCCL communicator once, in one order on all ranks: each is made at its first use, in which its
        members' hosts wait for each other, and a step has no place for that."""
        probe = torch.zeros(1, device=self._device)
        axes: tuple[Axis, ...] = ("world", "tensor", "data", "embedding")
        for axis in axes:
            if axis in self._groups:
                self.start_all_reduce(axis, probe, largest=False).wait()
        mine, stages = self._indices["pipeline"], len(self._ranks["pipeline"])
        for source, to in ((a, b) for a in range(stages) for b in range(stages) if (a - b) % stages in (1, stages - 1)):
            if mine == source:
                self.send(to, probe).wait()
            elif mine == to:
                self.receive(source, probe).wait()
            torch.cuda.synchronize(self._device)

    def start_all_reduce(self, axis: Axis, tensor: torch.Tensor, largest: bool) -> Handle:
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        with naming_lost_peers():
            return _Work(dist.all_reduce(tensor, op=op, group=self._groups[axis], async_op=True), tensor)

    def start_all_gather(self, axis: Axis, out: torch.Tensor, tensor: torch.Tensor) -> Handle:
        with naming_lost_peers():
            return _Work(all_gather_single(out, tensor, group=self._groups[axis], async_op=True), out, tensor)

    def start_reduce_scatter(self, axis: Axis, out: torch.Tensor, tensor: torch.Tensor) -> Handle:
        with naming_lost_peers():
            return _Work(reduce_scatter_single(out, tensor, group=self._groups[axis], async_op=True), out, tensor)

    def start_all_to_all(self, axis: Axis, outgoing: Sequence[Tensors], incoming: Sequence[Tensors]) -> Handle:
        group, peers = self._groups[axis], self._ranks[axis]
        operations = [
            dist.P2POp(kind, tensor, peer, group)
            for kind, tensors in ((dist.irecv, incoming), (dist.isend, outgoing))
            for index, peer in enumerate(peers)
            if index != self._indices[axis]
            for tensor in tensors[index]
        ]
        with naming_lost_peers():
            works = dist.batch_isend_irecv(operations) if operations else []
        return Started([_Work(work) for work in works])

    def send(self, stage: int, tensor: torch.Tensor) -> Transfer:
        group = self._groups[_DIRECTIONS[stage < self._indices["pipeline"]]]
        with naming_lost_peers():
            return _Work(dist.isend(tensor, self._ranks["pipeline"][stage], group=group), tensor)

    def receive(self, stage: int, tensor: torch.Tensor) -> Handle:
        group = self._groups[_DIRECTIONS[stage > self._indices["pipeline"]]]
        with naming_lost_peers():
            return _Work(dist.irecv(tensor, self._ranks["pipeline"][stage], group=group), tensor)

    def interrupt(self) -> None:
        """Nothing: torch.distributed ends no wait from another thread."""

    def close(self) -> None:
        self._groups.clear()
        dist.destroy_process_group()
