"""Stages of unequal layers in a search: where only they find room, and where moving a layer makes a step shorter.
Pure Python."""

from __future__ import annotations

import math
from dataclasses import replace

from service.planner.bounds import SLACK, Bounds
from service.planner.candidates import Candidate
from service.planner.memory import worst_rank
from service.planner.stage_shares import FEW_STAGES, moves

MOST_MISSING = 0.25
"""Part of a device's memory that may be missing with even stages where others are looked for: beyond it somebody would
have so many layers more that recomputing is faster."""
MOST_TRIES = 3
"""Lists that are tried for one layout: how much a layer more takes is not the same for each."""
MOST_MOVES = 4
"""Layers that are moved one after the other; with those shared out by time hardly ever more than two are."""


def fitted(
    candidate: Candidate, needed: float, bounds: Bounds, usable: float, most_seconds: float = math.inf
) -> Candidate | None:
    """`candidate`, a rank of which has `needed` bytes where `usable` ones are, with fewer layers where there is no room
    for them; None where that does not help, or takes more than `most_seconds` at least."""
    if candidate.pipeline == 1 or needed > (1 + MOST_MISSING) * usable:
        return None
    if SLACK * bounds.least_seconds_with_more(candidate) > most_seconds:
        return None
    machine, room = bounds.cluster.machine, list(bounds.room(candidate, usable))
    if sum(room) < bounds.job.model.layers:  # it is an estimate, and may be a layer too small
        room = [most + 1 for most in room]
    for _ in range(MOST_TRIES):
        counts = bounds.shared_out(candidate, room)
        if counts is None:
            return None
        other = replace(candidate, stage_layers=counts)
        if SLACK * bounds.least_seconds(other) > most_seconds:
            return None
        worst = worst_rank(other.spec(bounds.job), machine)
        if worst.total <= usable:
            return other
        room[worst.rank] = min(room[worst.rank], bounds.layers_of_rank(other, worst.rank)) - 1
    return None


def refined(candidate: Candidate, seconds: float, bounds: Bounds, usable: float) -> Candidate:
    """`candidate`, a step of which takes so many `seconds`, with single layers on other stages as long as that makes it
    faster and finds room."""
    if candidate.pipeline == 1:
        return candidate
    for _ in range(MOST_MOVES):
        moved = _best_move(candidate, seconds, bounds, usable)
        if moved is None:
            break
        candidate, seconds = moved
    return candidate


def _best_move(candidate: Candidate, seconds: float, bounds: Bounds, usable: float) -> tuple[Candidate, float] | None:
    now, even = bounds.counts(candidate), bounds.counts(candidate.even)
    # Where a simulation takes long only what has to be faster is simulated.
    most = seconds if len(now) <= FEW_STAGES else bounds.least_seconds(candidate)
    faster = []
    for counts in moves(now):
        other = replace(candidate, stage_layers=() if counts == even else counts)
        if bounds.least_seconds(other) < SLACK * most:
            moved_seconds = bounds.time(other).seconds
            if moved_seconds < SLACK * seconds:
                faster.append((moved_seconds, other))
    for moved_seconds, other in sorted(faster):
        if worst_rank(other.spec(bounds.job), bounds.cluster.machine).total <= usable:
            return other, moved_seconds
    return None
