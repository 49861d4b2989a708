"""Bytes of the copies of its state that a rank's process keeps in host memory in addition to its snapshots. Pure
Python."""

from __future__ import annotations

from workers.accounting.offloaded_state import kept_elements
from workers.accounting.snapshot_bytes import STATE_BYTES
from workers.config import JobSpec

COPIES = 2
"""States that a rank may roll back to (`workers/snapshot/state_copy.py`)."""


def copies_bytes(spec: JobSpec, stage: int) -> int:
    """Bytes of these copies on a rank of this stage: those to roll back to, and one for checkpoints if there are no
    snapshots to write them from."""
    copies = COPIES if spec.recovery.rolls_back else 0
    if spec.checkpoint.snapshots == "off":
        copies += 1
    return copies * STATE_BYTES * kept_elements(spec, stage)
