"""Communication over process groups of torch.distributed: NCCL on GPUs, gloo on a CPU.

Every axis has its own communicator and, on GPUs, its own stream. They are created, aborted and recreated in
`regroup.py`; errors that mean a lost peer are classified in `lost_peers.py`, waits for gloo are in `gloo_waits.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from manta.workers.comm.backend import Handle, Started, Tensors, Transfer
from manta.workers.comm.gloo_waits import GlooWaits
from manta.workers.comm.grid import Axis, RankGrid
from manta.workers.comm.lost_peers import naming_lost_peers
from manta.workers.comm.regroup import Regroup
from manta.workers.errors import PeerLost
from manta.workers.liveness.progress import CONNECTING_CHANNEL, Progress

# 2.13 deprecates the *_tensor names in favour of *_single, which 2.11 does not have.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Messages towards later and towards earlier ranks of a pipeline: on GPUs each direction has its own communicator, so
# that two neighbours that send to each other never wait for each other.
_DIRECTIONS = ("pipeline_up", "pipeline_down")
_LATER: tuple[Axis, ...] = ("context", "holders", "expert", "expert_holders", "embedding")
"""Axes whose groups are made last, in this order."""
_POLL = timedelta(seconds=0.5)
"""How often a rank that waits for others to come checks whether its generation is over."""


class _Work:
    """A torch.distributed operation under way."""

    def __init__(self, groups: ProcessGroups, work: dist.Work | None, respects_timeouts: bool, *tensors: torch.Tensor):
        """`respects_timeouts`: over gloo; see `GlooWaits`."""
        self._groups, self._work, self._heeds_time_outs = groups, work, respects_timeouts
        self._tensors = tensors  # the backend uses them until the wait is over

    def wait(self) -> None:
        if self._work is not None:
            self._groups.wait(self._work, self._heeds_time_outs)

    @property
    def done(self) -> bool:
        return self._work is None or self._work.is_completed()


class ProcessGroups:
    """The process groups of one rank in one generation."""

    def __init__(
        self, grid: RankGrid, rank: int, device: torch.device, regroup: Regroup, progress: Progress | None = None
    ):
        """`regroup`: makes the groups; it is kept if `connect` to a later generation may follow. `progress` records
        which rank is waited for before that."""
        self._grid, self._rank, self._device, self._regroup = grid, rank, device, regroup
        self._progress = progress or Progress()
        self._ranks: dict[Axis, list[int]] = {axis: grid.group(axis, rank) for axis in grid.axes}
        self._indices = {axis: ranks.index(rank) for axis, ranks in self._ranks.items()}
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._is_interrupted = False
        self._gloo_waits = GlooWaits(self._interrupted) if device.type == "cpu" else None

    def connect(self, store: dist.Store) -> None:
        """Meet the other ranks through `store`. May be interrupted. Raises PeerLost."""
        with naming_lost_peers(self._interrupted):
            self._wait_for_all(store)
            self._groups = self._regroup.make(store, self._rank, self._grid.world_size, self._members())
            if self._device.type == "cuda":
                self._open_channels()
        self.confirm()

    def _wait_for_all(self, store: dist.Store) -> None:
        """Return once all ranks are here: from then on one that does not answer is dead, and is not waited for."""
        missing, last = 0, self._grid.world_size - 1
        store.set(f"here/{self._rank}", "")
        if store.add("here", 1) > last:
            store.set("all-here", "")
        while True:
            self.confirm()
            try:
                store.wait(["all-here"], _POLL)
                return
            except dist.DistStoreError:
                while missing < last and store.check([f"here/{missing}"]):
                    missing += 1
                self._progress.waits_for(missing, CONNECTING_CHANNEL, sending=False)

    def _members(self) -> dict[str, list[int]]:
        # A group's name counts the groups that its members have made before, so all members must have made the same
        # number: the embedding's group, which ranks between the ends do not have, comes last.
        named: list[tuple[str, Axis]] = [("tensor", "tensor"), ("data", "data")]
        named += [(direction, "pipeline") for direction in _DIRECTIONS]
        named += [(axis, axis) for axis in _LATER]
        return {name: self._ranks[axis] for name, axis in named if len(self._ranks.get(axis, ())) > 1}

    def _open_channels(self) -> None:
        """Use every NCCL communicator once, in one order on all ranks: each is created at its first use, in which its
        members' hosts wait for each other, which must not happen within a step."""
        probe = torch.zeros(1, device=self._device)
        for axis in ("world", "tensor", "data", *_LATER):
            if axis in self._groups:
                self.start_all_reduce(axis, probe, largest=False).wait()
        own_index, stages = self._indices["pipeline"], len(self._ranks["pipeline"])
        neighbours = (1, stages - 1)
        pairs = [(a, b) for a in range(stages) for b in range(stages) if a != b and (a - b) % stages in neighbours]
        for source, to in pairs:
            if own_index == source:
                self.send(to, probe).wait()
            elif own_index == to:
                self.receive(source, probe).wait()
            torch.cuda.synchronize(self._device)

    def start_all_reduce(self, axis: Axis, tensor: torch.Tensor, largest: bool) -> Handle:
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        with naming_lost_peers(self._interrupted):
            return self._started(dist.all_reduce(tensor, op=op, group=self._groups[axis], async_op=True), True, tensor)

    def start_all_gather(self, axis: Axis, out: torch.Tensor, tensor: torch.Tensor) -> Handle:
        with naming_lost_peers(self._interrupted):
            work = all_gather_single(out, tensor, group=self._groups[axis], async_op=True)
            return self._started(work, True, out, tensor)

    def start_reduce_scatter(self, axis: Axis, out: torch.Tensor, tensor: torch.Tensor) -> Handle:
        with naming_lost_peers(self._interrupted):
            work = reduce_scatter_single(out, tensor, group=self._groups[axis], async_op=True)
            return self._started(work, False, out, tensor)

    def _started(self, work: dist.Work | None, respects_timeouts: bool, *tensors: torch.Tensor) -> Handle:
        if work is not None and self._gloo_waits is not None:
            self._gloo_waits.started(work, respects_timeouts)
        return _Work(self, work, respects_timeouts, *tensors)

    def start_all_to_all(self, axis: Axis, outgoing: Sequence[Tensors], incoming: Sequence[Tensors]) -> Handle:
        group, peers = self._groups[axis], self._ranks[axis]
        operations = [
            dist.P2POp(kind, tensor, peer, group)
            for kind, tensors in ((dist.irecv, incoming), (dist.isend, outgoing))
            for index, peer in enumerate(peers)
            if index != self._indices[axis]
            for tensor in tensors[index]
        ]
        with naming_lost_peers(self._interrupted):
            works = dist.batch_isend_irecv(operations) if operations else []
        return Started([_Work(self, work, respects_timeouts=False) for work in works])

    def send(self, stage: int, tensor: torch.Tensor) -> Transfer:
        group = self._groups[_DIRECTIONS[stage < self._indices["pipeline"]]]
        with naming_lost_peers(self._interrupted):
            return _Work(self, dist.isend(tensor, self._ranks["pipeline"][stage], group=group), False, tensor)

    def receive(self, stage: int, tensor: torch.Tensor) -> Handle:
        group = self._groups[_DIRECTIONS[stage > self._indices["pipeline"]]]
        with naming_lost_peers(self._interrupted):
            return _Work(self, dist.irecv(tensor, self._ranks["pipeline"][stage], group=group), False, tensor)

    def wait(self, work: dist.Work, respects_timeouts: bool) -> None:
        """Return once `work` is done, or over NCCL once it is queued. Raises PeerLost."""
        with naming_lost_peers(self._interrupted):
            if self._gloo_waits is None:
                work.wait()
            elif respects_timeouts:
                self._gloo_waits.wait_in_slices(work)
            else:
                self._gloo_waits.by_thread(work)

    def interrupt(self) -> None:
        self._is_interrupted = True
        self._regroup.abort()

    def _interrupted(self) -> bool:
        return self._is_interrupted

    def confirm(self) -> None:
        if self._is_interrupted:
            raise PeerLost("communication was interrupted")

    def close(self) -> None:
        self.interrupt()
        self._groups.clear()
        all_ended = self._gloo_waits is None or self._gloo_waits.end()
        self._regroup.leave(all_ended)
