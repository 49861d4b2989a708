"""The order of samples, those that are held out, and those that are left out."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest
from engine_specs import spec
from hypothesis import given, settings
from hypothesis import strategies as st

from manta.workers.data.batches import BlendedHeldOut, HeldOut, validation_sets
from manta.workers.data.order import SampleOrder, SkippedSamples
from manta.workers.data.prepare import ByteCorpus
from manta.workers.errors import DataError


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


def held_out(tokens: int, most: int) -> HeldOut:
    """A text that begins at token 900."""
    return HeldOut(None, ByteCorpus([]), 900, tokens, most)


def test_validation_has_at_least_one_batch_and_at_most_the_whole_text():
    for asked, size, expected in ((8, 8, 1), (1, 8, 1), (8, 2, 6), (4, 2, 4), (8, 16, 1)):  # of 12 windows
        job = spec(train={"global_batch_size": size})
        assert held_out(100, asked).batches(job) == expected
    one = spec(train={"global_batch_size": 1})
    for tokens, windows in ((100, 12), (97, 12), (96, 11)):  # a window needs its last target too
        assert held_out(tokens, 99).batches(one) == windows


def test_held_out_windows_lie_end_to_end_and_wrap_around_at_the_end():
    assert [held_out(33, 1).start(sample, 8) for sample in range(6)] == [900, 908, 916, 924, 900, 908]


def test_held_out_parts_of_a_blend_each_wrap_around_at_their_own_end():
    class InTurn:
        def locate(self, sample: int) -> tuple[int, int]:
            return sample % 2, sample // 2

    blended = BlendedHeldOut(None, ByteCorpus([]), 900, 50, 1, ((900, 33), (2000, 24)), InTurn())
    starts = [blended.start(sample, 8) for sample in range(12)]
    assert starts[::2] == [900, 908, 916, 924, 900, 908]
    assert starts[1::2] == [2000, 2008] * 3, "a third window has no target for its last token"


def test_validation_set_may_have_its_own_number_of_batches(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 1000)
    sets = [{"name": name, "paths": [str(tmp_path / "a.txt")]} for name in ("as_all", "own")]
    job = spec(data={"validation": [sets[0], sets[1] | {"batches": 3}]}, train={"validate_every": 1})
    assert [each.max_batches for each in validation_sets(job, None, False)] == [job.train.validation_batches, 3]


def test_too_short_or_missing_validation_set_is_refused_with_its_path(tmp_path):
    (tmp_path / "short.txt").write_bytes(b"12345678")
    named = {"name": "tiny", "paths": [str(tmp_path / "short.txt")]}
    job = spec(data={"validation": [named]}, train={"validate_every": 1})
    with pytest.raises(DataError, match=r"validation set tiny has 8 tokens, but one sequence .* needs 9: .*short\.txt"):
        validation_sets(job, None, False)
    job = spec(data={"validation": [named | {"paths": [str(tmp_path / "gone")]}]}, train={"validate_every": 1})
    with pytest.raises(DataError, match=r"no such file or directory: .*gone"):
        validation_sets(job, None, False)


RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda each: range(each[0], sum(each))))


@given(RANGES, st.integers(0, 80))
def test_samples_that_are_not_skipped_keep_their_order(ranges, count):
    unused = {sample for each in ranges for sample in each}
    used = [sample for sample in range(1000) if sample not in unused][:count]
    skipped = SkippedSamples.of(ranges)
    assert [skipped.sample(place) for place in range(count)] == used
    samples = skipped.samples(range(count))
    assert [sample for each in samples for sample in each] == used
    assert all(a.stop < b.start for a, b in pairwise(samples)), "neighbours are one range"


@given(RANGES, st.integers(0, 50))
def test_skipping_a_step_puts_the_next_samples_in_its_place_and_keeps_those_before(ranges, first):
    before = SkippedSamples.of(ranges)
    step = before.samples(range(first, first + 8))
    after = SkippedSamples.of([*before.ranges, *step])
    assert [after.sample(place) for place in range(first)] == [before.sample(place) for place in range(first)]
    assert after.samples(range(first, first + 8)) == before.samples(range(first + 8, first + 16))


@given(RANGES)
def test_skipped_sample_ranges_merge_into_the_same_disjoint_ranges_in_any_order(ranges):
    merged = SkippedSamples.of(ranges)
    assert SkippedSamples.of(reversed(ranges)) == merged
    assert all(a.stop < b.start for a, b in zip(merged.ranges, merged.ranges[1:], strict=False))
