"""The communication of one generation, built and torn down as a unit.

Layers and the pipeline hold one `Comm` for the life of the process and name the axis they talk along; what is behind
the axes belongs to a generation, so a later generation can be put under a live model (`close`, then `connect`).
On CPU that is the links of `workers.comm.links`, on GPUs process groups of torch.distributed, where every axis has a
communicator and a stream of its own. An axis of size 1 costs nothing, so a single process needs neither.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from workers.comm.collectives import Collectives, Tensors, add, maximum
from workers.comm.compat import all_gather_single, reduce_scatter_single
from workers.comm.grid import Axis, RankGrid
from workers.comm.links import Links, Operation, address_towards
from workers.comm.shared_work import Exchange
from workers.comm.step_parts import Part, StepParts
from workers.errors import PeerLost
from workers.liveness.progress import Progress

# A dead peer is noticed through its process long before this; it only bounds a wait that nobody supervises.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
AXES: tuple[Axis, ...] = ("tensor", "pipeline", "data", "embedding", "world")
_PART: dict[Axis, Part] = {"tensor": "tensor_communication", "data": "data_communication"}
# Messages towards later and towards earlier ranks of a pipeline: on GPUs each has its own communicator, so that two
# neighbours that send to each other never wait for each other.
_DIRECTIONS = ("pipeline_up", "pipeline_down")


class Handle(Protocol):
    """A communication under way; its tensors must not be touched before `wait` has returned.

    On a CPU `wait` raises PeerLost when the other side is gone. With NCCL only the compute stream waits, and a lost
    peer ends the process through NCCL's watchdog.
    """

    def wait(self) -> None: ...


class _Done:
    """A communication that needed none."""

    def wait(self) -> None:
        """Return at once."""


class _Work:
    """A torch.distributed operation under way."""

    def __init__(self, work: dist.Work | None, *tensors: torch.Tensor):
        self._work = work
        self._tensors = tensors  # the backend uses them until the wait is over

    def wait(self) -> None:
        if self._work is not None:
            with _naming_lost_peers():
                self._work.wait()

    @property
    def done(self) -> bool:
        return self._work is None or self._work.is_completed()


class _All:
    """Several communications that are waited for as one."""

    def __init__(self, works: Sequence[Handle]):
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _Staged:
    """An operation of the links on host copies of device tensors."""

    def __init__(self, work: Handle, finish: Callable[[], object]):
        self._work, self._finish = work, finish

    def wait(self) -> None:
        self._work.wait()
        self._finish()


class _Timed:
    """A handle whose wait counts as a part of the step."""

    def __init__(self, work: Handle, parts: StepParts, name: Part):
        self._work, self._parts, self._name = work, parts, name

    def wait(self) -> None:
        with self._parts.part(self._name):
            self._work.wait()


_DEVICE_ERRORS = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


@contextmanager
def _naming_lost_peers() -> Iterator[None]:
    """Turn the backends' RuntimeErrors into PeerLost: inside a collective they mean that a peer went away, unless it is
    the device that speaks."""
    try:
        yield
    except _DEVICE_ERRORS:
        raise
    except RuntimeError as error:
        raise PeerLost(f"communication failed: {str(error).splitlines()[0]}") from error


class Comm:
    """All communication of one rank, by axis. Tensors must be contiguous."""

    def __init__(self, grid: RankGrid, rank: int, device: torch.device, shared_device: bool = False):
        """`shared_device`: other ranks use the same GPU, which NCCL does not allow; tensors then travel through
        host memory, over the links."""
        self.grid, self.rank, self.device = grid, rank, device
        self.parts = StepParts(device)
        self.progress = Progress()
        """Where this rank stands, for whoever watches it."""
        self.generation = 0
        self._by_links = device.type == "cpu" or shared_device
        self._staged = shared_device and device.type != "cpu"
        self._ranks: dict[str, list[int]] = {axis: grid.group(axis, rank) for axis in (*AXES, "context")}
        self._sizes = {axis: len(ranks) for axis, ranks in self._ranks.items()}
        self._indices = {axis: ranks.index(rank) for axis, ranks in self._ranks.items()}
        self._links: Links | None = None
        self._over = -1
        self._over_after_step = -1
        self._cut_until = 0.0
        self._lock = threading.Lock()
        self._collectives: dict[str, Collectives] = {}
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        self.exchange = Exchange()
        """Of all ranks, for the thread that writes checkpoints: its messages must not mix with a step's."""
        self._beside: Links | None = None

    def connect(self, store: dist.Store, generation: int, store_host: str) -> None:
        """Meet the other ranks of `generation` through `store` on `store_host`. Raises PeerLost."""
        self.progress.belongs_to(generation)
        self.progress.at("connecting")
        self.generation = generation
        time.sleep(max(0.0, self._cut_until - time.monotonic()))
        self.raise_if_over()
        prefixed = dist.PrefixStore(f"generation-{generation}", store)
        host = address_towards(store_host)
        with _naming_lost_peers():
            if self._by_links:
                self._connect_links(prefixed, generation, host)
            else:
                dist.init_process_group(
                    backend="nccl",
                    store=prefixed,
                    rank=self.rank,
                    world_size=self.grid.world_size,
                    timeout=COLLECTIVE_TIMEOUT,
                )
                self._connect_groups()
                self._open_channels()
            beside = dist.PrefixStore("exchange", prefixed)
            self._beside = Links(self.rank, self._star(), beside, generation, host, self._is_over)
            self.exchange = Exchange(self._beside, self.size("world"))
        self.raise_if_over()

    def _star(self) -> set[int]:
        """Whom this rank talks to where everything goes through rank 0."""
        return set(self._ranks["world"]) if self.rank == 0 else {0}

    def _connect_links(self, store: dist.Store, generation: int, host: str) -> None:
        near = {peer for axis in AXES if axis != "world" for peer in self._ranks[axis]}
        # Sums over all ranks go through rank 0, so everybody knows it and it knows everybody.
        self._links = Links(self.rank, near | self._star(), store, generation, host, self._is_over, self.progress)
        for channel, axis in enumerate(AXES):
            self._collectives[axis] = Collectives(self._links, channel, self._ranks[axis], star=axis == "world")

    def _connect_groups(self) -> None:
        self._groups["world"] = dist.group.WORLD
        # A group's name counts the groups that its members have made before, so all must have made as many: the
        # embedding's, which ranks between the ends do not have, comes last.
        named: list[tuple[str, Axis]] = [("tensor", "tensor"), ("data", "data")]
        named += [(direction, "pipeline") for direction in _DIRECTIONS]
        for name, axis in (*named, ("embedding", "embedding")):
            if self.size(axis) > 1:
                # Only the members meet, and order along the axis is the order of ranks.
                self._groups[name] = dist.new_group(
                    self._ranks[axis], timeout=COLLECTIVE_TIMEOUT, use_local_synchronization=True, group_desc=name
                )

    def _open_channels(self) -> None:
        """Use every NCCL communicator once, in one order on all ranks: each is made at its first use, in which its
        members' hosts wait for each other, and a step has no place for that."""
        probe = torch.zeros(1, device=self.device)
        for axis in ("world", "tensor", "data", "embedding"):
            self.all_reduce(axis, probe)
        mine, stages = self.index("pipeline"), self.size("pipeline")
        for source, to in ((a, b) for a in range(stages) for b in range(stages) if (a - b) % stages in (1, stages - 1)):
            if mine == source:
                self.send(to, probe).wait()
            elif mine == to:
                self.receive(source, probe).wait()
            torch.cuda.synchronize(self.device)

    def end(self, generation: int) -> None:
        """Called by another thread: all generations up to this one are over. Whoever communicates in one gets
        PeerLost, at the latest with the next micro-batch, and cannot connect to one. Over NCCL a wait that has begun
        is not ended: there the process is killed."""
        with self._lock:
            self._over = max(self._over, generation)
            if self._is_over():
                self._interrupt()

    def end_after_step(self, generation: int) -> None:
        """Called by another thread: the generations up to this one are over once the step under way is committed. The
        first rank that gets there leaves; the others cannot commit another step without it, so all end at the same."""
        self._over_after_step = max(self._over_after_step, generation)

    def leave_between_steps(self) -> None:
        """Raises PeerLost between two steps where the generation was to be left then."""
        if self.generation <= self._over_after_step:
            raise PeerLost("was told to rest after the step")

    def cut(self, seconds: float) -> None:
        """As if the network had failed: all connections break, and none is made again for `seconds`."""
        self._cut_until = time.monotonic() + seconds
        with self._lock:
            self._interrupt()

    def _interrupt(self) -> None:
        for links in (self._links, self._beside):
            if links is not None:
                links.interrupt()

    def _is_over(self) -> bool:
        return self.generation <= self._over

    def raise_if_over(self) -> None:
        """Raise PeerLost when the generation is over."""
        if self._is_over():
            raise PeerLost(f"generation {self.generation} is over")

    def close(self) -> None:
        """Leave this generation; peers that are still in it notice at once. `connect` to a later one may follow."""
        self.progress.at("resting")
        self.end(self.generation)  # frees the thread that writes checkpoints
        with self._lock:
            for links in (self._links, self._beside):
                if links is not None:
                    links.close()
            self._links = self._beside = None
        if dist.is_initialized():
            dist.destroy_process_group()
        self._collectives.clear()
        self._groups.clear()
        self.exchange = Exchange()

    @property
    def idle_seconds(self) -> float:
        """Time spent waiting for other ranks in this generation; 0 on GPUs, whose host does not know."""
        return self._links.idle_seconds if self._links is not None else 0.0

    @property
    def own_seconds(self) -> float:
        """Time of the step so far that this rank did not wait for others; 0 on GPUs."""
        return self.progress.own_seconds(self.idle_seconds) if self._by_links else 0.0

    def size(self, axis: Axis) -> int:
        """Number of ranks along `axis`."""
        return self._sizes[axis]

    def index(self, axis: Axis) -> int:
        """This rank's position along `axis`."""
        return self._indices[axis]

    def all_reduce(self, axis: Axis, tensor: torch.Tensor, largest: bool = False) -> None:
        """Sum of `tensor` over `axis` in place, or its element-wise maximum with `largest`."""
        if self._sizes[axis] > 1:
            self._timed(axis, self._start_all_reduce(axis, tensor, largest)).wait()

    def start_all_reduce(self, axis: Axis, tensor: torch.Tensor) -> Handle:
        """Begin to sum `tensor` over `axis` in place. Nothing else may be started along the axis before its wait."""
        if self._sizes[axis] == 1:
            return _Done()
        return self._timed(axis, self._start_all_reduce(axis, tensor, largest=False))

    def all_gather(self, axis: Axis, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Concatenation of every rank's `tensor` along dimension 0, into `out` where it is given."""
        out, work = self.start_all_gather(axis, tensor, out)
        work.wait()
        return out

    def start_all_gather(
        self, axis: Axis, tensor: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Handle]:
        """Begin to concatenate every rank's `tensor` along dimension 0: (result, handle)."""
        out, work = self._start_all_gather(axis, tensor, out)
        return out, self._timed(axis, work)

    def reduce_scatter(self, axis: Axis, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's slice along dimension 0 of the sum of every rank's `tensor`."""
        out, work = self.start_reduce_scatter(axis, tensor)
        work.wait()
        return out

    def start_reduce_scatter(
        self, axis: Axis, tensor: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Handle]:
        """Begin to sum every rank's `tensor` and keep this rank's slice along dimension 0: (result, handle)."""
        out, work = self._start_reduce_scatter(axis, tensor, out)
        return out, self._timed(axis, work)

    def start_all_to_all(self, axis: Axis, outgoing: Sequence[Tensors], incoming: Sequence[Tensors]) -> Handle:
        """Begin to send the tensors `outgoing[i]` to the rank at index i of `axis`, in their order, and to receive into
        `incoming[i]` what it sends here; nothing goes to this rank itself."""
        return self._timed(axis, self._start_all_to_all(axis, outgoing, incoming))

    def _timed(self, axis: Axis, work: Handle) -> Handle:
        return _Timed(work, self.parts, _PART.get(axis, "other")) if self.parts.measuring else work

    def _start_all_reduce(self, axis: Axis, tensor: torch.Tensor, largest: bool) -> Handle:
        self.progress.entered(axis)
        if self._links is not None:
            host = tensor.cpu()
            work = self._collectives[axis].start_all_reduce(host, maximum if largest else add)
            return _Staged(work, lambda: tensor.copy_(host)) if self._staged else work
        with _naming_lost_peers():
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            return _Work(dist.all_reduce(tensor, op=op, group=self._groups[axis], async_op=True), tensor)

    def _start_all_gather(
        self, axis: Axis, tensor: torch.Tensor, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, Handle]:
        size = self._sizes[axis]
        if size == 1:
            return (tensor, _Done()) if out is None else (out.copy_(tensor), _Done())
        if out is None:
            out = tensor.new_empty((tensor.shape[0] * size, *tensor.shape[1:]))
        self.progress.entered(axis)
        return out, self._transform(
            out,
            tensor,
            lambda into, of: self._collectives[axis].start_all_gather(into, of),
            lambda: all_gather_single(out, tensor, group=self._groups[axis], async_op=True),
        )

    def _start_reduce_scatter(
        self, axis: Axis, tensor: torch.Tensor, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, Handle]:
        size = self._sizes[axis]
        if size == 1:
            return (tensor, _Done()) if out is None else (out.copy_(tensor), _Done())
        if out is None:
            out = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
        self.progress.entered(axis)
        return out, self._transform(
            out,
            tensor,
            lambda into, of: self._collectives[axis].start_reduce_scatter(into, of),
            lambda: reduce_scatter_single(out, tensor, group=self._groups[axis], async_op=True),
        )

    def _start_all_to_all(self, axis: Axis, outgoing: Sequence[Tensors], incoming: Sequence[Tensors]) -> Handle:
        if self._sizes[axis] == 1:
            return _Done()
        self.progress.entered(axis)
        if self._links is not None:
            if not self._staged:
                return self._collectives[axis].start_all_to_all(outgoing, incoming)
            out = [[tensor.cpu() for tensor in tensors] for tensors in outgoing]
            into = [[torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors] for tensors in incoming]
            work = self._collectives[axis].start_all_to_all(out, into)
            devices, hosts = ([tensor for tensors in each for tensor in tensors] for each in (incoming, into))
            return _Staged(work, lambda: [device.copy_(host) for device, host in zip(devices, hosts, strict=True)])
        with _naming_lost_peers():
            group, others = self._groups[axis], [i for i in range(self._sizes[axis]) if i != self._indices[axis]]
            operations = [
                dist.P2POp(kind, tensor, self._ranks[axis][i], group)
                for kind, tensors in ((dist.irecv, incoming), (dist.isend, outgoing))
                for i in others
                for tensor in tensors[i]
            ]
            works = dist.batch_isend_irecv(operations) if operations else []
            return _All([_Work(work) for work in works])

    def _transform(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        by_links: Callable[[torch.Tensor, torch.Tensor], Handle],
        by_group: Callable[[], Any],
    ) -> Handle:
        """Start a collective from `tensor` into `out`."""
        if self._links is None:
            with _naming_lost_peers():
                return _Work(by_group(), out, tensor)
        if not self._staged:
            return by_links(out, tensor)
        host = torch.empty(out.shape, dtype=out.dtype)
        return _Staged(by_links(host, tensor.cpu()), lambda: out.copy_(host))

    def send(self, stage: int, tensor: torch.Tensor) -> Transfer:
        """Start sending `tensor` to rank `stage` of the same pipeline; never blocks. Messages between two ranks in one
        direction arrive in the order in which they were sent."""
        self.progress.entered("sent")
        peer = self._ranks["pipeline"][stage]
        if self._links is not None:
            return self._links.send(peer, AXES.index("pipeline"), tensor.cpu())
        with _naming_lost_peers():
            group = self._groups[_DIRECTIONS[stage < self._indices["pipeline"]]]
            return _Work(dist.isend(tensor, peer, group=group), tensor)

    def receive(self, stage: int, tensor: torch.Tensor) -> Handle:
        """Start receiving into `tensor` from rank `stage` of the same pipeline."""
        self.progress.entered("received")
        peer = self._ranks["pipeline"][stage]
        if self._links is not None:
            host = torch.empty(tensor.shape, dtype=tensor.dtype) if self._staged else tensor
            work = self._links.receive(peer, AXES.index("pipeline"), host)
            waiting = _Arriving(work, self._links, self.parts)
            return _Staged(waiting, lambda: tensor.copy_(host)) if self._staged else waiting
        with _naming_lost_peers():
            group = self._groups[_DIRECTIONS[stage > self._indices["pipeline"]]]
            # On a GPU the wait for a message and its transfer cannot be told apart: both count as bubble.
            return _Timed(_Work(dist.irecv(tensor, peer, group=group), tensor), self.parts, "bubble")

    def barrier(self) -> None:
        """Wait until every rank of the generation is here."""
        here = torch.zeros(1, device=self.device)
        self.all_reduce("world", here)
        here.item()  # on a GPU only this makes the host wait


class Transfer(Handle, Protocol):
    """A send under way."""

    @property
    def done(self) -> bool:
        """Whether the tensor is no longer needed."""


class _Arriving:
    """A message of the pipeline that is waited for: while nothing moves, the rank stands in the bubble."""

    def __init__(self, work: Operation, links: Links, parts: StepParts):
        self._work, self._links, self._parts = work, links, parts

    def wait(self) -> None:
        """Return once the message is there."""
        before = self._links.idle_seconds
        with self._parts.part("pipeline_communication"):
            self._work.wait()
        self._parts.move("pipeline_communication", "bubble", self._links.idle_seconds - before)
