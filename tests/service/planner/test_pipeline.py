"""The simulation of unequal stages, which extrapolates where it can."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.support.timeline import PassTimes
from manta.service.planner.pipeline import Pipeline, StageTimes
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
