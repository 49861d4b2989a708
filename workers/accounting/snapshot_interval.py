"""Number of steps between snapshots, from the cost of each (`workers/snapshot/interval.py`). Pure Python."""

from __future__ import annotations

import math

STALL_SHARE = 0.01
"""Largest part of a step's time that snapshots may cost the training thread, as a mean over steps."""
FREE_SECONDS = 1e-3
"""A stall up to this long is no reason for fewer snapshots: repeating a step costs more than fewer snapshots ever
save."""


def steps_between(stall_seconds: float, step_seconds: float) -> int:
    """The fewest steps between snapshots for which their stalls take at most STALL_SHARE of the time."""
    if stall_seconds <= max(FREE_SECONDS, STALL_SHARE * step_seconds):
        return 1
    return math.ceil(stall_seconds / (STALL_SHARE * step_seconds))
