"""Snapshots of a state that tells its step, and copies that are held up."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import torch

from manta.workers.parallel.data.state import StatePart
from manta.workers.snapshot.node_memory import SnapshotMemory
from manta.workers.snapshot.snapshots import Snapshots

IDENTITY = b"0123456789abcdef"


def state_at(step: int) -> list[torch.Tensor]:
    """A rank's state that tells its step: three tensors of odd sizes."""
    return [torch.full((size,), 100.0 * step + size) for size in (5, 1025, 3)]


def parts_of(state: list[torch.Tensor], *constant: torch.Tensor) -> list[StatePart]:
    """Each of these tensors as a part of its own, named by its number; no step changes those of `constant`."""
    tensors = enumerate((*state, *constant))
    return [StatePart(str(number), (tensor,), changes=number < len(state)) for number, tensor in tensors]


def opened(
    folder: Path, step: int = 0, identity: bytes = IDENTITY, state: list[torch.Tensor] | None = None
) -> Snapshots:
    """The snapshots of rank 3, over a state of `step`."""
    parts = parts_of(state if state is not None else state_at(step))
    return Snapshots(folder, 3, parts, identity, table={"a": "table"})


def bring(snapshots: Snapshots, step: int) -> None:
    """Bring the state to `step`."""
    for tensor, value in zip(snapshots.state, state_at(step), strict=True):
        tensor.copy_(value)


def save(snapshots: Snapshots, step: int) -> None:
    """Bring the state to `step`, save it and wait for its sums."""
    bring(snapshots, step)
    snapshots.save(step, f"note of {step}".encode())
    snapshots.wait_for_sums()


def saved(folder: Path, *steps: int) -> Snapshots:
    """The snapshots of rank 3 with the newest two of `steps`."""
    snapshots = opened(folder)
    for step in steps:
        save(snapshots, step)
    return snapshots


def holds(folder: Path, step: int) -> bool:
    """Whether another process, opening the file, loads exactly the state of `step`."""
    fresh = opened(folder, 999)
    note = fresh.load(step)
    return note == f"note of {step}".encode() and all(
        torch.equal(a, b) for a, b in zip(fresh.state, state_at(step), strict=True)
    )


class Held:
    """Holds the copies of a snapshot up until it is told to let them go, or to make them fail."""

    def __init__(self, snapshots: Snapshots, after: int = 0):
        """The first `after` copies of tensors are made at once."""
        self.reached, self.released = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self._left, self._real = after, snapshots._slots
        snapshots._slots = [[_Slow(self, view) for view in views] for views in self._real]

    def copy(self, real: torch.Tensor, other: torch.Tensor) -> None:
        if self._left == 0:
            real[: len(real) // 2].copy_(other[: len(other) // 2])
            self.reached.set()
            assert self.released.wait(30)
            if self.error is not None:
                raise self.error
        else:
            self._left -= 1
        real.copy_(other)


class _Slow:
    def __init__(self, held: Held, real: torch.Tensor):
        self._held, self._real = held, real

    def copy_(self, other: torch.Tensor) -> None:
        self._held.copy(self._real, other)


def snapshot_each_step(folder: str) -> None:
    """For a process: fill its state with the number of the step, again and again."""
    state = [torch.zeros(3_000_000), torch.zeros(7)]
    snapshots, step = Snapshots(folder, 0, parts_of(state), IDENTITY), 0
    while True:
        step += 1
        for tensor in state:
            tensor.fill_(step)
        snapshots.start(step, str(step).encode())
        snapshots.finish()


def snapshot_and_be_killed(folder: str, keeper: str) -> None:
    """For a process: a snapshot of step 7 in memory that the keeper at that socket holds."""
    memory = SnapshotMemory("node_memory", Path(keeper))
    Snapshots(folder, 3, parts_of([torch.arange(9.0)]), IDENTITY, memory=memory).save(7, b"note")
    os.kill(os.getpid(), signal.SIGKILL)
