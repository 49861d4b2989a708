"""A page that is as it was is not put together again, and no answer is older than the rows of its jobs."""

import json
from typing import Any

import pytest
from sqlalchemy import event, select

from manta.api.caches import FRESH_SECONDS, SETTLED_SECONDS, RenderedJobs, RenderedPages
from manta.service.states import JobState
from manta.service.store import edits, jobs
from manta.service.store.errors import InvalidCursor
from manta.service.store.job_rows import EVERY_JOB, NEWEST_FIRST, JobFilter
from manta.service.store.tables import Job
from manta.workers.config import JobSpec


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pages(clock) -> RenderedPages:
    return RenderedPages(RenderedJobs(clock), clock)


@pytest.fixture
def submit(store, document):
    def submit(**fields: Any) -> str:
        spec = JobSpec.model_validate(document | fields)
        return store.write(lambda session: jobs.create(session, spec)[0]).id

    return submit


@pytest.fixture
def over(store, submit):
    """Submits a job that has been over for a while, so that nothing of it changes by itself."""

    def submit_and_end(**fields: Any) -> str:
        job_id = submit(**fields)

        def end(session):
            jobs.transition(session, job_id, JobState.CANCELLED)
            jobs.get(session, job_id).finished_at -= SETTLED_SECONDS + 5

        store.write(end)
        return job_id

    return submit_and_end


def items(body: bytes) -> list[dict[str, Any]]:
    return json.loads(body)["items"]


def test_rendered_page_contains_the_rendered_jobs_of_its_filter(store, submit, pages):
    ids = [submit(name=name) for name in ("a", "b", "a")]
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
    statements: list[str] = []
    event.listen(store.database.readers, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
    assert pages.page(store) is first
    assert len([each for each in statements if each.startswith("SELECT")]) == 1
    assert pages.page(store, EVERY_JOB, NEWEST_FIRST, 2) is not first


@pytest.mark.parametrize("change", ["edited", "moved on", "ended", "another", "deleted", "its metrics"])
def test_rendered_page_shows_any_change_of_its_jobs_at_once(store, submit, over, pages, change):
    ids = [over(), submit(), over()]
    before = items(pages.page(store))

    def act(session):
        job = jobs.get(session, ids[1])
        if change == "edited":
            edits.edit(session, ids[0], name="new")
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
    with store.read() as session:
        there = list(session.scalars(select(Job.id).order_by(Job.id.desc())))
    assert after == [json.loads(RenderedJobs().one(store, job_id).body) for job_id in there]


def test_rendered_page_of_active_jobs_is_rebuilt_after_a_second(store, submit, over, pages, clock):
    submit()
    first = pages.page(store)
    clock.now += FRESH_SECONDS / 2
    assert pages.page(store) is first
    clock.now += FRESH_SECONDS / 2
    assert pages.page(store) is not first


def test_job_page_of_finished_jobs_is_cached_until_one_changes(store, over, pages, clock):
    over()
    first = pages.page(store)
    clock.now += 1000 * FRESH_SECONDS
    assert pages.page(store) is first


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
