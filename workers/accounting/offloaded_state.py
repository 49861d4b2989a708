"""Bytes of an offloaded optimizer state (`train.optimizer.offload`), in host memory, and on the device during an
update. Pure Python."""

from __future__ import annotations

from workers.accounting.flops import frozen_parameters_of_rank, parameters_of_rank
from workers.accounting.snapshot_bytes import STATE_BYTES
from workers.config import JobSpec

SLICE_ELEMENTS, PLACES = 2**22, 3
"""Elements of a slice, which is updated at once, and most slices that are on the device at a time."""


def kept_elements(spec: JobSpec, stage: int) -> int:
    """Parameters whose state a rank of this stage keeps."""
    trained = parameters_of_rank(spec, stage) - frozen_parameters_of_rank(spec, stage)
    return trained // spec.layout.data if spec.layout.zero else trained


def host_state_bytes(spec: JobSpec, stage: int) -> int:
    """Bytes of state of a rank of this stage in host memory."""
    return STATE_BYTES * kept_elements(spec, stage) if spec.train.optimizer.offload else 0


def places_bytes(kept: int) -> int:
    """Bytes that the update of `kept` elements takes on the device."""
    slices = -(-kept // SLICE_ELEMENTS)
    return STATE_BYTES * min(kept, SLICE_ELEMENTS) * min(PLACES, slices)
