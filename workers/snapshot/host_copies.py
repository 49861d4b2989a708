"""Copies of one rank's state in the host memory of its own process, for going back some steps.

Unlike snapshots, they need not survive the process. A snapshot does, so it is stored in a file whose markers and
checksums show what is complete, which lets other processes read it, and requires an identity, a format and a second
thread. These copies consist of a step and a list of tensors only. Both are made by a `StateCopier`.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import torch

from workers.snapshot.state_copy import StateCopier, copy_tensors
from workers.system.pinned import PinnedMemory

COPIES = 2
ALIGNMENT = 64
"""Bytes."""

Note = TypeVar("Note")


@dataclass
class _Slot(Generic[Note]):
    step: int | None = None
    note: Note | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)


class HostCopies(Generic[Note]):
    """The last COPIES states that were kept, each with a note. All methods are called on the training thread."""

    def __init__(self, state: list[torch.Tensor]):
        """`state`: the tensors to copy. Memory is allocated with the first copies, the size of the state for each."""
        self.state = state
        self._slots = [_Slot[Note]() for _ in range(COPIES)]
        self._copier = StateCopier("copies")
        self._pinned: list[PinnedMemory] = []
        weakref.finalize(self, _release, self._pinned).atexit = False

    @property
    def steps(self) -> list[int]:
        """Committed steps whose state is kept, ascending."""
        return sorted(slot.step for slot in self._slots if slot.step is not None)

    def start(self, step: int, note: Note) -> None:
        """Begin to copy the state of committed step `step`, replacing the oldest copy. The state must not change before
        `finish`. `note`: anything else that belongs to the step."""
        self.forget(step)
        slot = min(self._slots, key=lambda slot: -1 if slot.step is None else slot.step)
        if not slot.tensors:
            whole, slot.tensors = _memory_for(self.state)
            self._pinned.append(PinnedMemory(whole, on_gpu=any(tensor.is_cuda for tensor in self.state)))
        slot.step = None  # a copy that fails leaves part of the new state in it
        self._copier.start(self.state, partial(copy_tensors, slot.tensors, self.state))
        slot.step, slot.note = step, note

    def finish(self) -> None:
        """Return once the copy is complete."""
        self._copier.finish()

    def load(self, step: int) -> Note:
        """Copy the state of `step` back and return its note. Raises KeyError if there is none."""
        self.finish()
        slot = next((slot for slot in self._slots if slot.step == step), None)
        if slot is None or slot.note is None:
            raise KeyError(step)
        copy_tensors(self.state, slot.tensors, None)
        return slot.note

    def forget(self, *steps: int) -> None:
        """Discard the copies of these steps."""
        self.finish()
        for slot in self._slots:
            if slot.step in steps:
                slot.step = None

    def close(self) -> None:
        """End the thread. No more copies can be made."""
        self._copier.close()
        _release(self._pinned)


def _memory_for(state: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Memory for a copy of `state`: all of it as bytes, in pages of its own, since whole pages are pinned; and a tensor
    in it for each tensor. torch's own pinned memory would take up to twice as much: its sizes are powers of two."""
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in state]
    whole = torch.frombuffer(mmap.mmap(-1, max(1, sum(sizes))), dtype=torch.uint8)
    parts = [part[: like.nbytes] for part, like in zip(whole[: sum(sizes)].split(sizes), state, strict=True)]
    return whole, [part.view(like.dtype).view(like.shape) for part, like in zip(parts, state, strict=True)]


def _release(pinned: list[PinnedMemory]) -> None:
    for each in pinned:
        each.release()
