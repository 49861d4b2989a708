"""The communication of one rank along the axes of the layout, through successive generations.

Layers and the pipeline hold one `Comm` for the life of the process and specify the axis to communicate along.
Connections belong to a generation, so a live model can be moved to a later generation (`close`, then `connect`). An
axis of size 1 costs nothing, so a single process needs neither call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from manta.workers.comm.backend import DONE, Backend, Handle, Marked, MarkedTransfer, Tensors, Transfer, trail_for
from manta.workers.comm.grid import AXES, Axis, RankGrid
from manta.workers.comm.links import Links
from manta.workers.comm.links_backend import HostStaged, LinksBackend, linked_through_first
from manta.workers.comm.lost_peers import naming_lost_peers
from manta.workers.comm.process_groups import ProcessGroups
from manta.workers.comm.regroup import regroup_for
from manta.workers.comm.repair_self_test import RepairSelfTest, try_repair
from manta.workers.comm.secret import Secret
from manta.workers.comm.shared_work import SharedWork
from manta.workers.errors import PeerLost
from manta.workers.liveness.progress import Progress
from manta.workers.protocol.requests import Requests
from manta.workers.system.sockets import PortRange, address_facing
from manta.workers.timing.step_phases import StepPhase, StepPhases

BackendKind = Literal["links", "process_groups"]

_COUNTED_AS: dict[Axis, StepPhase] = {
    "tensor": "tensor_communication",
    "data": "data_communication",
    "holders": "data_communication",
    "context": "context_communication",
    "expert_holders": "data_communication",
}


class Comm:
    """All communication of one rank, by axis. Tensors must be contiguous. A collective on tensors without elements does
    not communicate: no rank of the axis then has any."""

    def __init__(
        self,
        grid: RankGrid,
        rank: int,
        device: torch.device,
        backend: BackendKind | None = None,
        progress: Progress | None = None,
        ports: PortRange | None = None,
        in_place: bool = False,
    ):
        """`backend`: our links, which use host memory if `device` is a GPU (several ranks may then share it), or
        process groups of torch.distributed; by default links on a CPU and process groups on a GPU. `progress`: record
        of this rank's position, for the agent that watches it; by default a private one. `ports`: for our links to
        listen on, None: any. `in_place`: whether the process should survive the loss of a peer over NCCL, as it does
        over everything else."""
        self.grid, self.rank, self.device, self._ports = grid, rank, device, ports
        self.generation = 0
        self._kind = backend or ("links" if device.type == "cpu" else "process_groups")
        self.progress = progress or Progress()
        self._trail = trail_for(device, self.progress) if self._kind == "process_groups" else None
        self.step = StepPhases(device, self.progress, trail=self._trail)
        """What this rank is doing at any moment; `progress` follows it."""
        self.requests = Requests()
        """What this rank is asked for, which the step's agreement passes on."""
        self.shared_work = SharedWork()
        """Links between all ranks for the thread that writes checkpoints, whose messages must not mix with a step's."""
        self._ranks = {axis: grid.group(axis, rank) for axis in AXES}
        self._sizes: dict[str, int] = {axis: len(ranks) for axis, ranks in self._ranks.items()}
        self._indices: dict[str, int] = {axis: ranks.index(rank) for axis, ranks in self._ranks.items()}
        self._regroup = regroup_for(device, in_place)
        self._backend: Backend | None = None
        self._work_links: Links | None = None
        self._last_ended = -1
        self._lock = threading.Lock()

    def connect(self, store: dist.Store, generation: int, store_host: str, secret: str) -> None:
        """Connect to the other ranks of `generation` through `store` on `store_host`. `secret`: known to these ranks
        only, see `Secret`; process groups do not use it. Raises PeerLost."""
        self.progress.belongs_to(generation)
        self.step.enter("connecting")
        self.generation = generation
        self.raise_if_over()
        prefixed = dist.PrefixStore(f"generation-{generation}", store)
        host = address_facing(store_host)
        with naming_lost_peers(self.is_over):
            self._connect_backend(prefixed, host, Secret(secret, generation, "training"))
            peers, work_store = linked_through_first(self.grid, self.rank), dist.PrefixStore("shared-work", prefixed)
            shared = Secret(secret, generation, "shared work")
            self._work_links = Links(self.rank, peers, work_store, shared, host, self.is_over, ports=self._ports)
        self.shared_work = SharedWork(self._work_links, self.size("world"))
        self.raise_if_over()

    def try_repair(self, store: dist.Store, generation: int) -> RepairSelfTest:
        """Before `connect` to `generation`, with all its ranks: test whether its groups can be repaired in place. If
        not, the process will not survive the loss of a peer."""
        self.progress.belongs_to(generation)
        self.step.enter("connecting")
        self.generation = generation
        repair_store = dist.PrefixStore(f"repair-self-test-{generation}", store)
        result = try_repair(
            *(self._new_groups, repair_store, self.rank, self.size("world"), self.device), self._regroup.way
        )
        with self._lock:
            self._backend = None
        if not result.passed:
            self._regroup.forget()
            self._regroup = regroup_for(self.device, in_place=False)
        return result

    def _new_groups(self) -> ProcessGroups:
        groups = ProcessGroups(self.grid, self.rank, self.device, self._regroup, self.progress)
        with self._lock:
            self._backend = groups  # from now on it can be interrupted
        self.raise_if_over()
        return groups

    def _connect_backend(self, store: dist.Store, host: str, secret: Secret) -> None:
        if self._kind == "process_groups":
            self._new_groups().connect(store)
            return
        links = LinksBackend(self.grid, self.rank, store, secret, host, self.is_over, self.progress, self._ports)
        self._backend = links if self.device.type == "cpu" else HostStaged(links)

    def end(self, generation: int) -> None:
        """Called by another thread: all generations up to this one are over. A thread that communicates in one gets
        PeerLost, at the latest with the next micro-batch, and cannot connect to one."""
        with self._lock:
            self._last_ended = max(self._last_ended, generation)
            if self.is_over():
                self._interrupt()

    def break_connections(self) -> None:
        """Called by another thread: all connections break, as if the network had failed."""
        with self._lock:
            self._interrupt()

    def _interrupt(self) -> None:
        for connections in (self._backend, self._work_links):
            if connections is not None:
                connections.interrupt()

    def is_over(self) -> bool:
        """Whether the generation is over."""
        return self.generation <= self._last_ended

    def raise_if_over(self) -> None:
        """Raise PeerLost when the generation is over."""
        if self.is_over():
            raise PeerLost(f"generation {self.generation} is over")

    def settle(self) -> None:
        """Wait until the device has done all that was started: leaving groups may abort work that no host waits for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Leave this generation; peers that are still in it notice at once. `connect` to a later one may follow."""
        self.step.enter("resting")
        if self._trail is not None:
            self._trail.forget()
        self.end(self.generation)  # frees the thread that writes checkpoints
        with self._lock:
            for connections in (self._backend, self._work_links):
                if connections is not None:
                    connections.close()
            self._backend = self._work_links = None
        self.shared_work = SharedWork()

    def forget(self) -> None:
        """After `close`, free what was kept for a later generation, because another object joins it."""
        self._regroup.forget()

    @property
    def own_seconds(self) -> float:
        """Time of the step so far in which this rank did not wait for others. Over process groups the host does not
        know it: on a GPU it is that of an earlier step, measured by the device (`device_step_seconds`), on a CPU 0."""
        if self._kind == "links":
            return self.progress.own_seconds()
        return self.device_step_seconds[1] if self.device_step_seconds is not None else 0.0

    @property
    def step_seconds(self) -> float:
        """Time of the step so far, of which `own_seconds` is a part; on a GPU, of the same earlier step."""
        return self.device_step_seconds[0] if self.device_step_seconds is not None else self.progress.seconds()

    @property
    def measures_idle_seconds(self) -> bool:
        """Whether `idle_seconds` is known: only our links know when no data moves."""
        return self._kind == "links"

    def idle_seconds(self) -> float:
        """Time so far in which this rank has waited for others and no data moved."""
        return self.progress.idle_seconds

    @property
    def device_step_seconds(self) -> tuple[float, float] | None:
        """For the last step that was complete on the GPU when this one began: its time, and the part of it in which the
        GPU did not wait for others; None if unknown."""
        return self._trail.step_seconds if self._trail is not None else None

    def size(self, axis: Axis) -> int:
        """Number of ranks along `axis`."""
        return self._sizes[axis]

    def index(self, axis: Axis) -> int:
        """This rank's position along `axis`."""
        return self._indices[axis]

    def all_reduce(self, axis: Axis, tensor: torch.Tensor, largest: bool = False) -> None:
        """Sum of `tensor` over `axis` in place, or its element-wise maximum with `largest`."""
        self.start_all_reduce(axis, tensor, largest).wait()

    def start_all_reduce(self, axis: Axis, tensor: torch.Tensor, largest: bool = False) -> Handle:
        """Begin what `all_reduce` does. Nothing else may be started along the axis before its wait."""
        if self._sizes[axis] == 1 or not tensor.numel():
            return DONE
        work = self._entered(axis).start_all_reduce(axis, tensor, largest)
        return self._timed(axis, work, "all_reduce", (tensor,))

    def all_gather(self, axis: Axis, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Concatenation of every rank's `tensor` along dimension 0, into `out` if given."""
        out, work = self.start_all_gather(axis, tensor, out)
        work.wait()
        return out

    def start_all_gather(
        self, axis: Axis, tensor: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Handle]:
        """Begin to concatenate every rank's `tensor` along dimension 0: (result, handle)."""
        size = self._sizes[axis]
        if size == 1:
            return tensor if out is None else out.copy_(tensor), DONE
        if out is None:
            out = tensor.new_empty((tensor.shape[0] * size, *tensor.shape[1:]))
        if not tensor.numel():
            return out, DONE
        work = self._entered(axis).start_all_gather(axis, out, tensor)
        return out, self._timed(axis, work, "all_gather", (out,))

    def reduce_scatter(self, axis: Axis, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's slice along dimension 0 of the sum of every rank's `tensor`."""
        out, work = self.start_reduce_scatter(axis, tensor)
        work.wait()
        return out

    def start_reduce_scatter(
        self, axis: Axis, tensor: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Handle]:
        """Begin to sum every rank's `tensor` and keep this rank's slice along dimension 0: (result, handle)."""
        size = self._sizes[axis]
        if size == 1:
            return tensor if out is None else out.copy_(tensor), DONE
        if out is None:
            out = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
        if not tensor.numel():
            return out, DONE
        work = self._entered(axis).start_reduce_scatter(axis, out, tensor)
        return out, self._timed(axis, work, "reduce_scatter", (tensor,))

    def start_all_to_all(self, axis: Axis, outgoing: Sequence[Tensors], incoming: Sequence[Tensors]) -> Handle:
        """Begin to send the tensors `outgoing[i]` to the rank at index i of `axis`, in their order, and to receive into
        `incoming[i]` what it sends here; nothing goes to this rank itself. Tensors without elements are neither sent
        nor expected."""
        if self._sizes[axis] == 1:
            return DONE
        outgoing, incoming = ([[t for t in each if t.numel()] for each in lists] for lists in (outgoing, incoming))
        work = self._entered(axis).start_all_to_all(axis, outgoing, incoming)
        return self._timed(axis, work, "all_to_all", [tensor for tensors in outgoing for tensor in tensors])

    def send(self, stage: int, tensor: torch.Tensor) -> Transfer:
        """Start sending `tensor` to rank `stage` of the same pipeline; never blocks. Messages between two ranks in one
        direction arrive in the order in which they were sent."""
        work = self._entered("sent").send(stage, tensor)
        if self.step.recorder is not None:
            self.step.recorder.sent(self._ranks["pipeline"][stage], tensor.nbytes)
        if self._trail is None:
            return work
        peer, number = self._ranks["pipeline"][stage], self.progress.count("sent")
        return MarkedTransfer(work, self._trail, "pipeline", number, peer, sending=True)

    def receive(self, stage: int, tensor: torch.Tensor) -> Handle:
        """Start receiving into `tensor` from rank `stage` of the same pipeline."""
        work = self._entered("received").receive(stage, tensor)
        if self._trail is not None:
            peer, number = self._ranks["pipeline"][stage], self.progress.count("received")
            work = Marked(work, self._trail, "pipeline", number, peer)
        if self.step.parts.measuring:
            # Only over links can its wait be distinguished from its transfer: elsewhere both count as bubble.
            has_own_times = self._kind == "links"
            work = _TimedMessage(work, self.step) if has_own_times else _Timed(work, self.step, "bubble")
        if self.step.recorder is not None:
            work = self.step.recorder.received(work, self._ranks["pipeline"][stage], tensor.nbytes)
        return work

    def barrier(self) -> None:
        """Wait until every rank of the generation has called this."""
        here = torch.zeros(1, device=self.device)
        self.all_reduce("world", here)
        here.item()  # on a GPU only this makes the host wait
        self.confirm()

    def confirm(self) -> None:
        """To be called after the host has waited for the result of a communication on the device, before it is used:
        raises PeerLost if communication was aborted meanwhile, after which the result is meaningless."""
        if self._backend is not None:
            self._backend.confirm()

    def _entered(self, what: str) -> Backend:
        """The backend; counts one more of `what` in the record."""
        if self._backend is None:
            raise PeerLost("this rank has not joined a generation, or has left it")
        self.progress.entered(what)
        if self._trail is not None:
            self._trail.arrives(what, self.progress.count(what))
        if self.step.recorder is not None:
            self.step.recorder.issues()
        return self._backend

    def _timed(self, axis: Axis, work: Handle, operation: str, tensors: Sequence[torch.Tensor]) -> Handle:
        """`work`, an `operation` on `tensors`. Its wait counts as communication along `axis` if the step is measured,
        and is a slice if it is traced."""
        if self._trail is not None:
            work = Marked(work, self._trail, axis, self.progress.count(axis))
        if self.step.parts.measuring and axis != "expert":  # dispatch and combine count their own
            work = _Timed(work, self.step, _COUNTED_AS.get(axis, "other"))
        if self.step.recorder is not None:
            size = sum(tensor.nbytes for tensor in tensors)
            work = self.step.recorder.collective(work, operation, axis, self.progress.count(axis), size)
        return work


class _Timed:
    """A handle whose wait is a phase of its own."""

    def __init__(self, work: Handle, step: StepPhases, phase: StepPhase):
        self._work, self._step, self._phase = work, step, phase

    def wait(self) -> None:
        with self._step.phase(self._phase):
            self._work.wait()


class _TimedMessage:
    """A message of the pipeline that is waited for: while no data moves, the rank is in the bubble."""

    def __init__(self, work: Handle, step: StepPhases):
        self._work, self._step = work, step

    def wait(self) -> None:
        before = self._step.record.idle_seconds
        with self._step.phase("pipeline_communication"):
            self._work.wait()
        self._step.parts.move("pipeline_communication", "bubble", self._step.record.idle_seconds - before)
