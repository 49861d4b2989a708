"""How many layers each stage of a pipeline has, so that no rank has more to do than it must. Pure Python.

A step of many micro-batches is bound by the rank that has most to do. Layers take equally long, what the ends of the
model have besides does not, and a rank has room for so many: so layers are given out one by one, each to the rank that
is done first with it, which makes the busiest rank's time the least there is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby

from workers.parallel.pipeline.stages import virtual_stage

Seconds = Callable[[int, int], float]
"""What virtual stage `index` takes with so many layers: all passes of one micro-batch. It may be another machine's time
for each stage, as long as a layer more takes longer."""
Counts = tuple[int, ...]
"""Layers of each virtual stage, in the model's order."""

FEW_STAGES = 8
"""Virtual stages up to which every move of a layer is looked at; of more, those between some of them."""


@lru_cache(maxsize=1024)
def chunks_of(kind: str, pipeline: int, virtual_stages: int) -> tuple[tuple[int, ...], ...]:
    """For each pipeline rank its virtual stages."""
    return tuple(
        tuple(virtual_stage(kind, pipeline, virtual_stages, rank, chunk) for chunk in range(virtual_stages))
        for rank in range(pipeline)
    )


def shared_out(
    layers: int, chunks: Sequence[Sequence[int]], seconds: Seconds, room: Sequence[int] | None = None
) -> Counts | None:
    """Layers of each virtual stage, at least one, with which the busiest rank has least to do. `chunks`: as from
    `chunks_of`; `room`: most layers of each rank. None where there is no room for all. Of ranks that would be done at
    the same time the first takes the layer, so that the last ones, which hold up nobody, have less."""
    counts = [1] * sum(map(len, chunks))
    left = layers - len(counts)
    free = [
        layers if room is None else most - len(own) for most, own in zip(room or [0] * len(chunks), chunks, strict=True)
    ]
    if left < 0 or min(free) < 0:
        return None

    def after(rank: int) -> tuple[float, int, int]:
        """When `rank` is done with a layer more, itself, and the virtual stage that would take it: its shortest."""
        own = [seconds(index, counts[index]) for index in chunks[rank]]
        at = own.index(min(own))
        index = chunks[rank][at]
        return sum(own) - own[at] + seconds(index, counts[index] + 1), rank, index

    heap = [after(rank) for rank in range(len(chunks)) if free[rank] > 0]
    heapq.heapify(heap)
    while left and heap:
        _, rank, index = heap[0]
        counts[index] += 1
        free[rank] -= 1
        left -= 1
        if free[rank] > 0:
            heapq.heapreplace(heap, after(rank))
        else:
            heapq.heappop(heap)
    return None if left else tuple(counts)


def moves(counts: Counts) -> Iterator[Counts]:
    """The same with one layer on another virtual stage: each move of few stages; of many those between the ends, the
    stages beside them, the middle, and the first and the last of the fullest and of the emptiest."""
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


def in_words(each_stage: Sequence[int] | Sequence[str]) -> str:
    """What each stage has in short: `3 x 4, 5, 2`."""
    runs = [(what, len(list(same))) for what, same in groupby(each_stage)]
    return ", ".join(f"{times} x {what}" if times > 1 else f"{what}" for what, times in runs)
