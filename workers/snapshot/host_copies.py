"""Copies of one rank's state in the host memory of its own process, for going back some steps.

They are made like snapshots: on a thread, while the state rests. They end with the process.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from workers.snapshot.snapshots import copy_beside, event_of

COPIES = 2


@dataclass
class _Slot:
    step: int | None = None
    note: Any = None
    tensors: list[torch.Tensor] = field(default_factory=list)


class Copies:
    """The last COPIES states that were kept. All methods are called on the training thread."""

    def __init__(self, state: list[torch.Tensor]):
        """`state`: the tensors to copy. Memory is taken with the first copies, once the size of the state each."""
        self.state = state
        self._slots = [_Slot() for _ in range(COPIES)]
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copies")
        self._copying: Future[None] | None = None

    @property
    def steps(self) -> list[int]:
        """Committed steps whose state is kept, ascending."""
        return sorted(slot.step for slot in self._slots if slot.step is not None)

    def start(self, step: int, note: Any = None) -> None:
        """Begin to copy the state of committed step `step`, in place of the oldest copy. The state must not change
        before `finish`. `note`: what else belongs to the step."""
        self.finish()
        self.forget(step)
        slot = min(self._slots, key=lambda slot: -1 if slot.step is None else slot.step)
        slot.step = None
        if not slot.tensors:
            slot.tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in self.state]
        ready = event_of(self.state)
        self._copying = self._copier.submit(copy_beside, slot.tensors, self.state, ready)
        slot.step, slot.note = step, note

    def finish(self) -> None:
        """Return once the copy that was begun is whole."""
        if self._copying is not None:
            copying, self._copying = self._copying, None
            copying.result()

    def load(self, step: int) -> Any:
        """Make the copy of `step` the state again and return its note. Raises KeyError where there is none."""
        self.finish()
        slot = next((slot for slot in self._slots if slot.step == step), None)
        if slot is None:
            raise KeyError(step)
        copy_beside(self.state, slot.tensors, None)
        return slot.note

    def forget(self, *steps: int) -> None:
        """Keep none of these."""
        self.finish()
        for slot in self._slots:
            if slot.step in steps:
                slot.step = None

    def close(self) -> None:
        """End the thread."""
        self._copier.shutdown()
