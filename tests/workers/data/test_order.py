"""Each epoch visits every window of the corpus once, in an order that depends on seed and epoch alone."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from manta.workers.data.order import SampleOrder


@st.composite
def orders(draw: st.DrawFn) -> SampleOrder:
    """A corpus part of up to some hundred windows."""
    length = draw(st.integers(1, 50))
    tokens = draw(st.integers(length + 1, length * draw(st.integers(1, 300)) + 1 + length))
    return SampleOrder(tokens, length, draw(st.integers(0, 2**40)))


@settings(deadline=None)
@given(orders(), st.integers(0, 5))
def test_an_epoch_is_a_permutation_of_windows_that_do_not_overlap(order, epoch):
    starts = sorted(order.start(epoch * order.windows + i) for i in range(order.windows))
    assert all(b - a == order.sequence_length for a, b in itertools.pairwise(starts))


@settings(deadline=None)
@given(orders(), st.integers(0, 10**9))
def test_every_window_with_its_targets_lies_in_the_corpus(order, sample):
    start = order.start(sample)
    assert start >= 0
    assert start + order.sequence_length + 1 <= order.tokens


def test_epochs_differ_in_order_and_offset():
    order = SampleOrder(10_001, 10, seed=1)
    epochs = [[order.start(epoch * order.windows + i) for i in range(order.windows)] for epoch in range(4)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert len({min(epoch) for epoch in epochs}) > 1


def test_sample_order_differs_between_seeds_and_repeats_for_one():
    def beginning(seed: int) -> list[int]:
        order = SampleOrder(10_001, 10, seed)
        return [order.start(i) for i in range(20)]

    assert beginning(1) == beginning(1) != beginning(2)


def test_about_half_of_successive_samples_in_the_order_rise_in_position():
    order = SampleOrder(10_001, 10, seed=1)
    starts = [order.start(i) for i in range(order.windows)]
    rises = sum(a < b for a, b in itertools.pairwise(starts))
    assert 0.4 < rises / len(starts) < 0.6


def test_sample_order_is_unchanged_from_earlier_releases():
    """A job that is resumed by another version of this code must go on with the same samples."""
    order = SampleOrder(1001, 10, seed=1234)
    assert [order.start(i) for i in (0, 1, 2, 99, 1000)] == [640, 170, 710, 156, 353]
    whole = SampleOrder(1000, 10, seed=1234)
    assert (whole.windows, [whole.start(i) for i in range(4)]) == (98, [640, 170, 710, 540])
    packed = SampleOrder(1000, 10, seed=1234, shifts=False)
    assert (packed.windows, [packed.start(i) for i in (0, 1, 100, 101)]) == (100, [640, 170, 150, 110])
