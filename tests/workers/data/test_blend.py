"""Blended samples: each part gets its share of every beginning of the order, and each of its windows once an epoch."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manta.workers.data import order as module
from manta.workers.data.order import Blend, SampleOrder, blended, integer_shares

weights = st.lists(st.integers(1, 1000), min_size=1, max_size=12)


def test_weights_become_the_smallest_whole_numbers_in_their_ratio():
    assert integer_shares([0.7, 0.3]) == (7, 3)
    assert integer_shares([2.0, 4.0, 6.0]) == (1, 2, 3)
    assert integer_shares([1e-3, 1.0]) == (1, 1000)
    assert integer_shares([5.0]) == (1,)
    assert min(integer_shares([1.0] * 40 + [1.1e-5])) == 1, "however little it is, a part has samples"


@given(st.lists(st.floats(1e-3, 100), min_size=2, max_size=8))
def test_weights_that_need_large_numbers_are_off_by_less_than_a_millionth(values):
    shares = integer_shares(values)
    assert sum(shares) <= module.MAX_PERIOD + len(values)
    whole = sum(map(Fraction, map(repr, values)))
    for share, value in zip(shares, values, strict=True):
        assert abs(Fraction(share, sum(shares)) - Fraction(repr(value)) / whole) < Fraction(len(values), 10**6)


@settings(max_examples=100, deadline=None)
@given(weights)
def test_after_every_sample_each_part_has_had_its_share_within_less_than_one(numbers):
    blend = Blend(integer_shares([float(number) for number in numbers]))
    samples = np.arange(2 * blend.period + 3)
    parts, own_numbers = np.array([blend.locate(sample) for sample in samples.tolist()]).T
    taken = np.cumsum(parts[:, None] == np.arange(len(numbers)), axis=0)  # of each part, after each sample
    assert (own_numbers == taken[samples, parts] - 1).all(), "numbers of a part's samples have no gaps"
    due = (samples[:, None] + 1) * np.array(blend.shares)
    assert (abs(taken * blend.period - due) < blend.period).all()


def test_place_in_a_blend_depends_on_the_sample_number_alone():
    blend, other = Blend((5, 2, 9)), Blend((5, 2, 9))
    samples = [123_456_789_012, 0, 77, 16 * 10**12 + 5]
    assert [blend.locate(sample) for sample in samples] == [other.locate(sample) for sample in reversed(samples)][::-1]
    assert blend.locate(16 * 10**12 + 5)[1] == 10**12 * (5, 2, 9)[blend.locate(5)[0]] + blend.locate(5)[1]


def test_blend_order_is_unchanged_from_earlier_releases():
    """A job that is resumed by another version of this code must go on with the same samples."""
    blend = Blend((5, 2, 9))
    assert [blend.locate(sample)[0] for sample in range(17)] == [2, 0, 2, 2, 0, 1, 2, 2, 0, 2, 0, 2, 2, 0, 1, 2, 2]


def test_each_part_is_read_exactly_once_in_each_of_its_epochs():
    tokens, begins = [101, 57, 330], [0, 120, 200]
    order = blended((3, 1, 2), begins, tokens, 8, 1234)
    windows = [part.windows for part in order.parts]
    assert windows == [11, 6, 40]
    starts = [order.start(sample) for sample in range(6 * 200)]
    by_part = [[], [], []]
    for sample, start in enumerate(starts):
        part, number = order.blend.locate(sample)
        assert begins[part] <= start
        assert start + 9 <= begins[part] + tokens[part], "a sample and its targets lie in their part"
        assert len(by_part[part]) == number
        by_part[part].append(start)
    for part, own in enumerate(by_part):
        for epoch in range(len(own) // windows[part]):
            once = Counter(own[epoch * windows[part] : (epoch + 1) * windows[part]])
            assert len(once) == windows[part], "no window twice"
            distances = sorted(once)
            assert {b - a for a, b in itertools.pairwise(distances)} == {8}, "and none left out"


def test_blend_of_one_part_has_the_order_of_a_corpus_without_weights():
    order, plain = blended((1,), (0,), (1000,), 8, 77), SampleOrder(1000, 8, 77)
    assert [order.start(sample) for sample in range(500)] == [plain.start(sample) for sample in range(500)]


def test_parts_of_the_same_size_are_not_visited_in_the_same_order():
    order = blended((1, 1), (0, 1000), (1000, 1000), 8, 77)
    first, second = ([part.start(sample) for sample in range(100)] for part in order.parts)
    assert first != second


@pytest.mark.soak
@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(1e-3, 1.0), min_size=2, max_size=5))
def test_parts_of_a_blend_keep_their_shares_over_long_periods(values):
    blend = Blend(integer_shares(values))
    taken = [0] * len(values)
    for sample in range(blend.period):
        taken[blend.locate(sample)[0]] += 1
        if sample % 997 == 0:
            for have, share in zip(taken, blend.shares, strict=True):
                assert abs(have * blend.period - (sample + 1) * share) < blend.period
    assert taken == list(blend.shares)
