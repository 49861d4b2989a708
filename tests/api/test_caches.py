"""Answers that are asked for repeatedly are made once, and none is older than the rows that it shows."""

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from moved_clock import MovedClock
from sqlalchemy import event, insert, select

from manta.api import caches, schemas, views
from manta.api.caches import (
    FRESH_SECONDS,
    SETTLED_SECONDS,
    AnswerCache,
    RenderedJob,
    RenderedJobs,
    RenderedPages,
    RenderedSeriesOfJobs,
)
from manta.api.routes import metrics as route
from manta.service.states import JobState
from manta.service.store import Store, generations, jobs, metric_bins, metrics, tables
from manta.service.store.errors import InvalidCursor, JobNotFound
from manta.service.store.job_rows import EVERY_JOB, NEWEST_FIRST, JobFilter
from manta.service.store.paging import Page
from manta.service.store.tables import METRIC_NAMES, Job, Metric
from manta.workers.config import JobSpec
from manta.workers.spec.reading import parse_job_spec


@pytest.mark.parametrize(("put", "kept"), [("", ""), ("aa", "a"), ("abc", "bc"), ("abaab", "ab"), ("abaabc", "bc")])
def test_answer_cache_keeps_the_newest_answers_that_fit(put, kept):
    cache: AnswerCache[str, int] = AnswerCache(100)
    cache.put("d", 0, 101)
    for number, name in enumerate(put):
        cache.put(name, number, 40)
    answers = {name: number for name in "abcd" if (number := cache.get(name)) is not None}
    assert answers == {name: put.rindex(name) for name in kept}


@pytest.fixture
def submit(store, document) -> Callable[..., tables.Job]:
    """Stores a job."""

    def submit(**fields: Any) -> tables.Job:
        spec = JobSpec.model_validate(document | fields)
        return store.write(lambda session: jobs.create(session, spec)[0])

    return submit


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def rendered(clock) -> RenderedJobs:
    return RenderedJobs(clock)


def listened(store: Store) -> list[str]:
    """Statements that readers of the store execute from now on."""
    statements: list[str] = []
    event.listen(store.database.readers, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
    return statements


def page_of(rendered: RenderedJobs, store: Store, *filters: Any) -> Page[RenderedJob]:
    with store.read_rows() as connection:
        return rendered.page(connection, *filters)


@pytest.fixture
def put_together(monkeypatch) -> list[str]:
    """The jobs that were put together, in order."""
    ids: list[str] = []

    def job_views(session, some):
        ids.extend(job.id for job in some)
        return original(session, some)

    original = views.job_views
    monkeypatch.setattr(caches.views, "job_views", job_views)
    return ids


def test_answer_is_the_job_with_all_its_fields(store, submit, rendered):
    job = submit()
    store.write(lambda session: setattr(jobs.get(session, job.id), "metrics", {"loss": float("nan"), "step": 1}))
    answer = rendered.one(store, job.id)
    view = store.query(lambda session: views.job_view(session, jobs.get(session, job.id)))
    assert json.loads(answer.body) == view.model_dump(mode="json")
    assert set(json.loads(answer.body)) == set(schemas.Job.model_fields)
    assert answer.etag == view.etag


def test_unchanged_active_job_is_rendered_once_a_second(store, submit, rendered, clock, put_together):
    job_id = submit().id
    first = rendered.one(store, job_id)
    clock.seconds += FRESH_SECONDS / 2
    assert rendered.one(store, job_id) is first
    assert page_of(rendered, store).items == [first]
    assert put_together == [job_id]
    clock.seconds += FRESH_SECONDS / 2
    assert rendered.one(store, job_id) is not first
    assert put_together == [job_id] * 2


@pytest.mark.parametrize(("over_for", "times"), [(SETTLED_SECONDS + 5, 1), (SETTLED_SECONDS - 5, 2)])
def test_finished_job_is_rendered_once_until_its_row_changes(
    store, submit, rendered, clock, put_together, monkeypatch, over_for, times
):
    job_id = submit().id

    def end(session):
        jobs.transition(session, job_id, JobState.CANCELLED)
        return jobs.get(session, job_id).finished_at

    now = datetime.fromtimestamp(store.write(end) + over_for, UTC)
    monkeypatch.setattr(caches, "datetime", SimpleNamespace(now=lambda zone: now))
    rendered.one(store, job_id)
    clock.seconds += 1000 * FRESH_SECONDS
    rendered.one(store, job_id)
    assert put_together == [job_id] * times
    store.write(lambda session: jobs.edit(session, job_id, name="new"))
    assert json.loads(rendered.one(store, job_id).body)["name"] == "new"


def test_changed_job_is_rendered_at_once_and_the_others_are_not(store, submit, rendered, put_together):
    ids = [submit().id for _ in range(3)]
    page_of(rendered, store)
    assert put_together == ids[::-1]
    store.write(lambda session: jobs.transition(session, ids[1], JobState.STARTING))
    states = [json.loads(job.body)["state"] for job in page_of(rendered, store).items]
    assert states == ["QUEUED", "STARTING", "QUEUED"]
    assert put_together[3:] == [ids[1]]
    before = rendered.one(store, ids[0]).etag
    store.write(lambda session: jobs.edit(session, ids[0], name="new"))
    after = rendered.one(store, ids[0])
    assert (json.loads(after.body)["name"], json.loads(after.body)["spec"]["name"]) == ("new", "new")
    assert after.etag != before


def test_page_is_newest_first_with_its_filters_and_its_cursor(store, submit, rendered):
    ids = [submit(name=name).id for name in ("a", "b", "a")]
    page = page_of(rendered, store, JobFilter(name="a"), NEWEST_FIRST, 1)
    assert [json.loads(job.body)["id"] for job in page.items] == [ids[2]]
    rest = page_of(rendered, store, JobFilter(name="a"), NEWEST_FIRST, 1, page.next_cursor)
    assert [json.loads(job.body)["id"] for job in rest.items] == [ids[0]]
    assert rest.next_cursor is None


def test_job_cache_evicts_jobs_no_longer_requested_when_full(store, submit, clock, put_together):
    ids = [submit().id for _ in range(3)]
    one = RenderedJobs(clock).one(store, ids[0])
    size = len(one.body) + len(one.brief)
    rendered = RenderedJobs(clock, max_bytes=2 * size + size // 2)
    rendered.one(store, ids[0])
    clock.seconds += FRESH_SECONDS  # the first one is put together anew, which takes no room twice
    del put_together[:]
    for job_id in (ids[0], ids[1], ids[0], ids[2], ids[1], ids[0], ids[2]):
        rendered.one(store, job_id)
    assert put_together == [ids[0], ids[1], ids[2], ids[0]]


def test_deleted_job_is_not_found_despite_the_job_cache(store, submit, rendered):
    job = submit()
    rendered.one(store, job.id)
    store.write(lambda session: session.delete(jobs.get(session, job.id)))
    assert page_of(rendered, store).items == []
    with pytest.raises(JobNotFound):
        rendered.one(store, job.id)


def test_page_of_cached_jobs_costs_one_query(store, submit, rendered):
    for _ in range(4):
        submit()
    page_of(rendered, store)
    statements = listened(store)
    page_of(rendered, store)
    assert len([each for each in statements if each.startswith("SELECT")]) == 1


@pytest.fixture
def pages(clock) -> RenderedPages:
    return RenderedPages(RenderedJobs(clock), clock)


@pytest.fixture
def over(store, submit):
    """Submits a job that has been over for a while, so that nothing of it changes by itself."""

    def submit_and_end(**fields: Any) -> str:
        job_id = submit(**fields).id

        def end(session):
            jobs.transition(session, job_id, JobState.CANCELLED)
            jobs.get(session, job_id).finished_at -= SETTLED_SECONDS + 5

        store.write(end)
        return job_id

    return submit_and_end


def items(body: bytes) -> list[dict[str, Any]]:
    return json.loads(body)["items"]


def test_rendered_page_contains_the_rendered_jobs_of_its_filter(store, submit, pages):
    ids = [submit(name=name).id for name in ("a", "b", "a")]
    page = json.loads(pages.page(store, JobFilter(name="a"), NEWEST_FIRST, 1))
    assert [job["id"] for job in page["items"]] == [ids[2]]
    assert page["items"][0] == json.loads(RenderedJobs().one(store, ids[2]).body)
    rest = json.loads(pages.page(store, JobFilter(name="a"), NEWEST_FIRST, 1, page["next_cursor"]))
    assert [job["id"] for job in rest["items"]] == [ids[0]] and rest["next_cursor"] is None
    assert json.loads(pages.page(store, JobFilter(states=("PAUSED",)))) == {"items": [], "next_cursor": None}


def test_unchanged_job_page_costs_one_query(store, over, pages):
    for _ in range(4):
        over()
    first = pages.page(store)
    statements = listened(store)
    assert pages.page(store) is first
    assert len([each for each in statements if each.startswith("SELECT")]) == 1
    assert pages.page(store, EVERY_JOB, NEWEST_FIRST, 2) is not first


@pytest.mark.parametrize("change", ["edited", "moved on", "ended", "another", "deleted", "its metrics"])
def test_rendered_page_shows_any_change_of_its_jobs_at_once(store, submit, over, pages, change):
    ids = [over(), submit().id, over()]
    before = items(pages.page(store))

    def act(session):
        job = jobs.get(session, ids[1])
        if change == "edited":
            jobs.edit(session, ids[0], name="new")
        elif change == "moved on":
            jobs.transition(session, ids[1], JobState.STARTING)
        elif change == "ended":
            jobs.transition(session, ids[1], JobState.CANCELLED)
        elif change == "deleted":
            session.delete(job)
        elif change == "its metrics":
            job.metrics = {"loss": float("nan"), "step": 3}

    store.write(act)
    if change == "another":
        submit()
    after = items(pages.page(store))
    assert after != before
    there = store.query(lambda session: list(session.scalars(select(Job.id).order_by(Job.id.desc()))))
    assert after == [json.loads(RenderedJobs().one(store, job_id).body) for job_id in there]


@pytest.mark.parametrize("is_over", [False, True])
def test_rendered_page_is_rebuilt_after_a_second_only_if_a_job_is_active(store, submit, over, pages, clock, is_over):
    over() if is_over else submit()
    first = pages.page(store)
    clock.seconds += FRESH_SECONDS / 2
    assert pages.page(store) is first
    clock.seconds += (1000 if is_over else 0.5) * FRESH_SECONDS
    assert (pages.page(store) is first) is is_over


def test_page_cache_evicts_a_page_when_full(store, over, clock):
    over()
    first, second = (EVERY_JOB, NEWEST_FIRST, 1), (EVERY_JOB, NEWEST_FIRST, 2)
    made = RenderedPages(RenderedJobs(clock), clock).page(store, *first)
    pages = RenderedPages(RenderedJobs(clock), clock, max_bytes=2 * len(made))
    body = pages.page(store, *first)
    assert pages.page(store, *first) is body
    pages.page(store, *second)
    assert pages.page(store, *first) is not body and pages.page(store, *first) == body


def test_rendered_page_refuses_an_invalid_cursor(store, pages):
    with pytest.raises(InvalidCursor):
        pages.page(store, EVERY_JOB, NEWEST_FIRST, 50, "nonsense")


def test_job_list_without_specs_differs_only_in_the_specs(service):
    name = service.submit()["name"]
    whole, brief = (service.http.get(f"/v1/jobs?spec={spec}").json()["items"][0] for spec in ("true", "false"))
    assert whole["spec"]["name"] == name and brief["spec"] == {}
    assert {**brief, "spec": whole["spec"]} == whole
    assert service.http.get("/v1/jobs").json()["items"][0]["spec"] == whole["spec"]


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
def rendered_series():
    return RenderedSeriesOfJobs()


def losses(series):
    return dict(zip(json.loads(series.body)["steps"], json.loads(series.body)["series"]["loss"], strict=True))


@pytest.fixture
def ask(store, job, rendered_series):
    return lambda after=0, most=1000, names=("loss",), **part: rendered_series.one(
        store, job, names, after, most, **part
    )


def test_unchanged_series_costs_one_statement_and_no_transaction(store, report, ask):
    report([{"step": step, "loss": 1.0} for step in range(1, 50)])
    first, statements = ask(), listened(store)
    assert ask() is first
    assert len(statements) == 1


def test_series_without_names_has_the_standard_metrics_and_those_of_the_job(store, document, rendered_series):
    data = {"source": "python-stdlib", "validation": [{"name": "code", "source": "python-stdlib"}]}
    train = document["train"] | {"validate_every": 5, "z_loss": 1e-4}
    model = document["model"] | {"family": "llama", "moe": {"experts": 4, "per_token": 2, "ffn_hidden_size": 16}}
    spec = parse_job_spec(document | {"data": data, "train": train, "model": model})
    job = store.write(lambda session: jobs.create(session, spec)[0])
    series = json.loads(rendered_series.one(store, job.id, None, 0, 10).body)["series"]
    assert tuple(series) == (*METRIC_NAMES, "validation_loss_code", "z_loss", "expert_load", "balance_loss")
    with pytest.raises(JobNotFound):
        rendered_series.one(store, "job_00000000nobody", None, 0, 10)


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


def test_series_range_ends_at_its_until_step(report, rendered_series, store, job):
    report([{"step": step, "loss": float(step % 7)} for step in range(1, 400)])
    part = losses(rendered_series.one(store, job, ["loss"], 99, 1000, until_step=120))
    assert list(part) == list(range(100, 121))
    thinned = losses(rendered_series.one(store, job, ["loss"], 99, 10, until_step=300))
    assert (min(thinned), max(thinned)) == (100, 300) and len(thinned) <= 10 and max(thinned.values()) == 6.0
    report([{"step": 110, "loss": 9.0}])
    assert losses(rendered_series.one(store, job, ["loss"], 99, 1000, until_step=120))[110] == 9.0


@pytest.mark.parametrize(("most", "steps"), [(10, [25, 50, 75, 100]), (2, [50, 100]), (1, [100])])
def test_multiples_of_a_step_are_drawn_at_equal_distances(report, rendered_series, store, job, most, steps):
    report([{"step": step, "loss": 1.0, "validation_loss": 2.0 if step % 25 == 0 else None} for step in range(1, 112)])
    body = json.loads(rendered_series.one(store, job, ["validation_loss", "time"], 0, most, every=25).body)
    assert body["steps"] == steps
    assert body["series"]["validation_loss"] == [2.0] * len(steps)
    assert all(time > 1e9 for time in body["series"]["time"])


@pytest.mark.parametrize(("most", "steps"), [(10, [25, 50, 60]), (2, [50, 60]), (1, [60])])
def test_multiples_of_a_step_are_followed_by_the_last_step_of_the_job(report, rendered_series, store, job, most, steps):
    store.write(lambda session: setattr(jobs.get(session, job), "steps", 60))
    report([{"step": step, "loss": 1.0} for step in range(1, 61)])
    body = json.loads(rendered_series.one(store, job, ["loss"], 0, most, every=25).body)
    assert body["steps"] == steps


@pytest.mark.parametrize(
    ("after", "until", "steps"), [(24, 100, [25, 50, 75, 100]), (24, 25, [25]), (25, 99, [50, 75])]
)
def test_series_range_of_multiples_has_those_on_its_edges(report, rendered_series, store, job, after, until, steps):
    report([{"step": step, "loss": 1.0} for step in range(1, 112)])
    body = json.loads(rendered_series.one(store, job, ["loss"], after, 10, until_step=until, every=25).body)
    assert body["steps"] == steps


def test_series_from_an_older_release_gets_its_bins_on_first_read(service, monkeypatch):
    job, made, some = service.submit()["id"], threading.Event(), route._catch_up_batch

    def noted(session, job_id):
        more = some(session, job_id)
        if not more:
            made.set()
        return more

    monkeypatch.setattr(route, "_catch_up_batch", noted)
    monkeypatch.setattr(metric_bins, "BATCH_STEPS", 64)
    with monkeypatch.context() as patch:
        patch.setattr(metric_bins, "update", lambda *arguments: None)
        service.report(job, [{"step": step, "loss": float(step == 99)} for step in range(1, 200)])
    path = f"/v1/jobs/{job}/metrics?max_points=10&names=loss"
    before = service.http.get(path).json()
    assert made.wait(20)
    assert service.store.query(jobs.get, job).binned_until >= 200 - metric_bins.SMALLEST
    after = service.http.get(path).json()
    assert before == after and 99 in after["steps"]
