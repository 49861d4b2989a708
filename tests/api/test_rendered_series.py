"""A series that is as it was is not put together again, and no answer is older than the job's metrics."""

import json

import pytest
from sqlalchemy import event, insert

from manta.api.caches import RenderedSeriesOfJobs
from manta.service.store import generations, jobs, metric_bins, metrics
from manta.service.store.errors import JobNotFound
from manta.service.store.tables import METRIC_NAMES, Metric
from manta.workers.config import JobSpec
from manta.workers.spec.reading import parse_job_spec


@pytest.fixture
def job(store, document):
    job = store.write(lambda session: jobs.create(session, JobSpec.model_validate(document))[0])
    store.write(lambda session: generations.begin(session, job.id, "test", False))
    return job.id


@pytest.fixture
def report(store, job):
    numbers = iter(range(1, 100))

    def report(rows, generation=1):
        store.write(lambda session: metrics.record(session, job, generation, 0, next(numbers), rows))

    return report


@pytest.fixture
def rendered():
    return RenderedSeriesOfJobs()


def losses(series):
    return dict(zip(json.loads(series.body)["steps"], json.loads(series.body)["series"]["loss"], strict=True))


@pytest.fixture
def ask(store, job, rendered):
    return lambda after=0, most=1000, names=("loss",), **part: rendered.one(store, job, names, after, most, **part)


def test_unchanged_series_costs_one_statement_and_no_transaction(store, report, ask):
    report([{"step": step, "loss": 1.0} for step in range(1, 50)])
    first, statements = ask(), list[str]()
    event.listen(store.database.readers, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
    assert ask() is first
    assert len(statements) == 1


def test_series_without_names_has_the_standard_metrics_and_those_of_the_job(store, document, rendered):
    data = {"source": "python-stdlib", "validation": [{"name": "code", "source": "python-stdlib"}]}
    train = document["train"] | {"validate_every": 5, "z_loss": 1e-4}
    spec = parse_job_spec(document | {"data": data, "train": train})
    job = store.write(lambda session: jobs.create(session, spec)[0])
    series = json.loads(rendered.one(store, job.id, None, 0, 10).body)["series"]
    assert tuple(series) == (*METRIC_NAMES, "validation_loss_code", "z_loss")
    with pytest.raises(JobNotFound):
        rendered.one(store, "job_00000000nobody", None, 0, 10)


@pytest.mark.parametrize("most", [1000, 10, 2])
def test_metric_series_shows_rows_stored_since_the_last_request(store, job, report, ask, most):
    report([{"step": step, "loss": 1.0} for step in range(1, 50)])
    ask(most=most)
    report([{"step": 50, "loss": 2.0}])
    assert losses(ask(most=most))[50] == 2.0
    report([{"step": 50, "loss": 1.0, "grad_norm": 3.0}])  # nothing but a row that was there has changed
    assert losses(ask(most=most))[50] == 1.0
    store.write(lambda session: generations.begin(session, job, "test", False))
    report([{"step": 50, "loss": 3.0}], generation=2)
    assert losses(ask(most=most))[50] == 3.0


def test_series_omits_deleted_rows(store, job, report, ask):
    report([{"step": step, "loss": 1.0} for step in range(1, 5)])
    ask()
    store.write(lambda session: session.delete(session.get(Metric, (job, 1))))
    assert list(losses(ask())) == [2, 3, 4]


def test_series_ranges_are_cached_separately(report, ask):
    report([{"step": step, "loss": float(step)} for step in range(1, 20)])
    assert list(losses(ask(most=2))) == [1, 19]
    assert list(losses(ask(most=1))) == [19]
    assert list(losses(ask(after=17))) == [18, 19]
    assert list(losses(ask())) == list(range(1, 20))
    assert list(losses(ask(every=5))) == [5, 10, 15]
    assert list(losses(ask(until_step=18))) == list(range(1, 19))
    assert list(json.loads(ask(names=["grad_norm"]).body)["series"]) == ["grad_norm"]
    assert list(losses(ask(most=2))) == [1, 19]


def test_series_without_bins_is_marked_until_they_are_made(store, job, ask, monkeypatch):
    steps = metric_bins.BATCH_STEPS + metric_bins.SMALLEST + 1
    rows = [{"job_id": job, "step": step, "generation": 1, "time": 0.0, "extra": {}} for step in range(1, steps + 1)]
    store.write(lambda session: session.execute(insert(Metric), rows))
    assert ask().is_lagging
    while store.write(lambda session: metric_bins.catch_up(session, jobs.get(session, job, lock=True))):
        pass
    assert not ask().is_lagging


def test_series_of_no_job_is_not_found(store, rendered):
    with pytest.raises(JobNotFound):
        rendered.one(store, "job_000000000000", ["loss"], 0, 10)


def test_series_range_ends_at_its_until_step(report, rendered, store, job):
    report([{"step": step, "loss": float(step % 7)} for step in range(1, 400)])
    part = losses(rendered.one(store, job, ["loss"], 99, 1000, until_step=120))
    assert list(part) == list(range(100, 121))
    thinned = losses(rendered.one(store, job, ["loss"], 99, 10, until_step=300))
    assert (min(thinned), max(thinned)) == (100, 300) and len(thinned) <= 10 and max(thinned.values()) == 6.0
    report([{"step": 110, "loss": 9.0}])
    assert losses(rendered.one(store, job, ["loss"], 99, 1000, until_step=120))[110] == 9.0


@pytest.mark.parametrize(("most", "steps"), [(10, [25, 50, 75, 100]), (2, [50, 100]), (1, [100])])
def test_multiples_of_a_step_are_drawn_at_equal_distances(report, rendered, store, job, most, steps):
    report([{"step": step, "loss": 1.0, "validation_loss": 2.0 if step % 25 == 0 else None} for step in range(1, 112)])
    body = json.loads(rendered.one(store, job, ["validation_loss", "time"], 0, most, every=25).body)
    assert body["steps"] == steps
    assert body["series"]["validation_loss"] == [2.0] * len(steps)
    assert all(time > 1e9 for time in body["series"]["time"])


@pytest.mark.parametrize(
    ("after", "until", "steps"), [(24, 100, [25, 50, 75, 100]), (24, 25, [25]), (25, 99, [50, 75])]
)
def test_series_range_of_multiples_has_those_on_its_edges(report, rendered, store, job, after, until, steps):
    report([{"step": step, "loss": 1.0} for step in range(1, 112)])
    body = json.loads(rendered.one(store, job, ["loss"], after, 10, until_step=until, every=25).body)
    assert body["steps"] == steps
