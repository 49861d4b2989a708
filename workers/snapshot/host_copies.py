"""Copies of one rank's state in the host memory of its own process, for going back some steps.

They differ from snapshots in what they must survive. A snapshot outlives its process, so it lies in a file whose
markers and sums tell what is whole; that lets other processes read it, and costs an identity, a format and a second
thread. These copies end with the process: a step and a list of tensors are all that there is to each. Both are made by
a `StateCopier`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import torch

from workers.snapshot.state_copy import StateCopier, copy_tensors

COPIES = 2

Note = TypeVar("Note")


@dataclass
class _Slot(Generic[Note]):
    step: int | None = None
    note: Note | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)


class HostCopies(Generic[Note]):
    """The last COPIES states that were kept, each with a note. All methods are called on the training thread."""

    def __init__(self, state: list[torch.Tensor]):
        """`state`: the tensors to copy. Memory is taken with the first copies, once the size of the state each."""
        self.state = state
        self._slots = [_Slot[Note]() for _ in range(COPIES)]
        self._copier = StateCopier("copies")

    @property
    def steps(self) -> list[int]:
        """Committed steps whose state is kept, ascending."""
        return sorted(slot.step for slot in self._slots if slot.step is not None)

    def start(self, step: int, note: Note) -> None:
        """Begin to copy the state of committed step `step`, in place of the oldest copy. The state must not change
        before `finish`. `note`: what else belongs to the step."""
        self.forget(step)
        slot = min(self._slots, key=lambda slot: -1 if slot.step is None else slot.step)
        slot.step = None
        if not slot.tensors:
            slot.tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in self.state]
        self._copier.start(self.state, partial(copy_tensors, slot.tensors, self.state))
        slot.step, slot.note = step, note

    def finish(self) -> None:
        """Return once the copy that was begun is whole."""
        self._copier.finish()

    def load(self, step: int) -> Note:
        """Make the copy of `step` the state again and return its note. Raises KeyError where there is none."""
        self.finish()
        slot = next((slot for slot in self._slots if slot.step == step), None)
        if slot is None or slot.note is None:
            raise KeyError(step)
        copy_tensors(self.state, slot.tensors, None)
        return slot.note

    def forget(self, *steps: int) -> None:
        """Keep none of these."""
        self.finish()
        for slot in self._slots:
            if slot.step in steps:
                slot.step = None

    def close(self) -> None:
        """End the thread."""
        self._copier.close()
