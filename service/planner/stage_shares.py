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
    alike = [_Alike(ranks, chunks, costs, free) for ranks in _runs(chunks, costs)]
    heap = [(each.done, number) for number, each in enumerate(alike) if each.ranks]
    heapq.heapify(heap)
    while left:
        number = heap[0][1]
        left -= alike[number].take(left, counts)
        if alike[number].ranks:
            heapq.heapreplace(heap, (alike[number].done, number))
        else:
            heapq.heappop(heap)
    return tuple(counts)


def _runs(chunks: Sequence[Sequence[int]], costs: Sequence[Cost]) -> Iterator[list[int]]:
    """Runs of consecutive ranks that take equally long with the same number of layers."""
    for _, ranks in groupby(range(len(chunks)), lambda rank: [costs[index] for index in chunks[rank]]):
        yield list(ranks)


class _Alike:
    """Ranks that are always done at the same time, and so take layers in turn, as long as they have room."""

    def __init__(self, ranks: list[int], chunks: Sequence[Sequence[int]], costs: Sequence[Cost], free: Sequence[int]):
        self._chunks, self._free, self._rounds = chunks, free, 0
        self._costs = [costs[index] for index in chunks[ranks[0]]]
        self._counts = [1] * len(self._costs)
        self.ranks = [rank for rank in ranks if free[rank] > 0]
        """The ranks that still have room."""
        self._next()

    def _next(self) -> None:
        own = [layers * layer + besides for layers, (layer, besides) in zip(self._counts, self._costs, strict=True)]
        self._at = at = own.index(min(own))
        layer, besides = self._costs[at]
        self.done = sum(own) - own[at] + ((self._counts[at] + 1) * layer + besides)
        """When each of them would be done with one more layer, on its fastest chunk."""

    def take(self, left: int, counts: list[int]) -> int:
        """Each rank takes one of the `left` layers, as far as these last; returns how many were taken."""
        taking = self.ranks[:left]
        for rank in taking:
            counts[self._chunks[rank][self._at]] += 1
        self._counts[self._at] += 1
        self._rounds += 1
        self.ranks = [rank for rank in self.ranks if self._free[rank] > self._rounds]
        self._next()
        return len(taking)


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
