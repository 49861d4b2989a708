"""How long a trainer may take to come to rest after the loss of a peer. Pure Python."""

from __future__ import annotations

from workers.accounting.flops import rank_parameters
from workers.accounting.snapshot_bytes import STATE_BYTES
from workers.config import JobSpec
from workers.liveness.hang_timeouts import KEPT_BYTES_A_SECOND

REST_SECONDS = 5.0
"""To leave the generation."""


def time_to_rest(spec: JobSpec) -> float:
    """Seconds after which a trainer of the job that is not at rest is killed, and its rank forked again. Before it
    rests it has its snapshot whole, and summed, for others to read, which takes one of 100 GB a minute. What a model
    takes that is not counted here its agent knows (`TrainerSlot.rest`)."""
    if spec.checkpoint.snapshots == "off" or not spec.model.is_counted:
        return REST_SECONDS
    owners = spec.layout.data if spec.layout.zero else 1
    return REST_SECONDS + STATE_BYTES * max(rank_parameters(spec)) / owners / KEPT_BYTES_A_SECOND
