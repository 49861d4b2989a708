"""What passes allocate and free, and the passes of a pipeline rank as far as memory is concerned: few kinds, which
schedules repeat in short blocks. Pure Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from manta.workers.config import ParallelConfig
from manta.workers.parallel.recompute import recomputed_pairs
from manta.workers.schedules.action_lists import passes_of_rank
from manta.workers.schedules.stages import neighbours


class Pass(NamedTuple):
    """The effect of something on a rank's memory."""

    peak: int
    """Bytes at its peak, relative to its beginning."""
    net: int
    """Bytes at its end, relative to its beginning; negative if it frees more than it leaves."""

    def then(self, other: Pass) -> Pass:
        """This and then `other`."""
        return Pass(max(self.peak, self.net + other.peak), self.net + other.net)


NOTHING = Pass(0, 0)


class Tape:
    """Records what one pass allocates and frees, in order."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def allocate(self, *sizes: int) -> None:
        """Allocate tensors."""
        self.now += sum(sizes)
        self.peak = max(self.peak, self.now)

    def free(self, *sizes: int) -> None:
        """Free tensors."""
        self.now -= sum(sizes)

    def allocate_briefly(self, *sizes: int) -> None:
        """Allocate tensors and free them again."""
        self.peak = max(self.peak, self.now + sum(sizes))

    def run(self, other: Pass) -> None:
        """Something that is known as a whole."""
        self.peak = max(self.peak, self.now + other.peak)
        self.now += other.net

    def total(self) -> Pass:
        """The effect of everything recorded."""
        return Pass(self.peak, self.now)


PERIODS = (1, 2, 3, 5, 6)
"""Lengths of the blocks that schedules repeat: passes of one kind; a forward and a backward; a forward and both halves
of backward; and these with two chunks."""


class Kind(NamedTuple):
    """Passes that allocate and free the same."""

    kind: str
    chunk: int
    recomputed: bool
    """Whether its micro-batch is recomputed by the layout's policy."""
    posted: int
    """Number of receives that are posted before it."""


Blocks = tuple[tuple[tuple[Kind, ...], int], ...]
"""Passes in order, as blocks with their number of repetitions."""


def blocks_of_rank(layout: ParallelConfig, rank: int, micro_batches: int, has_backward: Sequence[bool]) -> Blocks:
    """The passes of pipeline rank `rank` in a step of `micro_batches` micro-batches. `has_backward`: whether each of
    its chunks has a backward pass."""
    shape = layout.schedule, rank, layout.pipeline, layout.virtual_stages, micro_batches
    return _blocks(*shape, tuple(has_backward), None if layout.recompute == "none" else layout.recompute_keep)


def total_of_passes(blocks: Blocks, of_kind: Callable[[Kind], Pass]) -> Pass:
    """All passes, one after the other. Bytes are integers, so repetitions are counted exactly."""
    known: dict[Kind, Pass] = {}
    highest = net = 0
    for block, times in blocks:
        peak = now = 0
        for kind in block:
            if kind not in known:
                known[kind] = of_kind(kind)
            one = known[kind]
            peak, now = max(peak, now + one.peak), now + one.net
        highest, net = max(highest, net + peak + max(0, (times - 1) * now)), net + times * now
    return Pass(highest, net)


@lru_cache(maxsize=256)
def passes_awaiting_messages(kind: str, stages: int, chunks: int, rank: int) -> frozenset[tuple[int, str]]:
    """(chunk, kind of pass) of this rank that need a message from another rank."""
    passes: set[tuple[int, str]] = set()
    for chunk in range(chunks):
        before, following = neighbours(kind, stages, chunks, rank, chunk)
        if before is not None and before[0] != rank:
            passes.add((chunk, "forward"))
        if following is not None and following[0] != rank:
            passes |= {(chunk, "backward"), (chunk, "backward_input")}
    return frozenset(passes)


@lru_cache(maxsize=4096)
def _blocks(
    kind: str, rank: int, stages: int, chunks: int, micro_batches: int, has_backward: tuple[bool, ...], keep: int | None
) -> Blocks:
    """`keep`: number of micro-batches of which everything is kept; None: all."""
    if keep == 0:  # the same passes, all of which are recomputed
        without_recomputation = _blocks(kind, rank, stages, chunks, micro_batches, has_backward, None)
        return tuple(
            (tuple(each._replace(recomputed=True) for each in block), times) for block, times in without_recomputation
        )
    actions = passes_of_rank(kind, rank, stages, chunks, micro_batches)
    needs = {
        waiting
        for waiting in passes_awaiting_messages(kind, stages, chunks, rank)
        if waiting[1] == "forward" or has_backward[waiting[0]]
    }
    # Each receive is posted one pass before the one that needs it; that of the first pass with the pass itself.
    posted = [int((chunk, kind) in needs) for kind, _, chunk in actions] + [0]
    posted[1] += posted[0]
    recomputed: Iterator[bool] = itertools.repeat(False)
    if keep:
        pairs = recomputed_pairs(actions, keep * chunks)
        recomputed = iter([(micro_batch, chunk) in pairs for _, micro_batch, chunk in actions])
    kinds = [(kind, chunk) for kind, _, chunk in actions]
    return tuple(_in_blocks(list(zip(kinds, recomputed, posted[1:], strict=False))))


_Same = tuple[tuple[str, int], bool, int]
"""Like `Kind`, but faster to create."""


def _in_blocks(passes: list[_Same]) -> Iterator[tuple[tuple[Kind, ...], int]]:
    """The passes cut into the shortest blocks that repeat."""
    at = 0
    while at < len(passes):
        period, times = next(_repeating(passes, at), (1, 1))
        yield tuple(Kind(*which, recomputed, posted) for which, recomputed, posted in passes[at : at + period]), times
        at += period * times


def _repeating(passes: list[_Same], at: int) -> Iterator[tuple[int, int]]:
    """Lengths of the blocks that repeat from there on, and how often."""
    for period in PERIODS:
        block, end = passes[at : at + period], at + period
        while passes[end : end + period] == block:
            end += period
        if end > at + period:
            yield period, (end - at) // period
