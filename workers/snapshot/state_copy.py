"""Copies a rank's state on a thread, concurrently with training, while the state does not change.

On a GPU the copies use a stream of their own, one per process: torch hands out streams from a pool of 32 repeatedly, so
that a new one for each copy would eventually be one that other work waits for. The target memory should be registered
(`workers/system/gpu.py`), otherwise the driver copies twice. A state in host memory (`train.optimizer.offload`) is
copied by the thread itself: when an update has returned, no work on it is pending.
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Generic, TypeVar

import torch

from manta.workers.system.gpu import PinnedMemory

Ready = torch.cuda.Event | None
"""On a GPU, an event after all work on the state so far."""
Done = torch.cuda.Event | None
"""On a GPU, an event after a completed copy."""

COPIES = 2
ALIGNMENT = 64
"""Bytes."""

Note = TypeVar("Note")


class StateCopier:
    """A thread that makes one copy at a time. All methods are called on the training thread."""

    def __init__(self, name: str):
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._copying: Future[Done] | None = None
        self._state: Sequence[torch.Tensor] = ()
        self.stall_seconds = 0.0
        """How long training was held up at the last `finish`: the thread, or on a GPU the device."""

    def start(self, state: Sequence[torch.Tensor], copy: Callable[[Ready], Done]) -> None:
        """Begin `copy`, which is called on the thread with the event to wait for before it reads `state`, and returns
        the result of `copy_tensors`. The state must not change before `finish`, and the last copy must be finished."""
        self._state = state
        self._copying = self._thread.submit(copy, event_after(state))

    def finish(self) -> bool:
        """Wait for the copy that was begun; returns whether there was one. Raises the error of the copy."""
        if self._copying is None:
            return False
        copying, self._copying = self._copying, None
        # A host runs ahead of its GPU: that it waits here does not mean that the GPU is idle.
        began, reached = time.perf_counter(), event_after(self._state, timed=True)
        done = copying.result()
        self.stall_seconds = time.perf_counter() - began if done is None else _seconds_between(reached, done)
        return True

    @property
    def under_way(self) -> Future[Done] | None:
        """The copy that was begun and not finished; None if there is none."""
        return self._copying

    def close(self) -> None:
        """End the thread, after the copy that was begun."""
        self._thread.shutdown()


def _seconds_between(reached: Ready, done: torch.cuda.Event) -> float:
    """How long ago the device had reached the first event when it reached the second one."""
    if reached is None or not reached.query():
        return 0.0  # it is still computing
    return max(0.0, reached.elapsed_time(done) / 1000)


def event_after(state: Sequence[torch.Tensor], timed: bool = False) -> Ready:
    """On a GPU, an event after all work on `state` so far, with a timestamp if `timed`. For the training thread."""
    device = _device_of(state)
    if device is None:
        return None
    event = torch.cuda.Event(enable_timing=timed)
    event.record(torch.cuda.current_stream(device))
    return event


def _device_of(state: Sequence[torch.Tensor]) -> torch.device | None:
    """The device of the first of these that is on a GPU: an optimizer's state may be in host memory, and the rest
    not."""
    return next((tensor.device for tensor in state if tensor.is_cuda), None)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which this process copies state; torch's streams belong to the process."""
    return torch.cuda.Stream(device)


def copy_tensors(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], ready: Ready) -> Done:
    """Copy each source into its target, and return when that is done, on a GPU with the event after it.

    A `ready` event is waited for on a stream other than that of the training thread, so that no copy waits for the
    forward pass that was queued before; the copies are queued together, and the host waits once, for the last.
    """
    with torch.no_grad():
        # Of an offloaded state perhaps only constant parts, which are not copied again, are on the GPU.
        device = None if ready is None else _device_of((*sources, *targets))
        if ready is None or device is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return None
        stream = copy_stream(device)
        stream.wait_event(ready)
        pairs = list(zip(targets, sources, strict=True))
        with torch.cuda.stream(stream):
            for target, source in pairs:
                if target.is_cuda or source.is_cuda:
                    target.copy_(source, non_blocking=True)
        for target, source in pairs:
            if not (target.is_cuda or source.is_cuda):  # offloaded optimizer state, which has been waited for
                target.copy_(source)
        # Blocking: a spinning thread would take a core from the training thread.
        done = torch.cuda.Event(enable_timing=True, blocking=True)
        done.record(stream)
    done.synchronize()
    return done


@dataclass
class _Slot(Generic[Note]):
    step: int | None = None
    note: Note | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)


class HostCopies(Generic[Note]):
    """The last COPIES states that were kept in the host memory of this process, each with a note, for going back some
    steps. Unlike snapshots they need not survive the process, so nobody else reads them. All methods are called on the
    training thread."""

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
            memory, slot.tensors = _memory_for(self.state)
            self._pinned.append(PinnedMemory(memory, on_gpu=any(tensor.is_cuda for tensor in self.state)))
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
    memory = torch.frombuffer(mmap.mmap(-1, max(1, sum(sizes))), dtype=torch.uint8)
    parts = [part[: like.nbytes] for part, like in zip(memory[: sum(sizes)].split(sizes), state, strict=True)]
    return memory, [part.view(like.dtype).view(like.shape) for part, like in zip(parts, state, strict=True)]


def _release(pinned: list[PinnedMemory]) -> None:
    for each in pinned:
        each.release()
