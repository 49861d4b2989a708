"""A lower bound of a pipeline's time, without simulating it. Pure Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from service.planner.candidates import rank_totals
from service.planner.pipeline import StageTimes


def least_pipeline(
    schedule: str,
    chunks: Sequence[Sequence[int]],
    times: Sequence[StageTimes],
    messages: Sequence[float],
    micro_batches: int,
) -> float:
    """Seconds that a pipeline takes at least: a rank begins when the first micro-batch has passed the ranks before it,
    computes all of its passes, and then the gradients of the last micro-batch return through those ranks. If the
    schedule separates the weights' half of backward, that half of up to as many micro-batches as there are ranks may
    come later. `chunks`: virtual stages of each rank; `messages`: seconds of a message between each rank and the
    next."""
    apart = schedule.startswith("zb")
    came, back, least = 0.0, 0.0, 0.0
    for rank, (own, message) in enumerate(zip(chunks, [*messages, 0.0], strict=True)):
        busy = came + micro_batches * sum(times[index].seconds for index in own)
        late = min(micro_batches, len(chunks)) * sum(times[index].backward_weight for index in own) if apart else 0.0
        least = max(least, busy, busy - late + back)
        came += times[rank].forward + message
        back += message + (times[rank].backward_input if apart else times[rank].backward)
    return least


class Shape(NamedTuple):
    """The distribution of layers over virtual stages, as far as bounds depend on it."""

    between: tuple[tuple[int, int], ...]
    """(number of layers, how many of the ranks between the first and the last have that many on their first chunk)."""
    with_first: tuple[int, ...]
    """Layers of each chunk of the first rank except its first chunk, if chunks are assigned round-robin."""
    with_last: tuple[int, ...]
    """Layers of each chunk of the last rank except its last chunk, likewise."""
    fewest: int
    """Fewest layers of an inner virtual stage; 0: there is none."""
    fullest: int
    """Most layers of a rank between the first and the last."""


@lru_cache(maxsize=4096)
def shape_of(counts: tuple[int, ...], pipeline: int, schedule: str) -> Shape:
    """The shape of virtual stages with these numbers of layers."""
    p, totals = pipeline, rank_totals(counts, pipeline, schedule)
    return Shape(
        tuple(Counter(counts[1 : p - 1]).items()),
        counts[p::p],
        counts[p - 1 : -1 : p],
        min(counts[1:-1], default=0),
        max(totals[1:-1], default=0),
    )
