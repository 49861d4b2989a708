"""Forward and backward of one micro-batch, recorded once and replayed for others: a GPU's host launches the hundreds of
kernels of a recording as one, a CUDA graph.

A replay repeats what the device did, on the same memory, and nothing that Python did beside it. So each micro-batch is
copied into memory that stays, and what comes of it is read from there before the next replay.

Shapes: s sequence, b micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

WARM_UP = 2
"""Micro-batches that are computed before one is recorded: libraries choose their kernels and take workspaces, and
tables that layers share are made. A recording must do none of that."""


class Recording(Protocol):
    """What a device was asked to do."""

    def capture(self, compute: Callable[[], None]) -> None:
        """Have the device do what `compute` asks of it, once, and record that. Raises an exception where it cannot be
        recorded; on a GPU nothing has been done then."""
        ...

    def replay(self) -> None:
        """Have the device do it again."""
        ...


class CudaRecording:
    """A CUDA graph of the current device, with memory of its own."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, compute: Callable[[], None]) -> None:
        """Record, which computes nothing, then replay."""
        pool = torch.cuda.graph_pool_handle()
        # Other threads go on meanwhile: they copy snapshots, and ask how far the device has come.
        captured = torch.cuda.graph(self._graph, pool, capture_error_mode="thread_local")
        try:
            # A capture that fails leaves its own stream the current one.
            with torch.cuda.stream(torch.cuda.current_stream()), captured:
                compute()
        except BaseException:
            _end_allocations(pool)
            raise
        self._graph.replay()

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()


def _end_allocations(pool: tuple[int, int]) -> None:
    """After a capture that failed: torch's allocator would go on as if it were under way, and neither give memory back
    nor reuse what other streams have read. Raises nothing, also where the allocator has ended it itself."""
    device = torch.cuda.current_device()
    with suppress(RuntimeError, AttributeError):  # the latter: another release of torch has no such functions
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


@dataclass(frozen=True)
class Inputs:
    """What a micro-batch is computed from."""

    inputs_sb: torch.Tensor
    """Tokens, int64 [s, b]."""
    targets_sb: torch.Tensor
    """int64 [s, b]."""
    scale: torch.Tensor
    """Factor on the loss in backward, a scalar."""
    keys_b: torch.Tensor | None = None
    """Dropout keys of the samples, int32 [b]; None: no dropout."""

    def tensors(self) -> list[torch.Tensor]:
        """Those that are there."""
        every = (self.inputs_sb, self.targets_sb, self.scale, self.keys_b)
        return [each for each in every if each is not None]

    def in_new_memory(self) -> Inputs:
        """The same values."""
        keys_b = None if self.keys_b is None else self.keys_b.clone()
        return Inputs(self.inputs_sb.clone(), self.targets_sb.clone(), self.scale.clone(), keys_b)


Compute = Callable[[Inputs, torch.Tensor], Sequence[nn.Parameter]]
"""Computes a micro-batch, adds its gradients, and puts (loss, z-loss, tokens that have a target), fp64 [3], into the
tensor that it is given. Returns the parameters to whose gradients it has added, as often as it has."""


@dataclass(frozen=True)
class Recorded:
    """A micro-batch that can be replayed."""

    recording: Recording
    place: Hashable
    """Where in memory lies what it computes with."""
    inputs: Inputs
    sums: torch.Tensor
    """Loss, z-loss, tokens of the micro-batch that was computed last, fp64 [3]."""
    added: Sequence[nn.Parameter]
    """Parameters to whose gradients each micro-batch adds."""


class MicroBatchRecorder:
    """Computes micro-batches by replaying one. Those of a step whose parameters lie elsewhere are recorded again."""

    def __init__(self, new_recording: Callable[[], Recording]):
        self._new_recording = new_recording
        self._recorded: Recorded | None = None
        self._failed: Recording | None = None
        """Stays, since torch's allocators may go on asking a graph that failed."""
        self._computed = 0
        self.refusal: str | None = None
        """Why nothing could be recorded; from then on nothing is tried."""

    @property
    def ready(self) -> bool:
        """Whether the next micro-batch may be recorded or replayed."""
        return self._computed >= WARM_UP and self.refusal is None

    def computed(self) -> None:
        """A micro-batch like those that are to be replayed was computed without."""
        self._computed += 1

    def run(self, given: Inputs, place: Hashable, compute: Compute) -> Recorded | None:
        """Do with `given` what `compute` does; `place`: where in memory lies what it computes with. None where it
        cannot be recorded: then nothing has been done."""
        recorded = self._recorded
        if recorded is None or recorded.place != place:
            self._recorded = recorded = None  # frees its memory before more is taken
            self._recorded = self._record(given, place, compute)
            return self._recorded
        for mine, new in zip(recorded.inputs.tensors(), given.tensors(), strict=True):
            mine.copy_(new)
        recorded.recording.replay()
        return recorded

    def _record(self, given: Inputs, place: Hashable, compute: Compute) -> Recorded | None:
        recording, inputs = self._new_recording(), given.in_new_memory()
        sums = torch.zeros(3, dtype=torch.float64, device=inputs.scale.device)
        added: list[nn.Parameter] = []
        try:
            recording.capture(lambda: added.extend(compute(inputs, sums)))
        except Exception as error:  # noqa: BLE001 - whatever it is, computing without meets it too or does without it
            lines = str(error).strip().splitlines() or [""]
            self.refusal, self._failed = f"{type(error).__name__}: {lines[0]}", recording
            return None
        return Recorded(recording, place, inputs, sums, tuple(added))
