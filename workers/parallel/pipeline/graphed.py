"""The pipeline of a rank that has the whole model: forward and backward of one micro-batch are recorded once, as a CUDA
graph, and replayed for most others, so that hundreds of kernels cost the host a single launch.

A replay repeats only what the device did, on the same memory, not what Python did meanwhile. So each micro-batch is
copied into fixed memory, and its results are read from fixed memory before the next replay.

Some micro-batches are computed normally: the first of a step, during which parameters may still be gathered, and whose
gradients overwrite those of the last step; the last one, if its backward starts sums over replicas; those of another
size; and all of a step that is measured or traced. With deterministic kernels, replays do not change the bits.

Shapes: s sequence, b micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from manta.workers.comm.comm import Comm
from manta.workers.config import JobSpec
from manta.workers.data.batches import MicroBatch
from manta.workers.parallel.data.agreement import Loss
from manta.workers.parallel.experts.choice import StepRouting
from manta.workers.parallel.pipeline.runtime import Pipeline, Stage, Step
from manta.workers.schedules.schedule import Action


class GraphedPipeline(Pipeline):
    """For layouts without tensor and pipeline parallelism, with 1F1B: each backward directly follows its forward."""

    def __init__(
        self,
        spec: JobSpec,
        model: Stage,
        comm: Comm,
        new_recording: Callable[[], Recording],
        when_done: Callable[[Action], None] | None = None,
        when_added: Callable[[nn.Parameter], None] | None = None,
    ):
        super().__init__(spec, model, comm, when_done, when_added)
        self.recorder = MicroBatchRecorder(new_recording)
        self._replayed: set[int] = set()
        """Micro-batches of the step that were replayed, backward included."""
        self._addresses_of_parameters: Hashable = None
        """Addresses of all parameters and gradients; the same object as long as they stay there."""

    def train(self, batch: list[MicroBatch], loss_scale: float, routing: StepRouting | None = None) -> Loss:
        """See `Pipeline.train`."""
        self._replayed.clear()
        addresses = tuple(_addresses(parameter) for parameter in self.model.parameters())
        if addresses != self._addresses_of_parameters:  # comparing an object with itself takes no time
            self._addresses_of_parameters = addresses
        return super().train(batch, loss_scale, routing)

    def _forward(self, action: Action, step_state: Step) -> None:
        micro_batch = action.micro_batch
        if not (self._may_replay(micro_batch, step_state) and self._replay(micro_batch, step_state)):
            super()._forward(action, step_state)

    def _backward(self, action: Action, step_state: Step) -> None:
        if action.micro_batch in self._replayed:
            return
        super()._backward(action, step_state)
        if self._has_usual_size(action.micro_batch, step_state):
            self.recorder.computed()

    def _may_replay(self, micro_batch: int, step_state: Step) -> bool:
        step, is_last = self.comm.step, micro_batch == len(step_state.batch) - 1
        if not torch.is_grad_enabled() or step.recorder is not None or step.parts.measuring:
            return False
        if is_last and self._when_added is not None:
            return False
        return self.recorder.ready and self._has_usual_size(micro_batch, step_state)

    def _has_usual_size(self, micro_batch: int, step_state: Step) -> bool:
        return micro_batch > 0 and len(step_state.batch[micro_batch].samples) == self.spec.train.micro_batch_size

    def _replay(self, micro_batch: int, step_state: Step) -> bool:
        """Replay forward and backward of a micro-batch; False, with nothing done, if that cannot be recorded."""
        micro_batch_inputs, is_recomputed = step_state.batch[micro_batch], (micro_batch, 0) in step_state.recomputed
        assert micro_batch_inputs.inputs_sb is not None and micro_batch_inputs.targets_sb is not None
        keys_b = step_state.dropout_keys[micro_batch] if step_state.dropout_keys else None
        inputs = Inputs(micro_batch_inputs.inputs_sb, micro_batch_inputs.targets_sb, step_state.scale, keys_b)

        def compute(inputs: Inputs, sums: torch.Tensor) -> Sequence[nn.Parameter]:
            return self._computed(inputs, sums, is_recomputed)

        recorded = self.recorder.run(inputs, (self._addresses_of_parameters, is_recomputed), compute)
        if recorded is None:
            return False
        self._replayed.add(micro_batch)
        loss, z_loss, tokens = recorded.sums
        step_state.losses_m[micro_batch] = loss
        step_state.z_losses_m[micro_batch] = z_loss
        step_state.valid_tokens += tokens
        if self._when_added is not None:
            for parameter in recorded.added:
                self._when_added(parameter)
        return True

    def _computed(self, inputs: Inputs, sums: torch.Tensor, is_recomputed: bool) -> Sequence[nn.Parameter]:
        """See `Compute`. The micro-batch is computed as the only one of a separate step."""
        sums.zero_()
        batch = MicroBatch(range(inputs.inputs_sb.shape[1]), inputs.inputs_sb, inputs.targets_sb)
        recomputed = frozenset({(0, 0)} if is_recomputed else ())
        keys = () if inputs.keys_b is None else (inputs.keys_b,)
        step_state = Step([batch], inputs.scale, recomputed, sums[:1], sums[1:2], sums[2], keys)
        added: list[nn.Parameter] = []
        with self.model.weight_gradients.reported(added.append):
            super()._forward(Action("forward", 0), step_state)
            super()._backward(Action("backward", 0), step_state)
        return added


def _addresses(parameter: nn.Parameter) -> tuple[int, ...]:
    """Addresses of a parameter and its gradients; 0 for one that does not exist."""
    gradients = (getattr(parameter, "main_grad", None), parameter.grad)
    return (parameter.data_ptr(), *(0 if gradient is None else gradient.data_ptr() for gradient in gradients))


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
        return [tensor for tensor in every if tensor is not None]

    def copied_inputs(self) -> Inputs:
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
    addresses: Hashable
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

    def run(self, inputs: Inputs, addresses: Hashable, compute: Compute) -> Recorded | None:
        """Do what `compute` does with `inputs`; `addresses`: see `Recorded`. None, with nothing done, if recording
        fails."""
        recorded = self._recorded
        if recorded is None or recorded.addresses != addresses:
            self._recorded = recorded = None  # frees its memory before more is allocated
            self._recorded = self._record(inputs, addresses, compute)
            return self._recorded
        for mine, new in zip(recorded.inputs.tensors(), inputs.tensors(), strict=True):
            mine.copy_(new)
        recorded.recording.replay()
        return recorded

    def _record(self, given: Inputs, addresses: Hashable, compute: Compute) -> Recorded | None:
        recording, inputs = self._new_recording(), given.copied_inputs()
        sums = torch.zeros(3, dtype=torch.float64, device=inputs.scale.device)
        added: list[nn.Parameter] = []
        try:
            recording.capture(lambda: added.extend(compute(inputs, sums)))
        except Exception as error:  # noqa: BLE001 - an error that is not the recording's is raised again by computing normally
            lines = str(error).strip().splitlines() or [""]
            self.refusal, self._failed = f"{type(error).__name__}: {lines[0]}", recording
            return None
        return Recorded(recording, addresses, inputs, sums, tuple(added))
