"""The least time of a pipeline, without simulating it. Pure Python."""

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
    """No more than a pipeline takes: every rank begins when the first micro-batch has come through the ranks before it
    and computes all of its passes; then the last one's gradients go back through them. Where the weights' half of
    backward is apart, that of as many micro-batches as ranks need not be done by then. `chunks`: virtual stages of each
    rank; `messages`: between each rank and the next."""
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
    """How layers lie on virtual stages, as far as bounds depend on it."""

    between: tuple[tuple[int, int], ...]
    """Numbers of layers, and how many of the ranks between the first and the last have so many on their first chunk."""
    with_first: tuple[int, ...]
    """Layers of the other chunks of the first rank, and of the last, where all chunks go round in the same way."""
    with_last: tuple[int, ...]
    fewest: int
    """Layers of an inner virtual stage; 0: there is none."""
    fullest: int
    """Most layers of a rank between the first and the last."""


@lru_cache(maxsize=4096)
def shape_of(counts: tuple[int, ...], pipeline: int, schedule: str) -> Shape:
    """Of virtual stages with so many layers each."""
    p, totals = pipeline, rank_totals(counts, pipeline, schedule)
    return Shape(
        tuple(Counter(counts[1 : p - 1]).items()),
        counts[p::p],
        counts[p - 1 : -1 : p],
        min(counts[1:-1], default=0),
        max(totals[1:-1], default=0),
    )
