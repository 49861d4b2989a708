"""Metrics arrive exactly once, keep NaN, and come back as at most so many points."""

import math
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manta.service.ledger import STEP_CLASSES
from manta.service.states import JobState
from manta.service.store import generations, jobs, metrics


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
    return store.query(metrics.series, job.id, *arguments, **options)


def test_metric_rows_become_series_and_update_step_and_metrics_of_the_job(store, running, record):
    assert record(1, [{"step": 1, "loss": 3.0, "tokens": 10}, {"step": 2, "loss": 2.0, "tokens": 20}]) == 2
    drawn = read(store, running, ["loss", "tokens", "grad_norm"])
    assert drawn.steps == [1, 2]
    assert drawn.series == {"loss": [3.0, 2.0], "tokens": [10.0, 20.0], "grad_norm": [None, None]}
    job = store.query(jobs.get, running.id)
    assert (job.step, job.metrics, job.report_cursor) == (2, {"step": 2, "loss": 2.0, "tokens": 20}, {"0": 1})


def test_repeated_metric_report_of_a_rank_changes_nothing(store, running, record):
    assert record(1, [{"step": 1, "loss": 3.0}]) == 1
    assert record(1, [{"step": 1, "loss": 9.0}]) == 0
    assert record(2, [{"step": 2, "loss": 2.0}], rank=1) == 1  # another rank counts by itself
    assert read(store, running, ["loss"]).series == {"loss": [3.0, 2.0]}


def test_a_report_and_its_cursor_are_stored_together_or_not_at_all(store, running, record):
    with pytest.raises(KeyError):
        record(1, [{"step": 1, "loss": 3.0}, {"loss": "a row without a step"}])
    assert store.query(jobs.get, running.id).report_cursor == {}
    assert read(store, running).steps == []
    assert record(1, [{"step": 1, "loss": 3.0}]) == 1


def test_later_metric_row_of_the_same_step_and_generation_adds_to_the_first(store, running, record):
    record(1, [{"step": 1, "loss": 3.0}])
    record(2, [{"step": 1, "validation_loss": 4.0}])
    assert read(store, running, ["loss", "validation_loss"]).series == {"loss": [3.0], "validation_loss": [4.0]}


def test_metric_missing_from_later_rows_keeps_its_last_value(store, running, record):
    record(1, [{"step": 1, "loss": 3.0, "validation_loss": 4.0}, {"step": 2, "loss": 2.0}])
    record(2, [{"step": 3, "loss": 1.0}])
    assert store.query(jobs.get, running.id).metrics == {"step": 3, "loss": 1.0, "validation_loss": 4.0}


def test_repeated_step_of_a_new_generation_replaces_its_metric_row(store, running, record):
    record(1, [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5, "x": 1}])
    store.write(lambda session: generations.begin(session, running.id, "rank_died", True, "snapshot", 1))
    record(1, [{"step": 2, "loss": 2.0}], generation=2)
    assert read(store, running, ["loss", "x"]).series == {"loss": [3.0, 2.0], "x": [None, None]}


def lap(step, at, generation=1, **seconds):
    """A row that says when its step was committed, by which generation, and where its second went."""
    return {"step": step, "time": at, "generation": generation, "seconds": {"wall": 1.0, **seconds}}


def sums(store, job):
    """Per generation: (first and last moment of training, new steps, redone steps, seconds by class)."""
    rows = store.query(generations.of_job, job.id)
    return [
        ((row.trained_from, row.trained_until), row.committed_steps, row.redone_steps,
         {name: getattr(row, f"{name}_seconds") for name in STEP_CLASSES if getattr(row, f"{name}_seconds")})
        for row in rows
    ]  # fmt: skip


def test_sums_of_a_generation_grow_with_its_steps(store, running, record):
    record(1, [lap(1, 11.0, data_wait=0.25), lap(2, 12.0, snapshot_stall=0.25)])
    record(2, [lap(3, 13.0, checkpoint_stall=0.5), {"step": 4, "time": 14.0, "step_seconds": 1.0}])
    seconds = {"compute": 3.0, "data_wait": 0.25, "snapshot_stall": 0.25, "checkpoint_stall": 0.5}
    assert sums(store, running) == [((10.0, 14.0), 4, 0, seconds)]


def test_clock_that_is_set_back_loses_no_compute_time(store, running, record):
    record(1, [lap(1, 12.0)])
    record(2, [lap(2, 11.5)])
    assert sums(store, running) == [((11.0, 12.0), 2, 0, {"compute": 2.0})]


def test_waits_longer_than_their_step_and_negative_ones_are_cut(store, running, record):
    record(1, [lap(1, 11.0, data_wait=0.75, snapshot_stall=9.0, checkpoint_stall=-1.0)])
    assert sums(store, running)[0][3] == {"data_wait": 0.75, "snapshot_stall": 0.25}


def test_time_of_repeated_steps_counts_as_redo_and_of_new_ones_as_compute(store, running, record):
    record(1, [lap(step, 10.0 + step) for step in (1, 2, 3)])
    store.write(lambda session: generations.begin(session, running.id, "rank_died", True, "snapshot", 1))
    record(1, [lap(step, 20.0 + step, 2, data_wait=0.5) for step in (2, 3, 4)], generation=2)
    assert sums(store, running) == [
        ((10.0, 13.0), 3, 0, {"compute": 3.0}),
        ((21.0, 24.0), 1, 2, {"compute": 0.5, "data_wait": 0.5, "redo": 2.0}),
    ]


def test_rows_that_a_later_generation_reports_belong_to_the_one_that_made_them(store, running, record):
    record(1, [lap(1, 11.0), lap(2, 12.0)])
    store.write(lambda session: generations.begin(session, running.id, "rank_died", True, "snapshot", 3))
    record(1, [lap(2, 12.0), lap(3, 13.0), lap(4, 24.0, 2)], generation=2)
    assert [entry[1:3] for entry in sums(store, running)] == [(3, 0), (1, 0)]
    assert sums(store, running)[0][0] == (10.0, 13.0)
    record(2, [lap(4, 13.5, 1)], generation=2)  # a step that was lost, and whose row turns up late
    assert [entry[1:3] for entry in sums(store, running)] == [(3, 0), (1, 0)]


def test_step_that_a_roll_back_does_again_is_redo(store, running, record):
    record(1, [lap(1, 11.0), lap(2, 12.0), lap(1, 13.0)])
    assert sums(store, running) == [((10.0, 13.0), 2, 1, {"compute": 2.0, "redo": 1.0})]


def test_row_reported_by_two_ranks_does_not_count_as_a_repeated_step(store, running, record):
    record(1, [lap(1, 10.0) | {"loss": 3.0}])
    before = sums(store, running)
    record(2, [lap(1, 10.1) | {"loss": 3.0, "tokens_per_second": 7.0, "rank": 2}])
    assert sums(store, running) == before
    record(3, [lap(2, 11.1) | {"loss": 2.0, "rank": 2}])
    assert read(store, running, ["loss", "tokens_per_second"]).series == {
        "loss": [3.0, 2.0], "tokens_per_second": [None, None]
    }, "what nobody else told of counts"  # fmt: skip


def test_training_time_of_a_rank_with_a_fast_clock_ends_at_the_present(store, running, record):
    record(1, [lap(1, time.time() + 500)])
    assert sums(store, running)[0][0][1] <= time.time()


def test_going_back_to_an_older_checkpoint_does_not_take_steps_back(store, running, record):
    record(1, [{"step": step, "loss": 1.0} for step in range(1, 9)])
    store.write(lambda session: generations.begin(session, running.id, "node_lost", True, "checkpoint", 4))
    record(1, [{"step": 5, "loss": 1.5}], generation=2)
    job = store.query(jobs.get, running.id)
    assert (job.step, job.metrics) == (8, {"step": 5, "loss": 1.5})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "inf", "-inf"])
def test_non_finite_metrics_read_back_as_the_same_floats(store, running, record, value):
    record(1, [{"step": 1, "loss": value, "mine": value}])
    drawn = read(store, running, ["loss", "mine"]).series
    latest = store.query(jobs.get, running.id).metrics["loss"]
    for number in (drawn["loss"][0], drawn["mine"][0], latest):
        assert isinstance(number, float)
        assert math.isnan(number) if math.isnan(float(value)) else number == float(value)


def test_text_time_and_rank_are_left_out_of_the_stored_metrics(store, running, record):
    record(1, [{"step": 1, "loss": 1.0, "note": "hello", "time": 5.0, "rank": 3}])
    assert store.query(jobs.get, running.id).metrics == {"step": 1, "loss": 1.0}


def test_series_begin_after_the_step_asked_for(store, running, record):
    record(1, [{"step": step, "loss": float(step)} for step in range(1, 6)])
    assert read(store, running, ["loss"], after_step=3).steps == [4, 5]
    assert read(store, running, ["loss"], after_step=5).steps == []


@pytest.fixture
def fifty_steps(record):
    """Rows of a falling loss."""
    record(1, [{"step": step, "loss": 1.0 / step} for step in range(1, 51)])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(max_points=st.integers(1, 60))
def test_downsampling_keeps_both_ends_and_never_more_than_asked(store, running, fifty_steps, max_points):
    steps = read(store, running, ["loss"], max_points=max_points).steps
    assert len(steps) <= max_points
    assert steps == sorted(set(steps))
    assert steps[-1] == 50
    assert max_points == 1 or steps[0] == 1
    assert len(steps) >= min(50, max_points // 2)


@pytest.mark.parametrize("spike", [7.0, math.nan, math.inf])
def test_downsampled_loss_keeps_the_step_of_a_spike(store, running, record, spike):
    record(1, [{"step": step, "loss": spike if step == 137 else 2.0} for step in range(1, 201)])
    assert 137 in read(store, running, ["loss"], max_points=10).steps


def test_downsampling_works_without_losses(store, running, record):
    record(1, [{"step": step, "tokens": step} for step in range(1, 101)])
    drawn = read(store, running, ["tokens"], max_points=10)
    assert (drawn.steps[0], drawn.steps[-1]) == (1, 100)
    assert 5 <= len(drawn.steps) <= 10


def _means(store, job):
    with store.read() as session:
        return metrics.means(session, [jobs.get(session, job.id)]).get(job.id)


def test_means_leave_out_the_first_step_of_a_start_and_weigh_rates_by_time(store, running, record):
    record(1, [{"step": 1, "step_seconds": 90.0, "tokens_per_second": 1.0}])
    assert _means(store, running) is None
    times = ((2, 1.0), (3, 3.0))
    record(2, [{"step": step, "step_seconds": took, "tokens_per_second": 100 / took} for step, took in times])
    assert _means(store, running) == {"step_seconds": 2.0, "tokens_per_second": 50.0}


def test_means_are_of_the_last_steps_until_a_job_is_over_and_of_all_after(store, running, record):
    record(1, [{"step": step, "step_seconds": 5.0 if step <= 401 else 2.0} for step in range(1, 802)])
    assert _means(store, running) == {"step_seconds": 2.0}
    store.write(lambda session: jobs.transition(session, running.id, JobState.SUCCEEDED))
    assert _means(store, running)["step_seconds"] == pytest.approx(3.5, abs=0.02)
