"""What passes allocate and free, and the passes of a pipeline rank as far as memory is concerned: few kinds, which
schedules repeat in short blocks. Pure Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from manta.workers.config import ParallelConfig
from manta.workers.parallel.pipeline.schedules import compute_of_rank
from manta.workers.parallel.pipeline.schedules.action import Action
from manta.workers.parallel.pipeline.stages import neighbours
from manta.workers.parallel.recompute import recomputed_pairs


class Pass(NamedTuple):
    """The effect of something on a rank's memory."""

    most: int
    """Bytes at its peak, relative to its beginning."""
    left: int
    """Bytes at its end, relative to its beginning; negative if it frees more than it leaves."""

    def then(self, other: Pass) -> Pass:
        """This and then `other`."""
        return Pass(max(self.most, self.left + other.most), self.left + other.left)


NOTHING = Pass(0, 0)


class Tape:
    """Records what one pass allocates and frees, in order."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def take(self, *sizes: int) -> None:
        """Allocate tensors."""
        self.now += sum(sizes)
        self.most = max(self.most, self.now)

    def free(self, *sizes: int) -> None:
        """Free tensors."""
        self.now -= sum(sizes)

    def for_a_moment(self, *sizes: int) -> None:
        """Allocate tensors and free them again."""
        self.most = max(self.most, self.now + sum(sizes))

    def run(self, other: Pass) -> None:
        """Something that is known as a whole."""
        self.most = max(self.most, self.now + other.most)
        self.now += other.left

    def whole(self) -> Pass:
        """The effect of everything recorded."""
        return Pass(self.most, self.now)


PERIODS = (1, 2, 3, 5, 6)
"""Lengths of the blocks that schedules repeat: passes of one kind; a forward and a backward; a forward and both halves
of backward; and these with two chunks."""


class Kind(NamedTuple):
    """Passes that allocate and free the same."""

    kind: str
    chunk: int
    again: bool
    """Whether its micro-batch is recomputed by the layout's policy."""
    posted: int
    """Number of receives that are posted before it."""


Blocks = tuple[tuple[tuple[Kind, ...], int], ...]
"""Passes in order, as blocks with their number of repetitions."""


@lru_cache(maxsize=256)
def passes_of_rank(kind: str, rank: int, stages: int, virtual_stages: int, micro_batches: int) -> list[Action]:
    """`compute_of_rank`, cached since a search calls it often. The result must not be changed."""
    return compute_of_rank(kind, rank, stages, virtual_stages, micro_batches)


def blocks_of_rank(layout: ParallelConfig, rank: int, micro_batches: int, takes: Sequence[bool]) -> Blocks:
    """The passes of pipeline rank `rank` in a step of `micro_batches` micro-batches. `takes`: whether each of its
    chunks has a backward pass."""
    shape = layout.schedule, rank, layout.pipeline, layout.virtual_stages, micro_batches
    return _blocks(*shape, tuple(takes), None if layout.recompute == "none" else layout.recompute_keep)


def walked(blocks: Blocks, of_kind: Callable[[Kind], Pass]) -> Pass:
    """All passes, one after the other. Bytes are integers, so repetitions are counted exactly."""
    known: dict[Kind, Pass] = {}
    most = held = 0
    for block, times in blocks:
        peak = now = 0
        for kind in block:
            if kind not in known:
                known[kind] = of_kind(kind)
            one = known[kind]
            peak, now = max(peak, now + one.most), now + one.left
        most, held = max(most, held + peak + max(0, (times - 1) * now)), held + times * now
    return Pass(most, held)


@lru_cache(maxsize=256)
def comes_to(kind: str, stages: int, chunks: int, rank: int) -> frozenset[tuple[int, str]]:
    """(chunk, kind of pass) of this rank that need a message from another rank."""
    passes: set[tuple[int, str]] = set()
    for chunk in range(chunks):
        before, behind = neighbours(kind, stages, chunks, rank, chunk)
        if before is not None and before[0] != rank:
            passes.add((chunk, "forward"))
        if behind is not None and behind[0] != rank:
            passes |= {(chunk, "backward"), (chunk, "backward_input")}
    return frozenset(passes)


@lru_cache(maxsize=4096)
def _blocks(
    kind: str, rank: int, stages: int, chunks: int, micro_batches: int, takes: tuple[bool, ...], keep: int | None
) -> Blocks:
    """`keep`: number of micro-batches of which everything is kept; None: all."""
    if keep == 0:  # the same passes, all of which are recomputed
        whole = _blocks(kind, rank, stages, chunks, micro_batches, takes, None)
        return tuple((tuple(each._replace(again=True) for each in block), times) for block, times in whole)
    actions = passes_of_rank(kind, rank, stages, chunks, micro_batches)
    needs = {each for each in comes_to(kind, stages, chunks, rank) if each[1] == "forward" or takes[each[0]]}
    # Each receive is posted one pass before the one that needs it; that of the first pass with the pass itself.
    posted = [int((chunk, kind) in needs) for kind, _, chunk in actions] + [0]
    posted[1] += posted[0]
    again: Iterator[bool] = itertools.repeat(False)
    if keep:
        pairs = recomputed_pairs(actions, keep * chunks)
        again = iter([(micro_batch, chunk) in pairs for _, micro_batch, chunk in actions])
    kinds = [(kind, chunk) for kind, _, chunk in actions]
    return tuple(_in_blocks(list(zip(kinds, again, posted[1:], strict=False))))


_Same = tuple[tuple[str, int], bool, int]
"""Like `Kind`, but faster to create."""


def _in_blocks(passes: list[_Same]) -> Iterator[tuple[tuple[Kind, ...], int]]:
    """The passes cut into the shortest blocks that repeat."""
    at = 0
    while at < len(passes):
        period, times = next(_repeating(passes, at), (1, 1))
        yield tuple(Kind(*which, again, posted) for which, again, posted in passes[at : at + period]), times
        at += period * times


def _repeating(passes: list[_Same], at: int) -> Iterator[tuple[int, int]]:
    """Lengths of the blocks that repeat from there on, and how often."""
    for period in PERIODS:
        block, end = passes[at : at + period], at + period
        while passes[end : end + period] == block:
            end += period
        if end > at + period:
            yield period, (end - at) // period
