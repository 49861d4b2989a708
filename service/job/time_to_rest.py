"""How long a trainer may take to come to rest after the loss of a peer. Pure Python."""

from __future__ import annotations

from workers.accounting.flops import rank_parameters
from workers.accounting.state_costs import STATE_BYTES
from workers.config import JobSpec
from workers.liveness.hang_timeouts import KEPT_BYTES_A_SECOND

REST_SECONDS = 5.0
"""Seconds to leave the generation."""


def time_to_rest(spec: JobSpec) -> float:
    """Seconds after which a trainer of the job that is not at rest is killed, and its rank forked again. Before it
    rests, its snapshot must be complete, with checksums, so that others can read it; for 100 GB that takes a minute.
    The snapshot of a custom model, which is not counted here, is known to its agent (`TrainerSlot.rest`)."""
    if spec.checkpoint.snapshots == "off" or not spec.model.is_counted:
        return REST_SECONDS
    owners = spec.layout.data if spec.layout.zero else 1
    return REST_SECONDS + STATE_BYTES * max(rank_parameters(spec)) / owners / KEPT_BYTES_A_SECOND
