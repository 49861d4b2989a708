"""The simulation of unequal stages, which extrapolates where it can."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.support.timeline import PassTimes
from manta.service.planner.pipeline import Pass, Pipeline, SharedCores, StageTimes, simulate_sharing
from manta.workers.schedules import SCHEDULES
from manta.workers.schedules.stages import even_counts

times = st.floats(0.1, 5.0)


def chunks_of(kind: str) -> int:
    return SCHEDULES[kind].virtual_stages or 3


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(list(SCHEDULES)),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(0, 20),
    st.tuples(times, times, times),
    st.tuples(st.floats(0, 3), st.floats(0, 3)),
    st.floats(0, 1),
    st.booleans(),
)
def test_pipeline_time_of_many_micro_batches_extrapolates_the_first_few(
    kind, stages, rounds, layers, layer, ends, message, blocking
):
    """Of stages as models have them: a layer more or less, and something at both ends."""
    v, m = chunks_of(kind), stages * rounds
    count = stages * v
    more = [ends[0], *[0.0] * (count - 2), ends[1]][:count]
    stage_times = tuple(
        StageTimes(*(seconds * number + extra for seconds in layer))
        for number, extra in zip(even_counts(2 * count + layers % count, count), more, strict=True)
    )
    pipeline = Pipeline(kind, stages, v, stage_times, (message,) * (count - 1), blocking)
    whole = pipeline.simulated_seconds(m)
    # Where ranks wait for one another in turns, the rhythm may be longer than what is simulated of it.
    assert pipeline.seconds(m) == pytest.approx(whole, rel=0.01)
    assert whole >= pipeline.work(m) - 1e-9


def test_slightly_busier_rank_limits_a_long_pipeline():
    """As lists are that a search finds: of the first micro-batches the other rank is done later."""
    layers = (7, 7, 6, 4)
    stages = [StageTimes(1.0 * count, 1.0 * count, 0.9 * count) for count in layers]
    stages[-1] = StageTimes(6.3, 6.3, 5.3)
    pipeline = Pipeline("zb-v", 2, 2, tuple(stages), (0.1,) * 3, False)
    first, second = pipeline.rank_work()
    assert 1 < first / second < 1.03
    for m in (16, 64, 1024):
        assert pipeline.seconds(m) == pytest.approx(pipeline.simulated_seconds(m), rel=1e-9)
        assert pipeline.seconds(m) >= pipeline.work(m) - 1e-9


@pytest.mark.parametrize("m", [1, 4, 100])
def test_blocking_messages_take_the_time_of_both_ends(m):
    """Each micro-batch takes a stage in the middle a forward, a backward and four messages."""
    passes = PassTimes(1.0, 1.0, 1.0, communication=0.25)
    free, blocking = passes.pipeline("1f1b", 4, 1), passes.pipeline("1f1b", 4, 1, blocking=True)
    assert blocking.seconds(m) >= free.seconds(m)
    assert blocking.seconds(101) - blocking.seconds(100) == pytest.approx(4.0)
    assert free.seconds(101) - free.seconds(100) < 4.0


def test_slowest_stage_limits_the_pipeline():
    quick, slow = StageTimes(1.0, 1.0, 1.0), StageTimes(2.0, 1.0, 1.0)
    pipeline = Pipeline("1f1b", 4, 1, (quick, quick, slow, quick), (0.0,) * 3, False)
    assert pipeline.seconds(200) - pipeline.seconds(199) == pytest.approx(4.0)
    assert pipeline.rank_work() == [3.0, 3.0, 4.0, 3.0]


def test_pipeline_of_one_stage_takes_the_sum_of_its_passes():
    assert Pipeline("1f1b", 1, 1, (StageTimes(1.0, 2.0, 3.0),), (), False).seconds(1000) == pytest.approx(6000)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_evaluation_in_a_pipeline_is_consecutive_forwards(kind):
    stages, m, rounds = 4, 8, SCHEDULES[kind].virtual_stages or 2
    times = (StageTimes(1.0, 50.0, 70.0),) * (stages * rounds)
    evaluated = Pipeline(kind, stages, rounds, times, (0.0,) * (len(times) - 1), blocking=False, trains=False)
    bars = evaluated.bars(m)
    assert {(bar.stage, bar.micro_batch) for bar in bars} == {(s, i) for s in range(len(times)) for i in range(m)}
    assert {bar.kind for bar in bars} == {"forward"}
    assert m * rounds + stages - 1 <= evaluated.seconds(m) <= m * rounds + 2 * stages
    slope = evaluated.seconds(400) - evaluated.seconds(396)
    assert slope == pytest.approx(4 * rounds)


KINDS = tuple(SCHEDULES)


def cores(count: float, ranks: int = 1, all_busy: float = 1.0) -> SharedCores:
    return SharedCores(count, ranks, all_busy)


def alone(*seconds: float) -> list[Pass]:
    """Passes of a rank that waits for nobody."""
    return [(each, (), ()) for each in seconds]


def test_ranks_with_a_core_each_do_not_slow_each_other():
    assert simulate_sharing([alone(1.0, 2.0), alone(2.5)], 0, cores(2)) == pytest.approx(3.0)


def test_ranks_on_one_core_take_the_sum_of_their_work():
    assert simulate_sharing([alone(1.0, 2.0), alone(2.5)], 0, cores(1)) == pytest.approx(5.5)


def test_last_rank_on_shared_cores_has_a_core_to_itself():
    """Three ranks on two cores: until 3 s have passed each has done 2 s of work, then one has another second to do."""
    assert simulate_sharing([alone(2.0), alone(2.0), alone(3.0)], 0, cores(2)) == pytest.approx(4.0)


def test_simulated_pass_on_shared_cores_waits_for_its_inputs():
    first: list[Pass] = [(1.0, (), (0,)), (1.0, (), ())]
    second: list[Pass] = [(5.0, (0,), ())]
    assert simulate_sharing([first, second], 1, cores(2)) == pytest.approx(6.0)


def test_shared_cores_are_slower_while_all_are_busy():
    assert simulate_sharing([alone(2.0), alone(2.0)], 0, cores(2, all_busy=0.8)) == pytest.approx(2.5)
    assert simulate_sharing([alone(2.0)], 0, cores(2, all_busy=0.8)) == pytest.approx(2.0)


def test_a_group_takes_a_core_for_each_of_its_ranks():
    assert simulate_sharing([alone(2.0)], 0, cores(2, ranks=8)) == pytest.approx(8.0)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(KINDS), st.integers(1, 4), st.integers(1, 3), times, times, times)
def test_pipeline_with_a_core_per_rank_takes_its_time_on_devices(kind, stages, rounds, f, b, w):
    v = SCHEDULES[kind].virtual_stages or 3
    stage, count = StageTimes(f, b, w), stages * v
    devices = Pipeline(kind, stages, v, (stage,) * count, (0.0,) * (count - 1), blocking=True)
    shared = replace(devices, cores=cores(stages))
    assert shared.simulated_seconds(stages * rounds) == pytest.approx(devices.simulated_seconds(stages * rounds))


def test_message_on_shared_cores_takes_time_at_both_ends():
    """Each end gives it a core's time, one after the other."""
    pipeline = Pipeline("1f1b", 2, 1, (StageTimes(1.0, 1.0, 0.0),) * 2, (0.25,), True, cores(2))
    assert pipeline.simulated_seconds(1) == pytest.approx(4 + 4 * 0.25)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(KINDS), st.integers(1, 4), st.integers(1, 3), times, times, st.integers(1, 4), st.floats(0.5, 1))
def test_step_on_shared_cores_lies_between_its_work_and_that_of_one_core(kind, stages, rounds, f, b, ranks, all_busy):
    v, m = SCHEDULES[kind].virtual_stages or 2, stages * rounds
    pipeline = Pipeline(kind, stages, v, (StageTimes(f, b, b),) * (stages * v), (0.0,) * (stages * v - 1), True)
    work = sum(pipeline.rank_work()) * m * ranks
    shared = replace(pipeline, cores=cores(2, ranks, all_busy))
    assert shared.work(m) <= shared.simulated_seconds(m) * (1 + 1e-9)
    assert work / 2 <= shared.simulated_seconds(m) * (1 + 1e-9)
    assert shared.simulated_seconds(m) <= work / all_busy * (1 + 1e-9)
    one = replace(pipeline, cores=cores(1, ranks))
    assert one.simulated_seconds(m) == pytest.approx(work)


@pytest.mark.parametrize(("threads", "ranks"), [(1, 1), (2, 1), (8, 1), (1, 5), (4, 2)])
def test_single_stage_on_shared_cores_takes_exactly_its_work(threads, ranks):
    shared = SharedCores(2, ranks, 0.9, threads)
    pipeline = Pipeline("1f1b", 1, 1, (StageTimes(1.0, 1.0, 1.0),), (), blocking=True, cores=shared)
    assert pipeline.work(4) == pytest.approx(pipeline.seconds(4))
