"""Estimates, before a job runs, what it costs to keep its state: the bytes of snapshots, checkpoints, copies to roll
back to, and an offloaded optimizer state (`train.optimizer.offload`); how often snapshots are worth it. Pure Python."""

from __future__ import annotations

import math
from typing import NamedTuple

from manta.workers.accounting.flops import (
    frozen_parameters_of_rank,
    parameters_of_rank,
    trained_experts_of_rank,
    trained_parameters,
)
from manta.workers.config import JobSpec, ParallelConfig

SLOTS = 2
"""Snapshots that a rank keeps at a time (`workers/snapshot/snapshot_file.py`)."""


def bytes_per_parameter(spec: JobSpec) -> int:
    """Bytes of state per trained parameter: itself and its moments in fp32, whatever the precision of compute."""
    return 4 * (1 + len(spec.train.optimizer.moments))


class Region(NamedTuple):
    """Trained parameters of a rank that the same ranks hold."""

    elements: int
    holders: int
    """Number of these ranks."""

    @property
    def part(self) -> int:
        """Elements of each holder's share."""
        return self.elements // self.holders


def trained_regions(spec: JobSpec, stage: int) -> tuple[Region, ...]:
    """What a rank of this stage trains: with experts spread over them these apart, which fewer ranks hold."""
    trained, layout = parameters_of_rank(spec, stage) - frozen_parameters_of_rank(spec, stage), spec.layout
    if layout.exchange_size == 1:
        return (Region(trained, layout.holders),)
    experts = trained_experts_of_rank(spec, stage)
    return Region(trained - experts, layout.holders), Region(experts, layout.expert_holders)


def snapshot_bytes(spec: JobSpec) -> int:
    """Bytes that the snapshots of all ranks take together, except for less than 1 MiB per rank for notes and checksums.
    From `zero: 1` on each replica keeps its own part of the state, otherwise all of it. Backups on other nodes take the
    same again. 0 if `checkpoint.snapshots` is off."""
    if spec.checkpoint.snapshots == "off":
        return 0
    layout, total = spec.layout, 0
    for stage in range(layout.pipeline):
        for each in trained_regions(spec, stage):
            copies = layout.holders // (each.holders if layout.zero else 1)
            total += bytes_per_parameter(spec) * each.elements * copies
        total += _frozen_state(spec, stage) * layout.holders // layout.state_shards
    return SLOTS * layout.tensor * total


def held_bytes(spec: JobSpec) -> float:
    """Most bytes of state that a rank keeps: its share, and of what is not trained one as large."""
    each = (
        bytes_per_parameter(spec) * owned_elements(spec, stage) + _frozen_state(spec, stage) / spec.layout.state_shards
        for stage in range(spec.layout.pipeline)
    )
    return max(each)


def checkpoint_bytes(spec: JobSpec) -> int:
    """Bytes of one durable checkpoint: each element of the state once, however many ranks hold it, without
    `frozen_bytes`."""
    return bytes_per_parameter(spec) * sum(trained_parameters(_alone(spec)))


def frozen_bytes(spec: JobSpec) -> int:
    """Bytes of the parameters that are not trained, in the precision of compute, which are written once for all
    checkpoints."""
    return _frozen_state(_alone(spec), 0)


def _alone(spec: JobSpec) -> JobSpec:
    return spec.model_copy(update={"parallel": ParallelConfig()})


def _frozen_state(spec: JobSpec, stage: int) -> int:
    """Bytes of what a rank of this stage does not train, in the precision of compute."""
    return (4 if spec.train.precision == "fp32" else 2) * frozen_parameters_of_rank(spec, stage)


SLICE_ELEMENTS, SLICE_BUFFERS = 2**22, 3
"""Elements of a slice, which is updated at once, and most slices that are on the device at a time."""


def owned_elements(spec: JobSpec, stage: int) -> int:
    """Parameters whose state a rank of this stage keeps."""
    return sum(each.part if spec.layout.zero else each.elements for each in trained_regions(spec, stage))


def host_state_bytes(spec: JobSpec, stage: int) -> int:
    """Bytes of state of a rank of this stage in host memory."""
    return bytes_per_parameter(spec) * owned_elements(spec, stage) if spec.train.optimizer.offload else 0


def slice_buffer_bytes(spec: JobSpec, kept: int) -> int:
    """Bytes that the update of `kept` elements takes on the device."""
    slices = -(-kept // SLICE_ELEMENTS)
    return bytes_per_parameter(spec) * min(kept, SLICE_ELEMENTS) * min(SLICE_BUFFERS, slices)


COPIES = 2
"""States that a rank may roll back to (`workers/snapshot/host_copies.py`)."""


def copies_bytes(spec: JobSpec, stage: int) -> int:
    """Bytes of the copies on a rank of this stage: those to roll back to, and one for checkpoints without snapshots."""
    copies = COPIES if spec.recovery.rolls_back else 0
    if spec.checkpoint.snapshots == "off":
        copies += 1
    return copies * bytes_per_parameter(spec) * owned_elements(spec, stage)


STALL_SHARE = 0.01
"""Largest part of a step's time that snapshots may cost the training thread, as a mean over steps."""
FREE_SECONDS = 1e-3
"""A stall up to this long is no reason for fewer snapshots, which save less than repeating a step costs."""


def steps_between(stall_seconds: float, step_seconds: float) -> int:
    """The fewest steps between snapshots for which their stalls take at most STALL_SHARE of the time."""
    if stall_seconds <= max(FREE_SECONDS, STALL_SHARE * step_seconds):
        return 1
    return math.ceil(stall_seconds / (STALL_SHARE * step_seconds))
