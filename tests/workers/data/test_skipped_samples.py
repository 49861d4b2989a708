"""What is skipped is used by no step, and nothing else changes."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from manta.workers.data.order import SkippedSamples

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
