"""Ranks that share cores: no work is done for nothing, none waits while a core is free that it could have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manta.service.planner.pipeline import Pass, Pipeline, SharedCores, StageTimes, simulate_sharing
from manta.workers.schedules import SCHEDULES

KINDS = tuple(SCHEDULES)
times = st.floats(0.1, 5.0)


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
