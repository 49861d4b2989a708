"""Jobs that are asked for again are not put together again, and no answer is older than the job's row."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import event

from manta.api import caches, schemas, views
from manta.api.caches import FRESH_SECONDS, SETTLED_SECONDS, RenderedJob, RenderedJobs
from manta.service.states import JobState
from manta.service.store import Store, edits, jobs, tables
from manta.service.store.errors import JobNotFound
from manta.service.store.job_rows import NEWEST_FIRST, JobFilter
from manta.service.store.paging import Page
from manta.workers.config import JobSpec


class Clock:
    """Seconds that only a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def submit(store, document) -> Callable[..., tables.Job]:
    """Stores a job."""

    def submit(**fields: Any) -> tables.Job:
        spec = JobSpec.model_validate(document | fields)
        return store.write(lambda session: jobs.create(session, spec)[0])

    return submit


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rendered(clock) -> RenderedJobs:
    return RenderedJobs(clock)


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
    with store.read() as session:
        view = views.job_view(session, jobs.get(session, job.id))
    assert json.loads(answer.body) == view.model_dump(mode="json")
    assert set(json.loads(answer.body)) == set(schemas.Job.model_fields)
    assert answer.etag == view.etag


def test_unchanged_active_job_is_rendered_once_a_second(store, submit, rendered, clock, put_together):
    job_id = submit().id
    first = rendered.one(store, job_id)
    clock.now += FRESH_SECONDS / 2
    assert rendered.one(store, job_id) is first
    assert page_of(rendered, store).items == [first]
    assert put_together == [job_id]
    clock.now += FRESH_SECONDS / 2
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
    clock.now += 1000 * FRESH_SECONDS
    rendered.one(store, job_id)
    assert put_together == [job_id] * times
    store.write(lambda session: edits.edit(session, job_id, name="new"))
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
    store.write(lambda session: edits.edit(session, ids[0], name="new"))
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
    clock.now += FRESH_SECONDS  # the first one is put together anew, which takes no room twice
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
    statements: list[str] = []
    event.listen(store.database.readers, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
    page_of(rendered, store)
    assert len([each for each in statements if each.startswith("SELECT")]) == 1
