"""Forward and backward of one micro-batch, recorded once and replayed for others: as a CUDA graph, hundreds of kernels
cost the host a single launch.

A replay repeats only what the device did, on the same memory, not what Python did meanwhile. So each micro-batch is
copied into fixed memory, and its results are read from fixed memory before the next replay.

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
"""Micro-batches that are computed before one is recorded: meanwhile libraries choose kernels and allocate workspaces,
and tables that layers share are built, which must not happen in a recording."""


class Recording(Protocol):
    """Recorded work of a device."""

    def capture(self, compute: Callable[[], None]) -> None:
        """Do the work of `compute` once, and record it. Raises an exception of any type if it cannot be recorded; on a
        GPU nothing has been computed then."""
        ...

    def replay(self) -> None:
        """Do the recorded work again."""
        ...


class CudaRecording:
    """A CUDA graph of the current device, with its own memory pool."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, compute: Callable[[], None]) -> None:
        """Record, which on a GPU computes nothing, then replay."""
        pool = torch.cuda.graph_pool_handle()
        # thread_local: other threads continue to copy snapshots and to query the device's progress.
        captured = torch.cuda.graph(self._graph, pool, capture_error_mode="thread_local")
        try:
            # A failed capture would otherwise leave its own stream as the current one.
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
    """After a failed capture: otherwise torch's allocator behaves as if it were still in progress, and neither frees
    memory nor reuses memory that other streams have read. Does nothing if the allocator has already ended it."""
    device = torch.cuda.current_device()
    with suppress(RuntimeError, AttributeError):  # AttributeError: other releases of torch may lack these functions
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


@dataclass(frozen=True)
class Inputs:
    """The inputs of a micro-batch."""

    inputs_sb: torch.Tensor
    """Tokens, int64 [s, b]."""
    targets_sb: torch.Tensor
    """int64 [s, b]."""
    scale: torch.Tensor
    """Factor on the loss in backward, a scalar."""
    keys_b: torch.Tensor | None = None
    """Dropout keys of the samples, int32 [b]; None: no dropout."""

    def tensors(self) -> list[torch.Tensor]:
        """All that are set."""
        every = (self.inputs_sb, self.targets_sb, self.scale, self.keys_b)
        return [each for each in every if each is not None]

    def in_new_memory(self) -> Inputs:
        """A copy."""
        keys_b = None if self.keys_b is None else self.keys_b.clone()
        return Inputs(self.inputs_sb.clone(), self.targets_sb.clone(), self.scale.clone(), keys_b)


Compute = Callable[[Inputs, torch.Tensor], Sequence[nn.Parameter]]
"""Computes a micro-batch, adds its gradients, and writes (loss, z-loss, tokens with a target), fp64 [3], into the given
tensor. Returns the parameters to whose gradients it has added, once for each time."""


@dataclass(frozen=True)
class Recorded:
    """A micro-batch that can be replayed."""

    recording: Recording
    place: Hashable
    """Addresses of the parameters and gradients that it uses; a different value makes it invalid."""
    inputs: Inputs
    sums: torch.Tensor
    """Loss, z-loss and tokens of the last micro-batch, fp64 [3]."""
    added: Sequence[nn.Parameter]
    """Parameters to whose gradients each micro-batch adds."""


class MicroBatchRecorder:
    """Computes micro-batches by replaying one. It is recorded again if parameters or gradients have moved."""

    def __init__(self, new_recording: Callable[[], Recording]):
        self._new_recording = new_recording
        self._recorded: Recorded | None = None
        self._failed: Recording | None = None
        """Kept alive, since torch's allocators may still refer to a graph that failed."""
        self._computed = 0
        """Number of similar micro-batches that were computed normally."""
        self.refusal: str | None = None
        """Why recording failed; it is not tried again."""

    @property
    def ready(self) -> bool:
        """Whether the next micro-batch may be recorded or replayed."""
        return self._computed >= WARM_UP and self.refusal is None

    def computed(self) -> None:
        """A micro-batch like those to be replayed was computed normally."""
        self._computed += 1

    def run(self, given: Inputs, place: Hashable, compute: Compute) -> Recorded | None:
        """Do what `compute` does with `given`; `place`: see `Recorded`. None, with nothing done, if it cannot be
        recorded."""
        recorded = self._recorded
        if recorded is None or recorded.place != place:
            self._recorded = recorded = None  # frees its memory before more is allocated
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
        except Exception as error:  # noqa: BLE001 - an error that is not the recording's is raised again by computing normally
            lines = str(error).strip().splitlines() or [""]
            self.refusal, self._failed = f"{type(error).__name__}: {lines[0]}", recording
            return None
        return Recorded(recording, place, inputs, sums, tuple(added))
