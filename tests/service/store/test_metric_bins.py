"""A series drawn from bins keeps what one drawn from its rows keeps, whatever happened to the rows."""

import itertools
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, func, select, text

from manta.service.states import JobState
from manta.service.store import generations, jobs, metric_bins, metrics
from manta.service.store.metric_bins import Segment, segments, width
from manta.service.store.tables import Metric, MetricBin

LOSSES = st.sampled_from([None, math.nan, math.inf, -math.inf, 0.0, 1.0, 2.5, 7.0])


@pytest.fixture
def running(store, started):
    store.write(lambda session: generations.begin(session, started.id, "submitted", False))
    return store.write(lambda session: jobs.transition(session, started.id, JobState.RUNNING)).id


class Training:
    """What a job reports, and what it must come to."""

    def __init__(self, store, job):
        self.store, self.job, self.losses = store, job, {}
        self.generation, self.sequence, self.clock = 1, 0, 0.0

    def commit(self, rows):
        """Report these losses by step."""
        self.sequence, self.clock = self.sequence + 1, self.clock + 1.0
        report = [{"step": step, "time": self.clock} | ({} if loss is None else {"loss": loss}) for step, loss in rows]
        self.store.write(lambda session: metrics.record(session, self.job, self.generation, 0, self.sequence, report))
        self.losses.update(rows)

    def begin_again(self, resume_step):
        """Another generation begins behind `resume_step`."""
        self.generation = self.store.write(
            lambda session: generations.begin(session, self.job, "lost", True, "snapshot", resume_step)
        )
        self.sequence = 0

    def series(self, after_step=0, max_points=1000):
        return self.store.query(metrics.series, self.job, ["loss"], after_step, max_points)

    def forget(self):
        def operation(session):
            for table in (Metric, MetricBin):
                session.execute(delete(table).where(table.job_id == self.job))
            job = jobs.get(session, self.job)
            job.binned_until = job.step = job.generation = job.binned_generation = 0
            job.report_cursor = {}
            generations.of_job(session, self.job)
            session.execute(text("DELETE FROM generations"))
            generations.begin(session, self.job, "submitted", False)

        self.store.write(operation)
        self.losses, self.generation, self.sequence = {}, 1, 0


def height(loss):
    return -math.inf if loss is None else loss if math.isfinite(loss) else math.inf


def keeps_its_promise(training, after_step, max_points):
    """First, last, in each range the highest, at most so many, and the values that were reported last."""
    drawn = training.series(after_step, max_points)
    known = sorted(step for step in training.losses if step > after_step)
    assert len(drawn.steps) <= max_points and drawn.steps == sorted(set(drawn.steps)) and set(drawn.steps) <= {*known}
    for step, loss in zip(drawn.steps, drawn.series["loss"], strict=True):
        expected = training.losses[step]
        assert loss == expected or (loss is not None and math.isnan(loss) and math.isnan(expected))
    if len(known) <= max_points:
        assert drawn.steps == known
        return
    assert drawn.steps[-1] == known[-1]
    if max_points == 1:
        return
    assert drawn.steps[0] == known[0]
    between = known[1:-1]
    if max_points > 2:
        level = metric_bins.widest(max(1, (known[-1] - known[0] - 1) // (max_points - 2)))
        first = (known[0] + 1) // width(level)
        bins = -(-((known[-1] - 1) // width(level) + 1 - first) // (max_points - 2))
        kept = {*drawn.steps[1:-1]}
        for _, steps in itertools.groupby(between, lambda step: (step // width(level) - first) // bins):
            in_range = list(steps)
            chosen = [step for step in in_range if step in kept]
            assert len(chosen) == 1
            assert height(training.losses[chosen[0]]) == max(height(training.losses[step]) for step in in_range)


@st.composite
def histories(draw):
    """Reports of a job that goes back now and then, in the same generation or the next, with gaps in between."""
    step, acts = 0, []
    for _ in range(draw(st.integers(1, 12))):
        if step and draw(st.booleans()):
            step = draw(st.integers(0, step))
            acts.append(("again" if draw(st.booleans()) else "rolled back", step))
        begin = step + draw(st.sampled_from([1, 1, 1, 2, 40]))
        count = draw(st.sampled_from([1, 3, 17, 90, 300]))
        losses = draw(st.lists(LOSSES, min_size=1, max_size=7))
        acts.append(("rows", [(begin + i, losses[i * i % len(losses)]) for i in range(count)]))
        step = begin + count - 1
    return acts


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories(), data=st.data())
def test_series_from_bins_keeps_what_rows_promise_whatever_steps_are_repeated(store, running, history, data):
    training = Training(store, running)
    training.forget()
    for kind, what in history:
        if kind == "rows":
            training.commit(what)
        elif kind == "again":
            training.begin_again(what)
    last = max(training.losses)
    for _ in range(4):
        after_step = data.draw(st.sampled_from([0, 0, 1, 7, 8, last // 2, last]))
        keeps_its_promise(training, after_step, data.draw(st.sampled_from([1, 2, 3, 4, 5, 10, 33, 100])))


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 700), st.integers(0, 5))
def test_segments_hold_each_step_once_and_only_complete_bins(begin, steps, complete, highest):
    binned_until = complete * metric_bins.SMALLEST
    parts = segments(begin, begin + steps, binned_until, highest)
    held = [step for each in parts for step in range(each.begin * width(each.level), each.end * width(each.level))]
    assert held == list(range(begin, begin + steps))
    assert all(each.level == 0 or each.end * width(each.level) <= binned_until for each in parts)


def test_range_of_a_million_steps_is_read_from_fewer_than_2000_bins():
    parts = segments(2, 1_000_000, 1_000_000, metric_bins.widest(1001))
    assert Segment(4, 1, 1953) in parts
    assert sum(each.end - each.begin for each in parts) < 2000


def bins_of(store, job):
    with store.read() as session:
        return session.scalar(select(func.count()).select_from(MetricBin).where(MetricBin.job_id == job))


def test_rows_of_a_release_that_knows_of_no_bins_get_theirs_a_piece_at_a_time(store, running, monkeypatch):
    training = Training(store, running)
    with monkeypatch.context() as patch:
        patch.setattr(metric_bins, "update", lambda *arguments: None)
        training.commit([(step, 50.0 if step == 777 else 1.0) for step in range(1, 1001)])
    monkeypatch.setattr(metric_bins, "BATCH_STEPS", 256)
    assert (bins_of(store, running), 777 in training.series(0, 10).steps) == (0, True)

    def catch_up():
        return store.write(lambda session: metric_bins.catch_up(session, jobs.get(session, running, lock=True)))

    pieces = [catch_up() for _ in range(4)]
    assert pieces == [True, True, True, False]
    assert bins_of(store, running) == 125 + 31 + 7 + 1
    keeps_its_promise(training, 0, 10)


@pytest.mark.parametrize("highest", [101, 205])
def test_steps_repeated_by_a_release_without_bins_show_in_the_next_generation(store, running, monkeypatch, highest):
    training = Training(store, running)
    training.commit([(step, 1.0) for step in range(1, 400)])
    training.begin_again(100)
    with monkeypatch.context() as patch:
        patch.setattr(metric_bins, "update", lambda *arguments: None)
        training.commit([(step, 9.0 if step == highest else 1.0) for step in range(101, 400)])
    training.begin_again(399)
    training.commit([(400, 1.0)])
    assert highest in training.series(0, 5).steps
    keeps_its_promise(training, 0, 5)
