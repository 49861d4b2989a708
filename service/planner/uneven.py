"""Stages with unequal numbers of layers in a search: where only they fit, and where moving a layer makes a step faster.
Pure Python."""

from __future__ import annotations

import math

from manta.service.planner.bounds import SLACK, Bounds
from manta.service.planner.candidates import Candidate
from manta.service.planner.memory import worst_rank
from manta.service.planner.stage_shares import FEW_STAGES, moves

MAX_MISSING = 0.25
"""Largest part of a device's memory that may be missing with even stages for uneven ones to be tried: beyond it another
stage would get so many more layers that recomputing is faster."""
MAX_TRIES = 3
"""Most lists that are tried for one layout: the memory of one more layer is not the same for each list."""
MAX_MOVES = 4
"""Most layers that are moved one after the other; after sharing them out by time, more than two moves are hardly ever
needed."""


def fitted(
    candidate: Candidate, needed: float, bounds: Bounds, usable: float, max_seconds: float = math.inf
) -> Candidate | None:
    """`candidate`, a rank of which needs `needed` bytes with only `usable` available, with fewer layers where there is
    too little room; None if that does not help, or if its lower bound is above `max_seconds`."""
    if candidate.pipeline == 1 or needed > (1 + MAX_MISSING) * usable:
        return None
    if SLACK * bounds.min_seconds_uneven(candidate) > max_seconds:
        return None
    machine, room = bounds.cluster.machine, list(bounds.room(candidate, usable))
    if sum(room) < bounds.job.model.layers:  # it is an estimate, which may be one layer too small
        room = [most + 1 for most in room]
    for _ in range(MAX_TRIES):
        counts = bounds.shared_out(candidate, room)
        if counts is None:
            return None
        other = candidate._replace(stage_layers=counts)
        if SLACK * bounds.min_seconds(other) > max_seconds:
            return None
        worst = worst_rank(other.spec(bounds.job), machine)
        if worst.total <= usable:
            return other
        room[worst.rank] = min(room[worst.rank], bounds.layers_of_rank(other, worst.rank)) - 1
    return None


def refined(candidate: Candidate, seconds: float, bounds: Bounds, usable: float) -> Candidate:
    """`candidate`, whose step takes `seconds`, with single layers moved to other stages as long as that is faster and
    fits."""
    if candidate.pipeline == 1:
        return candidate
    for _ in range(MAX_MOVES):
        moved = _best_move(candidate, seconds, bounds, usable)
        if moved is None:
            break
        candidate, seconds = moved
    return candidate


def _best_move(candidate: Candidate, seconds: float, bounds: Bounds, usable: float) -> tuple[Candidate, float] | None:
    now, even = bounds.counts(candidate), bounds.counts(candidate.even)
    # If simulations take long, only those that must be faster by their bound are simulated.
    most = seconds if len(now) <= FEW_STAGES else bounds.min_seconds(candidate)
    faster = []
    for counts in moves(now):
        other = candidate._replace(stage_layers=() if counts == even else counts)
        if bounds.min_seconds(other) < SLACK * most:
            moved_seconds = bounds.time(other).seconds
            if moved_seconds < SLACK * seconds:
                faster.append((moved_seconds, other))
    for moved_seconds, other in sorted(faster):
        if worst_rank(other.spec(bounds.job), bounds.cluster.machine).total <= usable:
            return other, moved_seconds
    return None
