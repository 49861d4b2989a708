"""Jobs given by their names: looked up once, by name alone, and never guessed."""

import asyncio

import httpx
import pytest

from manta.api.client import ApiError, AsyncClient, Client, calls
from manta.service.ids import next_job_id
from tests.api.support.keys import add_key

ADDRESS = "http://manta.test"
IDS = [next_job_id(1.8e9, 0, None)]
IDS += [next_job_id(1.8e9, 0, IDS[-1])]


class Lookups:
    """Answers lookups with `found`, newest first, and everything else with 503; `asked` has all."""

    def __init__(self, *answers, cursor=None):
        self.answer, self.asked = {"items": list(answers), "next_cursor": cursor}, []

    def __call__(self, request):
        self.asked.append(f"{request.method} {request.url.raw_path.decode()}")
        if request.url.path == "/v1/jobs":
            return httpx.Response(200, json=self.answer)
        return httpx.Response(503, json={"code": "not_ready", "title": "", "status": 503, "detail": "later"})


@pytest.fixture
def job(service):
    return service.submit(name="a job")


def test_client_calls_accept_the_name_of_a_job_for_its_id(service, job):
    lookups = Lookups(job)
    with Client(ADDRESS, httpx.MockTransport(lookups)) as client:
        for ask in (
            lambda: client.pause("a job"),
            lambda: client.download(calls.profile("a job", "t", 0)),
            lambda: next(client.follow_logs("a job")),
            lambda: client.all_events("a job"),
        ):
            with pytest.raises(ApiError, match="later"):
                ask()

    async def by_event_loop():
        async with AsyncClient(ADDRESS, httpx.MockTransport(lookups)) as client:
            with pytest.raises(ApiError, match="later"):
                await client.send(calls.job("a job"))
            with pytest.raises(ApiError, match="later"):
                await anext(client.stream(calls.follow_events("a job")))

    asyncio.run(by_event_loop())
    first, then = lookups.asked[::2], lookups.asked[1::2]
    assert set(first) == {"GET /v1/jobs?name=a+job&limit=10&spec=false"}
    of_job = f"/v1/jobs/{job['id']}"
    assert then == [
        f"POST {of_job}/pause", f"GET {of_job}/traces/t/profiles/0", f"GET {of_job}/logs?follow=true",
        f"GET /v1/events?job={job['id']}&limit=100", f"GET {of_job}", f"GET {of_job}/events?follow=true",
    ]  # fmt: skip


def test_client_does_not_look_up_job_ids():
    lookups = Lookups()
    with Client(ADDRESS, httpx.MockTransport(lookups)) as client, pytest.raises(ApiError, match="later"):
        client.job(IDS[0])
    assert lookups.asked == [f"GET /v1/jobs/{IDS[0]}"]


def test_name_shared_by_several_jobs_is_refused_as_ambiguous(service, job):
    newer = service.submit(name="a job")
    service.move(newer["id"], "CANCELLED")
    with Client(service.url) as client:
        with pytest.raises(ApiError) as refused:
            client.pause("a job")
        assert refused.value.problem.code == "ambiguous_name"
        first, *lines = str(refused.value).splitlines()
        assert first == f"several jobs are called 'a job': say the id of one, such as {newer['id']}"
        assert [line.split()[:2] for line in lines] == [[newer["id"], "CANCELLED"], [job["id"], "QUEUED"]]
        with pytest.raises(ApiError, match="no job has the id or the name 'another'; `manta ps` lists the jobs"):
            client.job("another")
    more = httpx.MockTransport(Lookups(newer, job, cursor="c"))
    with Client(ADDRESS, more) as client, pytest.raises(ApiError, match="`manta ps --name 'a job'` lists them"):
        client.job("a job")


def test_job_names_of_other_projects_are_not_resolved(service, job):
    with Client(service.url, key=add_key(service.store, project="others")) as client:
        with pytest.raises(ApiError, match="no job has"):
            client.job("a job")
        own = client.submit(job["spec"])
        assert client.job("a job").id == own.id


def test_client_wait_by_name_keeps_the_job_it_first_resolved(service, job):
    lookups = Lookups(job)

    def answer(request):
        if request.url.path.startswith("/v1/jobs/job_"):
            lookups.asked.append("GET one")
            state = "RUNNING" if lookups.asked.count("GET one") < 3 else "SUCCEEDED"
            return httpx.Response(200, json={**job, "state": state})
        return lookups(request)

    with Client(ADDRESS, httpx.MockTransport(answer)) as client:
        assert client.wait("a job").state == "SUCCEEDED"
    assert lookups.asked == ["GET /v1/jobs?name=a+job&limit=10&spec=false", *["GET one"] * 3]
