"""Layers shared out by time leave the busiest rank the least that any list leaves it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.planner.stage_shares import chunks_of, in_words, moves, shared_out
from workers.parallel.pipeline.stages import even_counts, place

KINDS = {"1f1b": 1, "interleaved": 2, "zb-v": 2}


def busiest(counts, chunks, seconds) -> float:
    """Seconds of the rank that has most to do."""
    return max(sum(seconds(index, counts[index]) for index in own) for own in chunks)


@given(
    st.sampled_from(list(KINDS)),
    st.integers(1, 3),
    st.integers(0, 5),
    st.floats(0.1, 3.0),
    st.lists(st.floats(0.0, 5.0), min_size=6, max_size=6),
    st.none() | st.lists(st.integers(1, 6), min_size=3, max_size=3),
)
def test_no_other_list_leaves_the_busiest_rank_less(kind, pipeline, more, layer, extra, room):
    """Each stage may have something of its own besides, and a rank room for so many layers."""
    count = pipeline * KINDS[kind]
    chunks, layers = chunks_of(kind, pipeline, KINDS[kind]), count + more
    limits = None if room is None else room[:pipeline]

    def seconds(index: int, number: int) -> float:
        return number * layer + extra[index]

    counts = shared_out(layers, chunks, seconds, limits)
    lists = [
        each
        for each in itertools.product(range(1, more + 2), repeat=count)
        if sum(each) == layers
        and (limits is None or all(sum(each[i] for i in own) <= most for own, most in zip(chunks, limits, strict=True)))
    ]
    assert (counts is None) == (not lists)
    if counts is not None:
        assert counts in lists
        assert busiest(counts, chunks, seconds) <= min(busiest(each, chunks, seconds) for each in lists) * (1 + 1e-9)


def test_chunks_are_where_the_engine_has_them():
    for kind, virtual_stages in KINDS.items():
        for rank, own in enumerate(chunks_of(kind, 3, virtual_stages)):
            assert [place(kind, 3, virtual_stages, index) for index in own] == [
                (rank, chunk) for chunk in range(virtual_stages)
            ]


def test_stages_of_slower_machines_have_fewer_layers():
    speeds = (1.0, 1.0, 2.0, 2.0)
    counts = shared_out(12, chunks_of("1f1b", 4, 1), lambda index, layers: layers / speeds[index])
    assert counts == (2, 2, 4, 4)


def test_of_equal_ranks_the_first_ones_have_the_layers_that_are_left_over():
    assert shared_out(6, chunks_of("1f1b", 4, 1), lambda _, layers: layers) == (2, 2, 1, 1)
    with_logits = shared_out(32, chunks_of("1f1b", 4, 1), lambda index, layers: layers + 3.4 * (index == 3))
    assert with_logits == (9, 9, 9, 5) and even_counts(32, 4) == (8, 8, 8, 8)
    held = shared_out(8, chunks_of("zb-v", 2, 2), lambda index, layers: layers + 2 * (index == 3))
    assert held == (2, 3, 2, 1), "the logits are on rank 0, and what it has fewer is of that chunk"


def test_a_move_is_of_one_layer_and_leaves_no_stage_empty():
    assert sorted(moves((1, 2, 2))) == [(1, 1, 3), (1, 3, 1), (2, 1, 2), (2, 2, 1)]
    long = (3,) * 10 + (2,) * 30
    others = list(moves(long))
    assert all(sum(each) == sum(long) and sum(a != b for a, b in zip(each, long, strict=True)) == 2 for each in others)
    assert len(others) < 8 * 8 and (2, *(3,) * 9, 3, *(2,) * 29) in others


@pytest.mark.parametrize(
    ("counts", "words"), [((4, 4, 5, 3), "2 x 4, 5, 3"), ((2,), "2"), ((1,) * 35 + (2,) * 35, "35 x 1, 35 x 2")]
)
def test_a_list_in_words(counts, words):
    assert in_words(counts) == words
