"""How long a job has taken, without time in the queue and in pauses. Pure Python."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from service.ledger import StateEntry
from service.states import SUPERVISED, JobState


def seconds_taken(changes: Sequence[StateEntry], now: float, since: float) -> float:
    """Seconds up to `now` that a job was in states in which it may hold places, not counting those before `since`.
    `changes`: its entries into states, in order; times are Unix seconds."""
    following = [*(change.at for change in changes[1:]), now]
    spans = zip(changes, following, strict=True) if changes else itertools.chain()
    return sum(max(0.0, end - max(change.at, since)) for change, end in spans if JobState(change.state) in SUPERVISED)
