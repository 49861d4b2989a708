"""Communication backends of one rank in one generation, and how waits for them are marked on a GPU.

`Comm` chooses a backend once: `LinksBackend` (our own TCP links), the same through copies in host memory
(`HostStaged`), or `ProcessGroups` (torch.distributed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from manta.workers.comm.grid import AXES, Axis
from manta.workers.liveness.device_trail import DeviceEvent, DeviceTrail
from manta.workers.liveness.progress import NOBODY, Progress

Tensors = Sequence[torch.Tensor]


class Handle(Protocol):
    """A communication under way; its tensors must not be touched before `wait` has returned.

    On a CPU `wait` raises PeerLost when the other side is gone. With NCCL only the compute stream waits: a lost peer is
    noticed by its agent, and a caller that has waited for the device asks `Backend.confirm`.
    """

    def wait(self) -> None: ...


class Transfer(Handle, Protocol):
    """A send under way."""

    @property
    def done(self) -> bool:
        """Whether the tensor is no longer needed."""
        ...


class Started:
    """Several communications that are waited for as one, and what remains to be done with their results."""

    def __init__(self, works: Iterable[Handle] = (), finish: Callable[[], object] | None = None):
        self._works, self._finish = works, finish

    def wait(self) -> None:
        """Return once the result is there. Raises PeerLost."""
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()


DONE = Started()
"""A communication that was not needed."""


class Backend(Protocol):
    """The communication of one rank along the axes on which it is not alone: collectives, and messages along the
    pipeline. Tensors are contiguous."""

    def start_all_reduce(self, axis: Axis, tensor: torch.Tensor, largest: bool) -> Handle:
        """Begin to sum `tensor` over `axis` in place, or with `largest` to take its element-wise maximum."""
        ...

    def start_all_gather(self, axis: Axis, out: torch.Tensor, tensor: torch.Tensor) -> Handle:
        """Begin to gather every rank's `tensor`, in order of ranks, into `out`."""
        ...

    def start_reduce_scatter(self, axis: Axis, out: torch.Tensor, tensor: torch.Tensor) -> Handle:
        """Begin to reduce-scatter: this rank's part of the sum of every rank's `tensor`, into `out`."""
        ...

    def start_all_to_all(self, axis: Axis, outgoing: Sequence[Tensors], incoming: Sequence[Tensors]) -> Handle:
        """Begin to send `outgoing[i]` to the rank at index i of `axis` and to receive `incoming[i]` from it."""
        ...

    def send(self, stage: int, tensor: torch.Tensor) -> Transfer:
        """Begin to send `tensor` to rank `stage` of the same pipeline."""
        ...

    def receive(self, stage: int, tensor: torch.Tensor) -> Handle:
        """Begin to receive `tensor` from rank `stage` of the same pipeline."""
        ...

    def interrupt(self) -> None:
        """Called by another thread: threads that wait here, now or later, get PeerLost; a thread that waits for a
        device continues, and gets it from `confirm`. On a CPU the peers notice at once."""
        ...

    def confirm(self) -> None:
        """Called after the host has waited for the device, before its results are used: raises PeerLost if
        communication was aborted, after which results on the device are meaningless."""
        ...

    def close(self) -> None:
        """Leave the generation; the peers notice at once."""
        ...


H = TypeVar("H", bound=Handle)


def new_event() -> DeviceEvent:
    """An event of the current device, to be recorded on the current stream."""
    return torch.cuda.Event(enable_timing=True)


def trail_for(device: torch.device, progress: Progress) -> DeviceTrail | None:
    """Follows `device` and updates `progress`; None if the host does not run ahead of the device."""
    return DeviceTrail(new_event, progress) if device.type == "cuda" else None


class Marked(Generic[H]):
    """A communication whose wait is marked."""

    def __init__(self, work: H, trail: DeviceTrail, axis: Axis, number: int, peer: int = NOBODY, sending: bool = False):
        """`number` and the following: see `DeviceTrail.waits`."""
        self._work, self._trail, self._about = work, trail, (AXES.index(axis), number, peer, sending)

    def wait(self) -> None:
        self._trail.waits(*self._about)
        self._work.wait()
        self._trail.wait_ended()


class MarkedTransfer(Marked[Transfer]):
    """A send under way."""

    @property
    def done(self) -> bool:
        return self._work.done
