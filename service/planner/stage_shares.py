"""How many layers each stage of a pipeline gets, so that the busiest rank has as little to do as possible. Pure Python.

A step of many micro-batches is bound by its busiest rank. All layers of a stage take equally long, the ends of the
model have other work too, and a rank has limited room. So layers are given out one by one, each to the rank that is
done first with it, which minimises the busiest rank's time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import groupby

from manta.workers.schedules.stages import stages_of_rank

Cost = tuple[float, float]
"""Seconds of a virtual stage, for all passes of one micro-batch: of each layer (positive), and of everything else.
Stages may be on different kinds of machines."""
Counts = tuple[int, ...]
"""Layers of each virtual stage, in the model's order."""

FEW_STAGES = 8
"""Most virtual stages for which every move of a layer is tried; with more, only moves between some of them."""


def chunks_of(kind: str, pipeline: int, virtual_stages: int) -> tuple[tuple[int, ...], ...]:
    """The virtual stages of each pipeline rank."""
    return tuple(stages_of_rank(kind, pipeline, virtual_stages, rank) for rank in range(pipeline))


def shared_out(
    layers: int, chunks: Sequence[Sequence[int]], costs: Sequence[Cost], room: Sequence[int] | None = None
) -> Counts | None:
    """Layers of each virtual stage, at least one, such that the busiest rank has the least to do. `chunks`: from
    `chunks_of`; `room`: most layers of each rank. None if there is no room for all. If several ranks would be done at
    the same time, the first takes the layer: the last ranks, which hold up nobody, then have less."""
    left = layers - len(costs)
    free = [layers] * len(chunks) if room is None else [most - len(own) for most, own in zip(room, chunks, strict=True)]
    if left < 0 or min(free) < 0 or sum(free) < left:
        return None
    counts = [1] * len(costs)

    def with_one_more(rank: int) -> tuple[float, int, int]:
        """When the rank would be done with one more layer, the rank, and its fastest virtual stage, which gets it."""
        own = [counts[index] * costs[index][0] + costs[index][1] for index in chunks[rank]]
        at = own.index(min(own))
        layer, besides = costs[index := chunks[rank][at]]
        return sum(own) - own[at] + ((counts[index] + 1) * layer + besides), rank, index

    heap = [with_one_more(rank) for rank, room_left in enumerate(free) if room_left]
    heapq.heapify(heap)
    for _ in range(left):
        _, rank, index = heap[0]
        counts[index] += 1
        free[rank] -= 1
        if free[rank]:
            heapq.heapreplace(heap, with_one_more(rank))
        else:
            heapq.heappop(heap)
    return tuple(counts)


def moves(counts: Counts) -> Iterator[Counts]:
    """The counts with one layer moved to another virtual stage. With few stages all moves; with many those between the
    ends, their neighbours, the middle, and the first and last of the fullest and of the emptiest stages."""
    for giver in (stages := _looked_at(counts)):
        if counts[giver] == 1:
            continue
        for taker in stages:
            if taker != giver:
                yield tuple(count + (index == taker) - (index == giver) for index, count in enumerate(counts))


def _looked_at(counts: Counts) -> list[int]:
    last = len(counts) - 1
    if last < FEW_STAGES:
        return list(range(last + 1))
    places = {0, 1, last // 2, last - 1, last}
    for extreme in (max(counts), min(counts)):
        places |= {counts.index(extreme), last - counts[::-1].index(extreme)}
    return sorted(places)


def format_counts(each_stage: Sequence[int] | Sequence[str]) -> str:
    """A short description of each stage's value: `3 x 4, 5, 2`."""
    runs = [(what, len(list(same))) for what, same in groupby(each_stage)]
    return ", ".join(f"{times} x {what}" if times > 1 else f"{what}" for what, times in runs)
