"""GPUs that are not there, and a network between them: what a host queues is done in a time of their own, and any of it
may take for ever.

A `Comm` gets marks and a backend that queue on such a device. Its host never waits, as over NCCL.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.liveness.device_trail import DeviceTrail
from manta.workers.liveness.progress import Progress

CPU = torch.device("cpu")
Meeting = tuple[Any, ...]
"""A communication: what its members have in common."""


@dataclass
class Network:
    """Communications, which are over once all members are there."""

    seconds: float = 0.0
    """Of each communication."""
    broken: Callable[[Meeting], bool] = lambda meeting: False
    """Which ones never end."""
    members: dict[Meeting, tuple[int, ...]] = field(default_factory=dict)
    came: dict[Meeting, dict[int, float]] = field(default_factory=dict)

    def over_at(self, meeting: Meeting) -> float | None:
        """When it is over; None while it is not."""
        came = self.came.get(meeting, {})
        if len(came) < len(self.members[meeting]) or self.broken(meeting):
            return None
        return max(came.values()) + self.seconds


class Device:
    """One stream. `now` is its time in seconds."""

    def __init__(self, rank: int, network: Network):
        self.rank, self.network, self.now = rank, network, 0.0
        self.queued: list[Meeting] = []
        """Communications that its host has started."""
        self._queue: deque[tuple[str, Any]] = deque()

    def queue(self, kind: str, what: Any) -> None:
        """Have it do `what` next: compute for some seconds, pass an event, start a communication, or wait for one."""
        self._queue.append((kind, what))
        if kind == "start":
            self.queued.append(what)

    def run(self) -> bool:
        """Do what can be done; whether that was anything."""
        moved = False
        while self._queue and self._do(*self._queue[0]):
            self._queue.popleft()
            moved = True
        return moved

    def _do(self, kind: str, what: Any) -> bool:
        if kind == "compute":
            self.now += what
            return not math.isinf(what)
        if kind == "event":
            what.passed_at = self.now
        elif kind == "start":
            self.network.came.setdefault(what, {})[self.rank] = self.now
        elif (over := self.network.over_at(what)) is None:
            return False
        else:
            self.now = max(self.now, over)
        return True


class Event:
    """As a CUDA event."""

    made = 0

    def __init__(self, device: Device):
        self._device, self.passed_at = device, None
        Event.made += 1

    def record(self) -> None:
        self.passed_at = None
        self._device.queue("event", self)

    def query(self) -> bool:
        return self.passed_at is not None

    def elapsed_time(self, later: Event) -> float:
        return 1000 * (later.passed_at - self.passed_at)


@dataclass
class _Work:
    """A communication that was started."""

    device: Device
    meeting: Meeting

    def wait(self) -> None:
        self.device.queue("wait", self.meeting)

    @property
    def done(self) -> bool:
        return False


class Backend:
    """Queues the communication of one rank on its device."""

    def __init__(self, comm: Comm, device: Device):
        self._comm, self._device, self._numbers = comm, device, Counter()

    def _start(self, meeting: Meeting, members: tuple[int, ...]) -> _Work:
        self._numbers[meeting] += 1
        numbered = (*meeting, self._numbers[meeting])
        self._device.network.members[numbered] = members
        self._device.queue("start", numbered)
        return _Work(self._device, numbered)

    def _along(self, axis: str, *arguments: Any) -> _Work:
        members = tuple(self._comm.grid.group(axis, self._comm.rank))
        return self._start((axis, members), members)

    start_all_reduce = start_all_gather = start_reduce_scatter = start_all_to_all = _along

    def send(self, stage: int, tensor: torch.Tensor) -> _Work:
        return self._message(self._comm.rank, self._comm._ranks["pipeline"][stage])

    def receive(self, stage: int, tensor: torch.Tensor) -> _Work:
        return self._message(self._comm._ranks["pipeline"][stage], self._comm.rank)

    def _message(self, source: int, to: int) -> _Work:
        return self._start(("message", source, to), (source, to))

    def interrupt(self) -> None:
        """Nothing waits."""

    close = confirm = interrupt


@contextmanager
def no_thread():
    """Nobody looks at devices but who is told to."""
    with mock.patch.object(DeviceTrail, "_look_on", lambda self, stop: None):
        yield


class Gang:
    """The ranks of a grid, each with a device."""

    def __init__(self, grid: RankGrid, network: Network, progress: Callable[[int], Progress] = lambda rank: Progress()):
        self.grid, self.network = grid, network
        self.devices = [Device(rank, network) for rank in range(grid.world_size)]
        self.comms = [self._comm(device, progress(device.rank)) for device in self.devices]

    def _comm(self, device: Device, progress: Progress) -> Comm:
        trail = DeviceTrail(lambda: Event(device), progress)
        with mock.patch("manta.workers.comm.comm.trail_for", lambda *_: trail):
            comm = Comm(self.grid, device.rank, CPU, "process_groups", progress)
        comm.generation, comm._backend = 1, Backend(comm, device)
        return comm

    def run(self) -> None:
        """Until no device gets any further; then everybody looks."""
        while sum(device.run() for device in self.devices):
            continue
        for comm in self.comms:
            comm._trail.poll()
