"""The order of samples: blended, held out, left out, and shared by steps and replicas."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from engine_specs import spec
from hypothesis import given, settings
from hypothesis import strategies as st

from manta.workers.config import BatchRamp, DataConfig, JobSpec, ModelConfig, ParallelConfig, TrainConfig
from manta.workers.data import order as module
from manta.workers.data.batch_plan import (
    BatchPlan,
    changed_sample_keys,
    leaf_share,
    micro_batches,
    most_samples,
    replica_micro_batches,
    replica_share,
)
from manta.workers.data.batches import BlendedHeldOut, HeldOut, validation_sets
from manta.workers.data.order import Blend, SampleOrder, SkippedSamples, blended, integer_shares
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


ramps = st.tuples(st.integers(1, 20), st.integers(1, 10), st.integers(0, 20), st.integers(1, 600))
"""(first size, increment, number of increments, samples)."""


def plan_of(start: int, increment: int, increments: int, samples: int) -> BatchPlan:
    """The plan of a ramp."""
    ramp = BatchRamp(start=start, increment=increment, samples=samples)
    return BatchPlan(TrainConfig(steps=1, global_batch_size=start + increments * increment, batch_ramp=ramp))


def size_after(consumed: int, start: int, increment: int, increments: int, samples: int) -> int:
    """Sequences of the step that begins after so many samples: the ramp is cut into equal parts, one an increment."""
    return start + increment * min(increments, consumed * increments // samples)


@given(ramps)
def test_ramped_batch_sizes_equal_those_counted_step_by_step(ramp):
    plan, consumed = plan_of(*ramp), 0
    for step in range(1, 80):
        assert plan.first_sample(step) == consumed
        assert plan.size(step) == size_after(consumed, *ramp)
        assert plan.samples(step) == range(consumed, consumed + plan.size(step))
        consumed += plan.size(step)


@given(ramps)
def test_a_batch_never_shrinks_and_ends_at_its_full_size(ramp):
    start, increment, increments, samples = ramp
    plan = plan_of(*ramp)
    sizes = [plan.size(step) for step in range(1, samples + 2)]  # a step has one sample or more
    assert sizes[0] == start
    assert all(before <= after for before, after in itertools.pairwise(sizes))
    assert sizes[-1] == start + increments * increment


@given(ramps, st.integers(1, 10**9))
def test_steps_follow_each_other_without_a_gap(ramp, step):
    plan = plan_of(*ramp)
    assert plan.samples(step).stop == plan.samples(step + 1).start


@given(st.integers(1, 10**6), st.integers(1, 10**9))
def test_without_a_ramp_all_batches_have_one_size(size, step):
    plan = BatchPlan(TrainConfig(steps=1, global_batch_size=size))
    assert plan.samples(step) == range((step - 1) * size, step * size)


def test_ramp_of_mt_nlg_grows_from_32_to_1920_as_published():
    """arXiv:2201.11990, section 3.2: from 32 to 1920 in steps of 32 over the first 12 million samples."""
    ramp = (32, 32, 59, 12_000_000)
    plan = plan_of(*ramp)
    assert [level.size for level in plan.levels] == list(range(32, 1921, 32))
    # A 59th of 12 million are 203389.8 samples: 6356 steps of 32 are the first that have consumed them.
    assert (plan.size(6356), plan.size(6357)) == (32, 64)
    assert plan.first_sample(6357) == 203_392
    full = plan.levels[-1].first_step
    assert plan.first_sample(full - 1) < 12_000_000 <= plan.first_sample(full)
    consumed = 0
    for step in range(1, full + 100):
        assert (plan.first_sample(step), plan.size(step)) == (consumed, size_after(consumed, *ramp))
        consumed += plan.size(step)


def test_a_step_that_passes_several_thresholds_takes_all_their_increments():
    plan = plan_of(8, 2, 4, 10)  # an increment every 2.5 samples
    assert [plan.size(step) for step in (1, 2, 3)] == [8, 8 + 3 * 2, 16]
    assert [level.size for level in plan.levels] == [8, 14, 16], "each is some step's"


samples_of_a_step = st.builds(
    lambda first, size: range(first, first + size), st.integers(0, 10**12), st.integers(1, 200)
)


@given(samples_of_a_step, st.integers(1, 40))
def test_replicas_share_a_batch_evenly_and_in_order(samples, replicas):
    shares = [replica_share(samples, replicas, replica) for replica in range(replicas)]
    assert list(itertools.chain(*shares)) == list(samples)
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(samples_of_a_step, st.integers(1, 50))
def test_micro_batches_have_their_size_but_for_the_last(samples, size):
    parts = micro_batches(samples, size)
    assert list(itertools.chain(*parts)) == list(samples)
    assert all(len(part) == size for part in parts[:-1])
    assert 1 <= len(parts[-1]) <= size


@given(samples_of_a_step, st.integers(1, 20), st.integers(1, 20))
def test_over_all_replicas_and_micro_batches_every_sample_appears_once(samples, replicas, size):
    parts = [
        part for replica in range(replicas) for part in micro_batches(replica_share(samples, replicas, replica), size)
    ]
    assert list(itertools.chain(*parts)) == list(samples)


def elastic_spec(data: int, size: int, pipeline: int = 1) -> JobSpec:
    """A job that shares whole micro-batches of `size`, interleaved where it has a pipeline."""
    layout = ParallelConfig(data=data, pipeline=pipeline, schedule="interleaved", virtual_stages=2)
    train = TrainConfig(steps=1, global_batch_size=1, micro_batch_size=size, deterministic="elastic")
    model = ModelConfig(layers=2, hidden_size=8, heads=1, sequence_length=8)
    return JobSpec(model=model, data=DataConfig(source="python-stdlib"), train=train, parallel=layout)


@given(samples_of_a_step, st.integers(1, 20), st.integers(1, 20))
def test_elastic_replicas_share_the_micro_batches_of_the_whole_batch(samples, replicas, size):
    spec = elastic_spec(replicas, size)
    parts = [replica_micro_batches(samples, spec, replica) for replica in range(replicas)]
    assert list(itertools.chain(*parts)) == micro_batches(samples, size), "whatever the number of replicas"
    counts = [len(part) for part in parts]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 5))
def test_interleaved_replicas_share_groups_of_micro_batches(groups, replicas, stages):
    layout = elastic_spec(replicas, 1, stages).layout
    shares = [leaf_share(groups * stages, layout, replica) for replica in range(replicas)]
    assert list(itertools.chain(*shares)) == list(range(groups * stages))
    assert all(len(share) % stages == 0 for share in shares)


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 5))
def test_the_first_replica_runs_most_micro_batches(batch, replicas, size):
    for deterministic in ("layout", "elastic"):
        spec = elastic_spec(replicas, size)
        train = spec.train.model_copy(update={"global_batch_size": batch, "deterministic": deterministic})
        spec = spec.model_copy(update={"train": train})
        assert spec.micro_batches == len(replica_micro_batches(range(batch), spec, 0))


@given(samples_of_a_step, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5))
def test_replicas_with_spread_experts_run_equally_many_micro_batches(samples, groups, context, expert, size):
    alone = elastic_spec(groups * expert, size)
    train = alone.train.model_copy(update={"deterministic": "layout"})
    layout = ParallelConfig(data=groups * expert, context=context, expert=expert)
    spec = alone.model_copy(update={"train": train, "parallel": layout})
    parts = [replica_micro_batches(samples, spec, replica) for replica in range(layout.data)]
    assert list(itertools.chain(*itertools.chain(*parts))) == list(samples)
    if expert > 1:
        assert {len(part) for part in parts} == {len(parts[0])}
    assert all(part for own in parts[:1] for part in own), "nobody has empty ones in every place"
    sizes = [[len(part) for part in parts[holder // context]] for holder in range(layout.holders)]
    for holder in range(layout.holders) if expert > 1 else ():
        first = holder - holder % expert
        most = [max(each) for each in zip(*sizes[first : first + expert], strict=True)]
        assert most_samples(samples, spec, *divmod(holder, context)) == most


A_AND_B = {"source": "text", "paths": ["/data/a/t.txt", "/data/b/t.txt"], "tokenizer": "/data/tokenizer.json"}


@pytest.mark.parametrize(
    ("data", "changed"),
    [
        ({"paths": ["/moved/x/a/t.txt", "/moved/x/b/t.txt"], "tokenizer": "/moved/tokenizer.json"}, []),
        ({"documents": "apart", "end_of_document": "</s>"}, ["data.end_of_document (was None, is </s>)"]),
        ({"paths": ["/data/b/t.txt", "/data/a/t.txt"]}, [
            "data.paths (was ['/data/a/t.txt', '/data/b/t.txt'], is ['/data/b/t.txt', '/data/a/t.txt'])"]),
        ({"paths": ["/data/a/t.txt"]}, ["data.paths (was ['/data/a/t.txt', '/data/b/t.txt'], is ['/data/a/t.txt'])"]),
        ({"tokenizer": "bpe"}, ["data.tokenizer (was /data/tokenizer.json, is bpe)"]),
        ({"special_tokens": True}, ["data.special_tokens (was False, is True)"]),
    ],
    ids=str,
)  # fmt: skip
def test_keys_that_give_steps_other_samples_are_named_and_a_moved_corpus_is_not(data, changed):
    stored = spec(data=A_AND_B).model_dump(mode="json")
    del stored["data"]["special_tokens"]  # as stored by a release without it
    assert list(changed_sample_keys(spec(data=A_AND_B | data), stored)) == changed
    assert (
        list(changed_sample_keys(spec(parallel={"data": 2}, train={"steps": 9}), spec().model_dump(mode="json"))) == []
    )
