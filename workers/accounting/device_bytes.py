"""Estimates the device memory of a rank in a step, in bytes, before it runs. Pure Python.

Memory held between steps is exact up to alignment; activations are from `activation_bytes.py`; allocations during
passes are simulated in `step_peak.py`. Memory of torch and NCCL themselves (contexts, kernels, buffers of
communicators, fragmentation) is not included, nor are the workspaces of cuBLAS, which torch allocates for each thread
and stream that computes products: 32 MiB each on Hopper and Blackwell and with `train.deterministic_kernels`, otherwise
8.1 MiB. Forward and backward are two threads, and a recorded micro-batch has a stream of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.accounting.activation_bytes import bytes_of_rank, tokens_of
from workers.accounting.eight_bits import weight_bytes
from workers.accounting.elastic_memory import arriving_bytes, halves_bytes
from workers.accounting.flops import frozen_parameters_of_rank, parameters_of_rank, waiting_gradient_buffers
from workers.accounting.offloaded_state import kept_elements, places_bytes
from workers.accounting.step_peak import StepPeak
from workers.config import JobSpec

WIDE = 4
"""Bytes of an element of gradients, master weights and moments."""


@dataclass(frozen=True)
class DeviceBytes:
    """Memory of one rank."""

    parameters: int
    """In the precision of compute; with train.fp8 also the 8-bit copies of weights, in both orientations."""
    gradients: int
    """The flat buffer, and the buffers in which elastic sums wait for others, complete or half made."""
    optimizer: int
    """Moments, and with 16-bit compute the master weights; zero if all of that is in host memory."""
    activations: int
    """Most that is kept for backward at any time."""
    workspace: int
    """Most that a pass or an update needs in addition to all of these, at the moment of the peak; with
    train.cuda_graphs also what a recorded micro-batch keeps for itself."""

    @property
    def total(self) -> int:
        """The peak of a step."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.workspace


def device_bytes(spec: JobSpec) -> tuple[DeviceBytes, ...]:
    """Memory of a rank of each pipeline stage, on GPUs."""
    passes = StepPeak(spec)
    return tuple(bytes_of_stage(passes, stage, spec.micro_batches) for stage in range(spec.layout.pipeline))


def bytes_of_stage(passes: StepPeak, stage: int, micro_batches: int) -> DeviceBytes:
    """Memory of a rank of `stage`, in a step of `micro_batches` micro-batches."""
    spec = passes.spec
    held, frozen = parameters_of_rank(spec, stage), frozen_parameters_of_rank(spec, stage)
    replicas, width = spec.layout.data, 4 if spec.train.precision == "fp32" else 2
    trained, part = held - frozen, (held - frozen) // replicas
    kept, offload = kept_elements(spec, stage), spec.train.optimizer.offload
    gradients = WIDE * trained * (1 + waiting_gradient_buffers(spec)) + halves_bytes(spec, stage, micro_batches)
    # Without master weights, the parameters themselves are updated.
    masters = 0 if width == WIDE and not offload else kept
    optimizer = 0 if offload and passes.gpu else WIDE * (masters + 2 * kept)
    # Updated parts are copied for the gather, when no activations are left; of offloaded state, slices are copied.
    copies = width * part if spec.layout.zero and replicas > 1 else 0
    if offload:
        copies = places_bytes(kept)
    # On CPUs every replica's part of each bucket arrives before it is summed (`workers/comm/links_backend.py`).
    incoming = gradients // replicas * (replicas - 1)
    if passes.gpu or spec.train.deterministic == "elastic":
        incoming = arriving_bytes(spec, stage, passes.gpu)
    activations = bytes_of_rank(spec, stage, micro_batches)
    most = max(passes.of_rank(stage, micro_batches), copies, incoming)
    parameters = width * held + weight_bytes(spec, stage)
    workspace = max(0, most - activations) + _recorded_bytes(passes, stage)
    return DeviceBytes(parameters, gradients, optimizer, activations, workspace)


def _recorded_bytes(passes: StepPeak, stage: int) -> int:
    """Memory of a CUDA graph: all that a micro-batch takes, which no other computation may use in between, and the
    micro-batch's tokens and targets (`workers/parallel/pipeline/recording.py`)."""
    if not (passes.spec.train.cuda_graphs and passes.gpu):
        return 0
    return passes.of_rank(stage, 1) - passes.tables + 2 * 8 * tokens_of(passes.spec)[0]
