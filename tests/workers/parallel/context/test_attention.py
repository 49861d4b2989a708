"""Attention of ranks that share a sequence equals that of one process: its result, and every gradient."""

import itertools

import pytest
import torch
from context_programs import Case, S, attend, whole

from manta.workers.config import ParallelConfig
from manta.workers.data.batches import Documents
from manta.workers.parallel.context.tiles import segments, tiles
from manta.workers.spec.sequence_runs import runs_of

DOCUMENTS = ((0, 3, 4, 11), (0, 8))
CASES = [
    Case(),
    Case(groups=1, window=3, rows=2),
    Case(groups=4, window=6),
    Case(starts=DOCUMENTS),
    Case(starts=DOCUMENTS, window=3, written_out=True),
    Case(written_out=True, rows=3),
    Case(rate=0.3, groups=1),
    Case(rate=0.3, starts=DOCUMENTS, window=5, rows=2),
]
ORDERS = ("zigzag", "contiguous")
METHODS = ("all_gather", "ring")


@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize(("method", "order"), list(itertools.product(METHODS, ORDERS)))
def test_attention_across_ranks_equals_that_of_one_process(ranks, method, order, context):
    layout = ParallelConfig(context=context, context_method=method, context_order=order)
    by_rank = ranks.run(layout, attend, layout, CASES, torch.float64)
    for number, case in enumerate(CASES):
        for index, rank in enumerate(by_rank):
            for got, expected in zip(rank[number], whole(case), strict=True):
                rows = [expected[first:end] for first, end in runs_of(layout, S, index)]
                torch.testing.assert_close(torch.from_numpy(got), torch.cat(rows), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_attention_in_16_bits_is_as_exact_as_its_inputs(ranks, method):
    layout = ParallelConfig(context=2, context_method=method)
    by_rank = ranks.run(layout, attend, layout, CASES[:4], torch.bfloat16)
    for number, case in enumerate(CASES[:4]):
        for index, rank in enumerate(by_rank):
            for got, expected in zip(rank[number], whole(case), strict=True):
                rows = torch.cat([expected[first:end] for first, end in runs_of(layout, S, index)])
                assert (torch.from_numpy(got) - rows).norm() < 0.01 * rows.norm()


@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize(
    ("order", "window", "starts", "rows"),
    list(itertools.product(ORDERS, (None, 1, 3, 9), (None, DOCUMENTS), (None, 1, 3))),
)
def test_tiles_hold_every_pair_that_attends_exactly_once(order, context, window, starts, rows):
    layout = ParallelConfig(context=context, context_order=order)
    documents = None if starts is None else Documents(starts, S)
    firsts = torch.zeros(2, S, dtype=torch.long) if documents is None else documents.first_tokens()
    query, key = torch.arange(S).unsqueeze(1), torch.arange(S)
    attends = (key <= query) & (query - key < (window or S)) & (key >= firsts.unsqueeze(-1))
    seen = torch.zeros_like(attends, dtype=torch.long)
    own, others = ([segments(runs_of(layout, S, index)) for index in range(context)] for _ in range(2))
    for queries, keys in itertools.product(own, others):
        for tile in tiles(queries, keys, documents, window, rows):
            at = range(tile.first_query, tile.first_query + tile.queries.stop - tile.queries.start)
            to = range(tile.first_key, tile.first_key + tile.keys.stop - tile.keys.start)
            here = query[at.start : at.stop] - key[to.start : to.stop]
            pairs = ((here >= 0) & (here < (tile.window or S))).long()
            assert pairs.sum(1).min() > 0, "each query sees something"
            assert tile.causal or tile.window or pairs.all()
            seen[tile.samples, at.start : at.stop, to.start : to.stop] += pairs
    assert torch.equal(seen, attends.long())
