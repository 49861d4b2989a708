"""Layers shared out by time leave the busiest rank the least that any list leaves it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.service.planner.stage_shares import chunks_of, format_counts, moves, shared_out
from manta.workers.schedules.stages import chunk_location, even_counts

KINDS = {"1f1b": 1, "interleaved": 2, "zb-v": 2}


def seconds_of(own, counts, costs) -> list[float]:
    """Of each of a rank's chunks."""
    return [counts[index] * costs[index][0] + costs[index][1] for index in own]


def busiest(counts, chunks, costs) -> float:
    """Seconds of the rank that has most to do."""
    return max(sum(seconds_of(own, counts, costs)) for own in chunks)


@given(
    st.sampled_from(list(KINDS)),
    st.integers(1, 3),
    st.integers(0, 5),
    st.floats(0.1, 3.0),
    st.lists(st.floats(0.0, 5.0), min_size=6, max_size=6),
    st.none() | st.lists(st.integers(1, 6), min_size=3, max_size=3),
)
def test_shared_out_layers_minimize_the_load_of_the_busiest_rank(kind, pipeline, more, layer, extra, room):
    """Each stage may have something of its own besides, and a rank room for so many layers."""
    count = pipeline * KINDS[kind]
    chunks, layers = chunks_of(kind, pipeline, KINDS[kind]), count + more
    limits = None if room is None else room[:pipeline]

    costs = [(layer, besides) for besides in extra[:count]]
    counts = shared_out(layers, chunks, costs, limits)
    lists = [
        each
        for each in itertools.product(range(1, more + 2), repeat=count)
        if sum(each) == layers
        and (limits is None or all(sum(each[i] for i in own) <= most for own, most in zip(chunks, limits, strict=True)))
    ]
    assert (counts is None) == (not lists)
    if counts is not None:
        assert counts in lists
        assert busiest(counts, chunks, costs) <= min(busiest(each, chunks, costs) for each in lists) * (1 + 1e-9)


def test_stage_chunks_match_the_placement_of_the_engine():
    for kind, virtual_stages in KINDS.items():
        for rank, own in enumerate(chunks_of(kind, 3, virtual_stages)):
            assert [chunk_location(kind, 3, virtual_stages, index) for index in own] == [
                (rank, chunk) for chunk in range(virtual_stages)
            ]


def test_stages_of_slower_machines_have_fewer_layers():
    speeds = (1.0, 1.0, 2.0, 2.0)
    counts = shared_out(12, chunks_of("1f1b", 4, 1), [(1 / speed, 0.0) for speed in speeds])
    assert counts == (2, 2, 4, 4)


def test_shared_out_layers_give_remainders_to_the_first_of_equal_ranks():
    three = [(1.0, 0.0)] * 3
    assert shared_out(6, chunks_of("1f1b", 4, 1), [*three, (1.0, 0.0)]) == (2, 2, 1, 1)
    with_logits = shared_out(32, chunks_of("1f1b", 4, 1), [*three, (1.0, 3.4)])
    assert with_logits == (9, 9, 9, 5) and even_counts(32, 4) == (8, 8, 8, 8)
    held = shared_out(8, chunks_of("zb-v", 2, 2), [*three, (1.0, 2.0)])
    assert held == (2, 3, 2, 1), "the logits are on rank 0, and what it has fewer is of that chunk"


def test_layer_moves_shift_one_layer_and_leave_no_stage_empty():
    assert sorted(moves((1, 2, 2))) == [(1, 1, 3), (1, 3, 1), (2, 1, 2), (2, 2, 1)]
    long = (3,) * 10 + (2,) * 30
    others = list(moves(long))
    assert all(sum(each) == sum(long) and sum(a != b for a, b in zip(each, long, strict=True)) == 2 for each in others)
    assert len(others) < 8 * 8 and (2, *(3,) * 9, 3, *(2,) * 29) in others


def moved(counts) -> set[int]:
    """Stages that any of the moves is from or to."""
    return {at for each in moves(counts) for at, (a, b) in enumerate(zip(counts, each, strict=True)) if a != b}


def test_layer_moves_of_deep_pipelines_are_limited_to_relevant_stages():
    """Both ends, those beside them, the middle, and the first and the last of the fullest and of the emptiest."""
    assert len(list(moves((2,) * 8))) == 8 * 7 and moved((2,) * 9) == {0, 1, 4, 7, 8}
    assert moved((3, 3, 3, 3, 9, 3, 3, 9, 3, 3, 3, 3, 2, 3, 2, 3, 3, 3)) == {0, 1, 4, 7, 8, 12, 14, 16, 17}


@pytest.mark.parametrize(
    ("counts", "words"), [((4, 4, 5, 3), "2 x 4, 5, 3"), ((2,), "2"), ((1,) * 35 + (2,) * 35, "35 x 1, 35 x 2")]
)
def test_stage_layers_are_written_in_words(counts, words):
    assert format_counts(counts) == words
