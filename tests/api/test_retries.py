"""Whoever follows a job goes on doing so when the service is back; what could never be answered ends at once."""

import asyncio
import itertools
import json
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import AsyncMock

import httpx
import pytest

from manta.api.cli.progress import watch
from manta.api.client import AsyncClient, Client, async_client, calls, retries
from manta.api.client import blocking as client
from manta.api.client.rest_call import ApiError, ServiceUnreachable
from manta.api.client.retries import GIVE_UP_SECONDS, RetryPolicy
from manta.api.schemas import Problem
from tests.api.cli.test_progress import make_job

JOB = "job_000000000001"
URL = "http://here"
AWAY = ServiceUnreachable(URL, ConnectionError("reset"))


def refusal(status):
    return ApiError(Problem(code="c", title="t", status=status, detail="not now"))


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """Those that were made, none of which takes any time."""
    made = []
    # Of these modules alone: there are threads that sleep in the same process.
    for module in (retries, client):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=made.append, monotonic=time.monotonic))
    monkeypatch.setattr(async_client, "asyncio", SimpleNamespace(sleep=AsyncMock(side_effect=made.append)))
    return made


class Script:
    """Gives or raises one thing after the other."""

    def __init__(self, *things):
        self.left = list(things)

    def __call__(self, *_arguments, **_options):
        thing = self.left.pop(0)
        if isinstance(thing, Exception):
            raise thing
        return thing


def test_client_retry_pauses_grow_and_reset_after_an_answer(pauses):
    said = []
    patient = RetryPolicy(notify=said.append, clock=lambda: 0.0)
    assert patient.call(Script(*[AWAY] * 7, refusal(503), "a")) == "a"
    assert pauses == [0.25, 0.5, 1, 2, 4, 5, 5, 5]
    assert patient.call(Script(refusal(429), "b")) == "b"
    assert pauses[8:] == [0.25]
    assert said == [f"{AWAY}; trying again", "not now; trying again"], "once each time that it is away"


def test_client_retries_end_after_the_patience_time():
    seconds = iter([0, 299, 300])
    asked = Script(AWAY, AWAY, refusal(503), "too late")
    with pytest.raises(ApiError, match="not now"):
        RetryPolicy(300, clock=lambda: next(seconds)).call(asked)
    assert asked.left == ["too late"]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422, 500])
def test_client_does_not_retry_refusals(pauses, status):
    with pytest.raises(ApiError):
        RetryPolicy().call(Script(refusal(status)))
    assert pauses == []


@pytest.mark.parametrize("trouble", [AWAY, refusal(503), refusal(429)])
def test_a_job_is_watched_on_once_the_service_is_back(trouble):
    reader = make_reader(make_job(step=1), trouble, trouble, make_job(state="SUCCEEDED", step=200))
    assert [job.step for job in watch(reader, JOB, poll_seconds=0)] == [1, 200]
    with pytest.raises(type(trouble)):
        next(watch(make_reader(trouble), JOB, poll_seconds=0))


def make_reader(*answers):
    reader = type("Reader", (), {})()
    reader.job = Script(*answers)
    return reader


def answers_of(*answers):
    """A transport that gives them one after the other, and the requests that it was sent."""
    script, asked = Script(*answers), []

    def answer(request):
        asked.append(request)
        return script()

    return httpx.MockTransport(answer), asked


def test_a_job_is_waited_for_once_the_service_is_back():
    job = httpx.Response(200, text=make_job(state="RUNNING").model_dump_json())
    over = httpx.Response(200, text=make_job(state="FAILED").model_dump_json())
    transport, asked = answers_of(job, httpx.ReadError("reset"), httpx.ConnectError("refused"), over)
    with Client(URL, transport) as client:
        assert client.wait(JOB).state == "FAILED"
    assert [dict(request.url.params).get("state") for request in asked] == [None, "RUNNING", "RUNNING", "RUNNING"]


JOB_MADE = httpx.Response(201, text=make_job().model_dump_json())


@pytest.mark.parametrize(
    "lost", [httpx.ReadTimeout("slow"), httpx.ReadError("reset"), httpx.RemoteProtocolError("cut")]
)
def test_a_submission_whose_answer_is_lost_makes_one_job(lost):
    transport, asked = answers_of(lost, httpx.ConnectError("it is restarted"), JOB_MADE)
    with Client(URL, transport) as client:
        assert client.submit({"name": "a"}).id == JOB
    keys = {request.headers["idempotency-key"] for request in asked}
    assert len(asked) == 3 and len(keys) == 1 and len(keys.pop()) == 32
    again, asked = answers_of(JOB_MADE, JOB_MADE)
    with Client(URL, again) as client:
        client.submit({"name": "a"})
        client.submit({"name": "a"})
    assert len({request.headers["idempotency-key"] for request in asked}) == 2, "asked for twice it is two jobs"


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), httpx.ConnectTimeout("slow")])
def test_failed_submission_without_a_connection_is_not_retried(error):
    transport, asked = answers_of(error)
    with Client(URL, transport) as client, pytest.raises(ServiceUnreachable):
        client.submit({"name": "a"})
    assert len(asked) == 1


def stream_of(*ids, end=False, broken=False):
    """A stream of events with these ids, which ends as it should, breaks off, or is just over."""
    unknown = dict.fromkeys(("generation", "rank", "step"))
    event = {"time": 0, "type": "t", "message": "m", "data": {}, **unknown}
    lines = [f"id: {each}\ndata: {json.dumps({'id': each, **event})}\n\n" for each in ids]
    lines += ['event: end\ndata: {"state": "FAILED"}\n\n'] if end else []

    class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
        def __iter__(self):
            yield from (line.encode() for line in lines)
            if broken:
                raise httpx.ReadError("reset")

        async def __aiter__(self):
            for line in self:
                yield line

    return httpx.Response(200, stream=Body())


def heard(transport):
    with Client(URL, transport) as client:
        return [event.id for event in client.follow_events(JOB)]


def heard_in_a_loop(transport):
    async def main():
        async with AsyncClient(URL, transport) as client:
            return [event.id async for event in client.stream(calls.follow_events(JOB))]

    return asyncio.run(main())


both = pytest.mark.parametrize("hear", [heard, heard_in_a_loop])


@both
def test_client_stream_resumes_where_it_broke_off(hear):
    transport, asked = answers_of(
        stream_of("1", "2", broken=True),
        httpx.ConnectError("refused"),
        httpx.Response(502, text="<html>a proxy</html>"),
        stream_of("3"),
        stream_of("4", end=True),
    )
    assert hear(transport) == ["1", "2", "3", "4"]
    assert [request.headers.get("last-event-id") for request in asked] == [None, "2", "2", "2", "3"]


@both
def test_client_stream_patience_restarts_after_each_reconnection(hear, monkeypatch):
    def away(*answers):
        clock = itertools.count(0, GIVE_UP_SECONDS)
        monkeypatch.setattr(retries, "RetryPolicy", partial(RetryPolicy, clock=lambda: next(clock)))
        return answers_of(stream_of("1"), *answers)[0]

    assert hear(away(stream_of(), stream_of("2", end=True))) == ["1", "2"]
    with pytest.raises(ServiceUnreachable, match="refused"):
        hear(away(httpx.ConnectError("refused")))


@both
def test_client_stream_with_a_revoked_key_raises_the_refusal(hear):
    document = {"code": "unauthenticated", "title": "t", "status": 401, "detail": "send a valid key"}
    transport, _ = answers_of(stream_of("1"), httpx.Response(401, json=document))
    with pytest.raises(ApiError, match="send a valid key"):
        hear(transport)


@both
def test_client_stream_that_never_began_is_given_up(hear):
    transport, asked = answers_of(httpx.ConnectError("refused"))
    with pytest.raises(ServiceUnreachable):
        hear(transport)
    assert len(asked) == 1
