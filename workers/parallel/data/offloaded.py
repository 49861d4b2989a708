"""The optimizer's state in host memory (`train.optimizer.offload`): weights in fp32 and moments, in pinned memory if a
GPU copies them.

An update brings the state to the device slice by slice, into one of SLICE_BUFFERS buffers there. The same kernel as for
state on the device updates the slice; its weights are rounded into the parameters, and it is copied back. On a GPU both
copies have a stream of their own next to the compute stream, and the three streams wait for each other by events, so
that the link is busy both ways. The buffers are allocated and freed on the compute stream, only for the update, when no
activations are left. On a CPU the same happens without streams.

The host waits for the end of the update, since what reads the state between two updates is a thread, not a stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from manta.workers.parallel.data.flat import FlatParameters, overlap
from manta.workers.parallel.data.state import Groups, Piece
from manta.workers.system.gpu import PinnedMemory, copy_streams

SLICE_ELEMENTS = 2**22
"""Elements of a slice, a multiple of flat.ALIGNMENT: a copy takes a hundred times as long as launching it."""
SLICE_BUFFERS = 3
"""Slices on the device: one arriving, one being updated, one leaving."""


@dataclass(frozen=True)
class Cut:
    """Consecutive elements of one replica's state with the same weight decay."""

    position: int
    """First element, in the state."""
    start: int
    """First element, in the flat buffers."""
    end: int
    """One past the last element, in the flat buffers."""
    decay: float


@dataclass(frozen=True)
class _Part:
    """The part of a cut that is in a slice."""

    at: int
    """First element, in the slice."""
    start: int
    end: int
    """Range in the flat buffers."""
    decay: float
    steps: torch.Tensor
    """Steps done, fp32 scalar on the device."""

    def of(self, vector: torch.Tensor) -> torch.Tensor:
        """The part's elements of a slice's vector."""
        return vector[self.at : self.at + self.end - self.start]


@dataclass(frozen=True)
class _Slice:
    start: int
    end: int
    """Range in the state."""
    parts: tuple[_Part, ...]


def host_state(kinds: int, elements: int, like: torch.Tensor) -> torch.Tensor:
    """Zeros in host memory, [kinds, elements], of the dtype of `like`."""
    return torch.zeros(kinds, elements, dtype=like.dtype, device="cpu")


def slice_buffer(kinds: int, elements: int, like: torch.Tensor) -> torch.Tensor:
    """Memory for a slice on the device of `like`, [kinds, elements], which earlier work there may still use."""
    return torch.empty(kinds, elements, dtype=like.dtype, device=like.device)


class OffloadedState:
    """The state of one replica, and its update."""

    def __init__(self, flat: FlatParameters, cuts: Sequence[Cut], moments: int, rounded_by_update: bool):
        """`cuts`: all of the state, in order; `moments`: how many the optimizer has; `rounded_by_update`: whether the
        kernel rounds into the parameters."""
        self._flat, self._rounded_by_update = flat, rounded_by_update
        length = cuts[-1].position + cuts[-1].end - cuts[-1].start
        self.host = host_state(1 + moments, length, flat.gradients)
        """[1 + moments, elements]: the weights, then each moment."""
        pinned = PinnedMemory(self.host, on_gpu=flat.gradients.is_cuda)
        weakref.finalize(self, pinned.release).atexit = False
        ends = [(start, min(start + SLICE_ELEMENTS, length)) for start in range(0, length, SLICE_ELEMENTS)]
        self._slices = [_Slice(*bounds, tuple(self._parts(cuts, *bounds))) for bounds in ends]

    def _parts(self, cuts: Sequence[Cut], start: int, end: int) -> Iterator[_Part]:
        for cut in cuts:
            first, last = overlap((start, end), (cut.position, cut.position + cut.end - cut.start))
            if first < last:
                moved = cut.start - cut.position
                steps = torch.zeros((), dtype=torch.float32, device=self._flat.gradients.device)
                yield _Part(first - start, first + moved, last + moved, cut.decay, steps)

    def set_step(self, step: int) -> None:
        """Tell the optimizer that `step` steps are done."""
        for state_slice in self._slices:
            for part in state_slice.parts:
                part.steps.fill_(step)

    def update(self, run: Callable[[Groups], None]) -> None:
        """Have `run` update all of the state and round it into the parameters; wait until it is on the host."""
        like = self._flat.gradients
        with torch.no_grad():
            kinds, elements = len(self.host), self._slices[0].end
            buffers = [slice_buffer(kinds, elements, like) for _ in self._slices[:SLICE_BUFFERS]]
            queue = _Queue(like, len(buffers))
            try:
                for number, state_slice in enumerate(self._slices):
                    host_slice = self.host[:, state_slice.start : state_slice.end]
                    device_slice = buffers[number % SLICE_BUFFERS][:, : state_slice.end - state_slice.start]
                    queue.copy_in(device_slice, host_slice)
                    run(self._groups(state_slice, device_slice))
                    self._round(state_slice, device_slice[0])
                    queue.copy_out(host_slice, device_slice)
            finally:
                queue.end()

    def _round(self, state_slice: _Slice, weights: torch.Tensor) -> None:
        """Round the weights into the parameters, if the kernel has not done so."""
        if not self._rounded_by_update:
            for part in state_slice.parts:
                self._flat.values.of(part.start, part.end).copy_(part.of(weights))

    def _groups(self, state_slice: _Slice, device_slice: torch.Tensor) -> Groups:
        groups: dict[float, list[Piece]] = {}
        for part in state_slice.parts:
            weights, *moments = (part.of(row) for row in device_slice)
            gradient = self._flat.sums.of(part.start, part.end)
            rounded = self._flat.values.of(part.start, part.end) if self._rounded_by_update else None
            piece = Piece(weights, gradient, tuple(moments), part.steps, rounded)
            groups.setdefault(part.decay, []).append(piece)
        return groups


class _Queue:
    """The copies of one update. Work that is launched between two calls goes to the compute stream."""

    def __init__(self, like: torch.Tensor, buffers: int):
        """`like`: a tensor on the device."""
        self._device = like.device
        self._streams = copy_streams(like.device) if like.is_cuda else None
        self._free = [self._reached(self._compute)] * buffers if self._streams else []
        """For each place, the event after which it may be used again."""

    @property
    def _compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def copy_in(self, device_slice: torch.Tensor, host_slice: torch.Tensor) -> None:
        """Copy a slice to its place on the device; the compute stream waits for it."""
        if self._streams is None:
            device_slice.copy_(host_slice)
        else:
            arrived = self._copy(self._streams[1], self._free.pop(0), device_slice, host_slice)
            self._compute.wait_event(arrived)

    def copy_out(self, host_slice: torch.Tensor, device_slice: torch.Tensor) -> None:
        """Copy the slice from its place to the host once it is updated; then the place is free."""
        if self._streams is None:
            host_slice.copy_(device_slice)
        else:
            updated = self._reached(self._compute)
            self._free.append(self._copy(self._streams[0], updated, host_slice, device_slice))

    def end(self) -> None:
        """Return when no copy is in progress: then places can be freed, and threads of the host may read the state."""
        for stream in self._streams or ():
            self._reached(stream).synchronize()

    @staticmethod
    def _reached(stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event after all work given to the stream so far."""
        event = torch.cuda.Event(blocking=True)  # a thread that spins would take a core from others
        event.record(stream)
        return event

    def _copy(
        self, stream: torch.cuda.Stream, ready: torch.cuda.Event, target: torch.Tensor, source: torch.Tensor
    ) -> torch.cuda.Event:
        """Copy row by row, since each row is contiguous."""
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            for row, source_row in zip(target, source, strict=True):
                row.copy_(source_row, non_blocking=True)
        return self._reached(stream)
