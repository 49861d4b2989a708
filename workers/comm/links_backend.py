"""Communication over our own TCP links, for tensors in host memory; for several ranks on one GPU, which NCCL does not
support, through copies there.

Every rank's part is sent directly to the ranks that need it, which moves the minimum number of bytes, and sums are
added in the order of ranks, so that the same layout always gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from manta.workers.comm.backend import Backend, Handle, Started, Tensors, Transfer
from manta.workers.comm.grid import AXES, Axis, RankGrid
from manta.workers.comm.links import Links, Operation
from manta.workers.comm.secret import Secret
from manta.workers.liveness.progress import Progress
from manta.workers.system.sockets import PortRange

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
        ranks = {axis: grid.group(axis, rank) for axis in grid.axes}
        near = {peer for axis, along in ranks.items() if axis != "world" for peer in along}
        # Sums over all ranks go through rank 0, so all ranks are linked to it.
        peers = near | linked_through_first(grid, rank)
        self.links = Links(rank, peers, store, secret, host, is_over, progress, ports)
        self._pipeline = ranks["pipeline"]
        self._along = {
            axis: Collectives(self.links, AXES.index(axis), along, star=axis == "world")
            for axis, along in ranks.items()
        }

    def start_all_reduce(self, axis: Axis, tensor: torch.Tensor, largest: bool) -> Handle:
        return self._along[axis].start_all_reduce(tensor, maximum if largest else _add)

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


# Up to this size latency matters, not volume: one rank adds for all.
SMALL_BYTES = 32 * 1024

_Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _add(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """In-place sum."""
    return total.add_(part)


def maximum(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """In-place maximum."""
    return torch.maximum(total, part, out=total)


class Collectives:
    """Collectives along one axis. `ranks` are global, in order along the axis; tensors are contiguous.

    `star`: all are linked to the first rank only, so only `all_reduce` is there.
    """

    def __init__(self, links: Links, channel: int, ranks: list[int], star: bool = False):
        self._links, self._channel, self._ranks, self._star = links, channel, ranks, star
        self._index = ranks.index(links.rank)
        self._others = [i for i in range(len(ranks)) if i != self._index]

    def _send(self, tensor: torch.Tensor, to: int) -> Operation:
        return self._links.send(self._ranks[to], self._channel, tensor)

    def _receive(self, tensor: torch.Tensor, source: int) -> Operation:
        return self._links.receive(self._ranks[source], self._channel, tensor)

    def start_all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Started:
        """Begin to gather every rank's `tensor`, one after the other, into `out`."""
        parts = out.view(len(self._ranks), -1)
        works = [self._receive(parts[i], i) for i in self._others]
        works += [self._send(tensor, i) for i in self._others]
        parts[self._index].copy_(tensor.view(-1))
        return Started(works)

    def start_reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, combine: _Combine = _add) -> Started:
        """Begin to bring this rank's part of the sum of every rank's `tensor` into `out`, which may be that part of
        `tensor` itself; otherwise `tensor` must not change until the wait is over."""
        parts = tensor.view(len(self._ranks), -1)
        received = parts.new_empty((len(self._others), parts.shape[1]))
        works = [self._receive(received[at], i) for at, i in enumerate(self._others)]
        works += [self._send(parts[i], i) for i in self._others]

        def finish() -> None:
            flat = out.view(-1)
            # In the order of ranks, for the same bits every time. The sum is in the first one's memory if that is ours:
            # `out` may hold a part that is yet to be added.
            in_order = [*received[: self._index], parts[self._index], *received[self._index :]]
            total = flat.copy_(in_order[0]) if self._index == 0 else in_order[0]
            for part in in_order[1:]:
                combine(total, part)
            if self._index > 0:
                flat.copy_(total)

        return Started(works, finish)

    def start_all_to_all(self, outgoing: Sequence[Tensors], incoming: Sequence[Tensors]) -> Started:
        """Begin to send `outgoing[i]` to rank i, in order, and to receive `incoming[i]`; nothing goes to this rank."""
        works = [self._receive(tensor, i) for i in self._others for tensor in incoming[i]]
        return Started(works + [self._send(tensor, i) for i in self._others for tensor in outgoing[i]])

    def start_all_reduce(self, tensor: torch.Tensor, combine: _Combine = _add) -> Started:
        """Begin to sum every rank's `tensor` in place, with the same bits on every rank. Nothing else may be started
        along the axis before its wait: part of its messages are sent then."""
        flat = tensor.view(-1)
        size = len(self._ranks)
        if size == 2:
            received = torch.empty_like(flat)
            works = [self._receive(received, self._others[0]), self._send(flat, self._others[0])]
            return Started(works, lambda: combine(flat, received))
        if self._star or flat.numel() * flat.element_size() <= SMALL_BYTES:
            return self._start_through_first(flat, combine)
        padded = flat.new_zeros(-(-flat.numel() // size) * size)
        padded[: flat.numel()] = flat
        part = padded.new_empty(padded.numel() // size)
        scattering = self.start_reduce_scatter(part, padded, combine)

        def finish() -> None:
            scattering.wait()
            self.start_all_gather(padded, part).wait()
            flat.copy_(padded[: flat.numel()])

        return Started((), finish)

    def _start_through_first(self, flat: torch.Tensor, combine: _Combine) -> Started:
        if self._index > 0:
            sending = self._send(flat, 0)

            def receive() -> None:
                sending.wait()  # the sum overwrites what is sent
                self._receive(flat, 0).wait()

            return Started((), receive)
        received = [torch.empty_like(flat) for _ in self._others]
        works = [self._receive(part, i) for part, i in zip(received, self._others, strict=True)]

        def finish() -> None:
            for part in received:
                combine(flat, part)
            Started([self._send(flat, i) for i in self._others]).wait()

        return Started(works, finish)


class HostStaged:
    """Does what `hosts` does for device tensors, on copies in host memory."""

    def __init__(self, hosts: Backend):
        self._hosts = hosts

    def start_all_reduce(self, axis: Axis, tensor: torch.Tensor, largest: bool) -> Handle:
        host = tensor.cpu()
        return _copied_back(self._hosts.start_all_reduce(axis, host, largest), [tensor], [host])

    def start_all_gather(self, axis: Axis, out: torch.Tensor, tensor: torch.Tensor) -> Handle:
        host = _host_like(out)
        return _copied_back(self._hosts.start_all_gather(axis, host, tensor.cpu()), [out], [host])

    def start_reduce_scatter(self, axis: Axis, out: torch.Tensor, tensor: torch.Tensor) -> Handle:
        host = _host_like(out)
        return _copied_back(self._hosts.start_reduce_scatter(axis, host, tensor.cpu()), [out], [host])

    def start_all_to_all(self, axis: Axis, outgoing: Sequence[Tensors], incoming: Sequence[Tensors]) -> Handle:
        sent = [[tensor.cpu() for tensor in tensors] for tensors in outgoing]
        received = [[_host_like(tensor) for tensor in tensors] for tensors in incoming]
        work = self._hosts.start_all_to_all(axis, sent, received)
        return _copied_back(work, _flat(incoming), _flat(received))

    def send(self, stage: int, tensor: torch.Tensor) -> Transfer:
        return self._hosts.send(stage, tensor.cpu())

    def receive(self, stage: int, tensor: torch.Tensor) -> Handle:
        host = _host_like(tensor)
        return _copied_back(self._hosts.receive(stage, host), [tensor], [host])

    def interrupt(self) -> None:
        self._hosts.interrupt()

    def confirm(self) -> None:
        self._hosts.confirm()

    def close(self) -> None:
        self._hosts.close()


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _flat(lists: Sequence[Tensors]) -> list[torch.Tensor]:
    return [tensor for tensors in lists for tensor in tensors]


def _copied_back(work: Handle, tensors: Tensors, hosts: Tensors) -> Started:
    """`work`, after which `hosts` are copied into `tensors`."""

    def copy() -> None:
        for tensor, host in zip(tensors, hosts, strict=True):
            tensor.copy_(host)

    return Started([work], copy)
