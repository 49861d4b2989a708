"""Estimates the memory of a job's snapshots before it runs. Pure Python."""

from __future__ import annotations

from workers.accounting.flops import frozen_parameters, trained_parameters
from workers.config import JobSpec, ParallelConfig

STATE_BYTES = 12
"""Bytes of state per parameter: itself and its two moments in fp32, whatever the precision of compute."""
SLOTS = 2
"""Snapshots that a rank keeps at a time (`workers/snapshot/snapshot_file.py`)."""


def snapshot_bytes(spec: JobSpec) -> int:
    """Bytes that the snapshots of all ranks take together, except for less than 1 MiB per rank for notes and checksums.
    With `zero: 1` each replica keeps its own part of the state, otherwise all of it. Backups on other nodes take the
    same again. 0 if `checkpoint.snapshots` is off."""
    if spec.checkpoint.snapshots == "off":
        return 0
    replicas = 1 if spec.layout.zero else spec.layout.data
    return SLOTS * _state_bytes(spec) * replicas


def checkpoint_bytes(spec: JobSpec) -> int:
    """Bytes of one durable checkpoint: each element of the state once, however many ranks hold it. Frozen parameters
    have no moments, and are stored in the precision of compute."""
    return _state_bytes(spec.model_copy(update={"parallel": ParallelConfig()}))


def state_bytes_of_ranks(spec: JobSpec) -> list[int]:
    """Bytes of state that each tensor rank of each pipeline rank holds."""
    width = 4 if spec.train.precision == "fp32" else 2
    pairs = zip(trained_parameters(spec), frozen_parameters(spec), strict=True)
    return [STATE_BYTES * trained + width * frozen for trained, frozen in pairs]


def _state_bytes(spec: JobSpec) -> int:
    """Bytes of state that the ranks of one replica hold, copies included."""
    return spec.layout.tensor * sum(state_bytes_of_ranks(spec))
