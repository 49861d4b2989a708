"""Memory that is walked through in blocks of passes is that of every pass in turn."""

from __future__ import annotations

import random

import pytest

from manta.workers.accounting.rank_passes import (
    Kind,
    Pass,
    blocks_of_rank,
    passes_awaiting_messages,
    passes_of_rank,
    total_of_passes,
)
from manta.workers.config import ParallelConfig
from manta.workers.parallel.recompute import recomputed


def drawn(seed: int) -> tuple[ParallelConfig, int]:
    """A layout, and micro-batches."""
    draw = random.Random(seed)
    schedule, stages = draw.choice(["1f1b", "gpipe", "zb-h1", "zb-v", "interleaved"]), draw.randint(2, 9)
    chunks = {"zb-v": 2, "interleaved": draw.randint(2, 4)}.get(schedule, 1)
    micro_batches = stages * draw.randint(1, 6) if schedule == "interleaved" else draw.randint(1, 40)
    recompute, keep = draw.choice(["none", "selective", "full"]), draw.choice([0, 0, 1, 3])
    layout = {"schedule": schedule, "pipeline": stages, "virtual_stages": chunks, "recompute": recompute}
    return ParallelConfig.model_validate(layout | {"recompute_keep": keep}), micro_batches


def one_by_one(layout: ParallelConfig, rank: int, micro_batches: int, takes: list[bool]) -> list[Kind]:
    """Every pass of a rank. Each message is asked for one pass ahead of its own."""
    shape = layout.schedule, rank, layout.pipeline, layout.virtual_stages
    actions, comes = passes_of_rank(*shape, micro_batches), passes_awaiting_messages(*(shape[i] for i in (0, 2, 3, 1)))
    again = recomputed(actions, layout)
    needs = [(a.chunk, a.kind) in comes and (a.kind == "forward" or takes[a.chunk]) for a in actions]
    posted = [int(needed) for needed in (*needs[1:], False)]
    posted[0] += needs[0]
    return [Kind(a.kind, a.chunk, (a.micro_batch, a.chunk) in again, n) for a, n in zip(actions, posted, strict=True)]


@pytest.mark.parametrize("seed", range(30))
def test_rank_pass_blocks_unroll_to_the_passes_and_have_their_peak(seed):
    layout, micro_batches = drawn(seed)
    draw = random.Random(seed)
    for rank in range(layout.pipeline):
        takes = [draw.random() < 0.8 for _ in range(layout.virtual_stages)]
        passes = one_by_one(layout, rank, micro_batches, takes)
        blocks = blocks_of_rank(layout, rank, micro_batches, takes)
        assert [kind for block, times in blocks for kind in times * block] == passes
        sizes = {kind: Pass(draw.randint(0, 9), draw.randint(-9, 9)) for kind in sorted(set(passes))}
        whole = Pass(0, 0)
        for kind in passes:
            whole = whole.then(sizes[kind])
        assert total_of_passes(blocks, sizes.__getitem__) == whole


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("zb-v", 2)])
def test_rank_pass_blocks_do_not_grow_with_the_number_of_micro_batches(schedule, chunks):
    layout = ParallelConfig.model_validate({"schedule": schedule, "pipeline": 8, "virtual_stages": chunks})
    few, many = (blocks_of_rank(layout, 3, count, [True] * chunks) for count in (40, 400))
    assert len(many) == len(few) < 40
