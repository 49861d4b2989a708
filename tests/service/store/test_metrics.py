"""Metrics arrive exactly once, keep NaN, and come back as at most so many points."""

import math
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.states import JobState
from service.store import generations, jobs, metrics


@pytest.fixture
def running(store, started):
    store.write(lambda session: generations.begin(session, started.id, "submitted", False))
    return store.write(lambda session: jobs.transition(session, started.id, JobState.RUNNING))


@pytest.fixture
def record(store, running):
    """Stores a report of the running job."""

    def run(sequence, rows, generation=1, rank=0):
        return store.write(lambda session: metrics.record(session, running.id, generation, rank, sequence, rows))

    return run


def read(store, job, *arguments, **options):
    with store.read() as session:
        return metrics.series(session, job.id, *arguments, **options)


def test_rows_become_series_and_the_jobs_step(store, running, record):
    assert record(1, [{"step": 1, "loss": 3.0, "tokens": 10}, {"step": 2, "loss": 2.0, "tokens": 20}]) == 2
    found = read(store, running, ["loss", "tokens", "grad_norm"])
    assert found.steps == [1, 2]
    assert found.series == {"loss": [3.0, 2.0], "tokens": [10.0, 20.0], "grad_norm": [None, None]}
    with store.read() as session:
        job = jobs.get(session, running.id)
    assert (job.step, job.metrics, job.report_cursor) == (2, {"step": 2, "loss": 2.0, "tokens": 20}, {"0": 1})


def test_a_repeated_report_changes_nothing(store, running, record):
    assert record(1, [{"step": 1, "loss": 3.0}]) == 1
    assert record(1, [{"step": 1, "loss": 9.0}]) == 0
    assert record(2, [{"step": 2, "loss": 2.0}], rank=1) == 1  # another rank counts by itself
    assert read(store, running, ["loss"]).series == {"loss": [3.0, 2.0]}


def test_a_report_and_its_cursor_are_stored_together_or_not_at_all(store, running, record):
    with pytest.raises(KeyError):
        record(1, [{"step": 1, "loss": 3.0}, {"loss": "a row without a step"}])
    with store.read() as session:
        assert jobs.get(session, running.id).report_cursor == {}
    assert read(store, running).steps == []
    assert record(1, [{"step": 1, "loss": 3.0}]) == 1


def test_a_later_row_of_the_same_generation_adds_to_the_step(store, running, record):
    record(1, [{"step": 1, "loss": 3.0}])
    record(2, [{"step": 1, "validation_loss": 4.0}])
    assert read(store, running, ["loss", "validation_loss"]).series == {"loss": [3.0], "validation_loss": [4.0]}


def test_a_redone_step_replaces_the_row_and_its_time_counts_once(store, running, record):
    record(1, [{"step": 1, "loss": 3.0, "step_seconds": 1.0}, {"step": 2, "loss": 2.5, "step_seconds": 1.0, "x": 1}])
    store.write(lambda session: generations.begin(session, running.id, "rank_died", True, "snapshot", 1))
    record(1, [{"step": 2, "loss": 2.0, "step_seconds": 3.0}], generation=2)
    assert read(store, running, ["loss", "x"]).series == {"loss": [3.0, 2.0], "x": [None, None]}
    with store.read() as session:
        assert jobs.get(session, running.id).compute_seconds == 4.0


def test_going_back_to_an_older_checkpoint_does_not_take_steps_back(store, running, record):
    record(1, [{"step": step, "loss": 1.0} for step in range(1, 9)])
    store.write(lambda session: generations.begin(session, running.id, "node_lost", True, "checkpoint", 4))
    record(1, [{"step": 5, "loss": 1.5}], generation=2)
    with store.read() as session:
        job = jobs.get(session, running.id)
    assert (job.step, job.metrics) == (8, {"step": 5, "loss": 1.5})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "inf", "-inf"])
def test_non_finite_numbers_survive(store, running, record, value):
    record(1, [{"step": 1, "loss": value, "mine": value}])
    found = read(store, running, ["loss", "mine"]).series
    with store.read() as session:
        latest = jobs.get(session, running.id).metrics["loss"]
    for number in (found["loss"][0], found["mine"][0], latest):
        assert isinstance(number, float)
        assert math.isnan(number) if math.isnan(float(value)) else number == float(value)


def test_text_among_the_metrics_is_left_out(store, running, record):
    record(1, [{"step": 1, "loss": 1.0, "note": "hello", "time": 5.0, "rank": 3}])
    with store.read() as session:
        assert jobs.get(session, running.id).metrics == {"step": 1, "loss": 1.0}


def test_series_begin_after_a_step(store, running, record):
    record(1, [{"step": step, "loss": float(step)} for step in range(1, 6)])
    assert read(store, running, ["loss"], after_step=3).steps == [4, 5]
    assert read(store, running, ["loss"], after_step=5).steps == []


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(max_points=st.integers(1, 60))
def test_downsampling_keeps_both_ends_and_never_more_than_asked(store, running, record, max_points):
    rows = [{"step": step, "loss": 1.0 / step} for step in range(1, 51)]
    record(time.monotonic_ns(), rows)
    steps = read(store, running, ["loss"], max_points=max_points).steps
    assert len(steps) <= max_points
    assert steps == sorted(set(steps))
    assert steps[-1] == 50
    assert max_points == 1 or steps[0] == 1
    assert len(steps) >= min(50, max_points // 2)


@pytest.mark.parametrize("spike", [7.0, math.nan, math.inf])
def test_downsampling_keeps_a_spike(store, running, record, spike):
    record(1, [{"step": step, "loss": spike if step == 637 else 2.0} for step in range(1, 1001)])
    assert 637 in read(store, running, ["loss"], max_points=10).steps


def test_downsampling_works_without_losses(store, running, record):
    record(1, [{"step": step, "tokens": step} for step in range(1, 101)])
    found = read(store, running, ["tokens"], max_points=10)
    assert (found.steps[0], found.steps[-1]) == (1, 100)
    assert 5 <= len(found.steps) <= 10


def test_goodput_is_committed_time_over_time_since_the_start(store, running, record):
    with store.read() as session:
        assert jobs.goodput(session, running.id) is None
    record(1, [{"step": 1, "step_seconds": 2.0}, {"step": 2, "step_seconds": 4.0}])
    with store.read() as session:
        job = jobs.get(session, running.id)
        assert metrics.recent_step_seconds(session, running.id) == 3.0
    assert jobs.goodput_of(job, job.started_at + 8.0) == 0.75
    job.finished_at = job.started_at + 12.0
    assert jobs.goodput_of(job, job.started_at + 100.0) == 0.5


def test_the_first_and_last_rows_are_found(store, running, record):
    with store.read() as session:
        assert metrics.first_and_last(session, running.id) is None
    record(1, [{"step": step, "loss": 9.0 - step} for step in (1, 2, 3)])
    with store.read() as session:
        first, last = metrics.first_and_last(session, running.id)
    assert (first.loss, last.loss) == (8.0, 6.0)
