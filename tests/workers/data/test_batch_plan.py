"""Which samples each step, replica and micro-batch uses: a step by step account of a growing batch, the published ramp
of MT-NLG, and cuts that lose nothing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.workers.config import BatchRamp, DataConfig, JobSpec, ModelConfig, ParallelConfig, TrainConfig
from manta.workers.data.batch_plan import BatchPlan, leaf_share, micro_batches, replica_micro_batches, replica_share

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


@pytest.mark.parametrize(("replicas", "sizes"), [(4, [3, 3, 2, 2]), (3, [4, 3, 3]), (5, [2] * 5), (1, [10])])
def test_ten_samples_are_shared_evenly_with_the_rest_for_the_first_replicas(replicas, sizes):
    assert [len(replica_share(range(10), replicas, replica)) for replica in range(replicas)] == sizes


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
