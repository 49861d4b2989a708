"""The Python client: typed answers, readable errors, streams; the same for event loops."""

import asyncio
import json
import math
from datetime import UTC, datetime

import httpx
import pytest

from api import calls
from api.client import ApiError, AsyncMantaClient, MantaClient, ServiceUnreachable, find_url
from api.sse_client import EventParser, ServerEvent
from service.settings import Settings


@pytest.fixture
def client(service):
    with MantaClient(service.url) as client:
        yield client


def test_a_job_from_submission_to_its_end(service, client, document):
    assert client.dry_run(document).layout.world_size == 4
    job = client.submit(document, idempotency_key="k")
    assert client.submit(document, idempotency_key="k").id == job.id
    assert abs((datetime.now(UTC) - job.created_at).total_seconds()) < 60
    service.report(job.id, [{"step": 1, "loss": float("nan"), "tokens": 64}])
    assert math.isnan(client.job(job.id).metrics.latest["loss"])
    found = client.metrics(job.id, ["loss", "tokens"])
    assert found.steps == [1]
    assert math.isnan(found.series["loss"][0])
    assert [entry.id for entry in client.jobs(state="QUEUED").items] == [job.id]
    assert client.cancel(job.id).state == "CANCELLED"
    assert [event.type for event in client.events(job.id).items] == ["submitted", "state_changed"]
    ledger, ended = client.ledger(job.id), client.job(job.id)
    assert (ledger.closed, ledger.began_at, ledger.until) == (True, ended.created_at, ended.finished_at)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_seconds) != 0
    assert client.recoveries(job.id).items == []
    assert client.logs(job.id).items == client.ranks(job.id).items == client.checkpoints(job.id).items == []
    assert client.cluster().nodes[0].ranks[0].rank == 0
    assert client.ready().status == "ready"


def test_streams_yield_items_until_the_job_is_final(service, client, document):
    job = client.submit(document)
    stream = client.follow_events(job.id)
    first = next(stream)
    assert first.type == "submitted"
    service.move(job.id, "CANCELLED")
    assert [event.data["to"] for event in stream] == ["CANCELLED"]
    assert [event.type for event in client.follow_events(job.id, after=first.id)] == ["state_changed"]
    assert list(client.follow_logs(job.id)) == []


def test_a_refusal_is_a_sentence_and_a_problem(client, document):
    for job_id in ("job_000000000000", "../../etc/passwd", "", ".", "a/b", "job_000000000000\n"):
        with pytest.raises(ApiError, match="no job") as caught:
            client.job(job_id)
        assert caught.value.problem.code == "job_not_found"
    with pytest.raises(ApiError, match="must divide model") as caught:
        client.submit({**document, "parallel": {"tensor": 3}})
    assert caught.value.problem.errors[0].path == "parallel.tensor"
    with pytest.raises(ApiError):
        next(client.follow_events("job_000000000000"))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://[", "nonsense", "ftp://x"])
def test_nobody_there_is_one_clear_sentence(url):
    with pytest.raises(ServiceUnreachable, match="manta up"):
        MantaClient(url).jobs()


@pytest.mark.parametrize("status", [200, 502])
def test_somebody_else_there_is_one_clear_sentence(status):
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text="<html>hello</html>"))
    with pytest.raises(ApiError, match="not Manta's"):
        MantaClient("http://elsewhere", transport).jobs()


def test_event_loops_send_the_same_calls(service, document):
    async def main():
        async with AsyncMantaClient(service.url) as client:
            job = await client.send(calls.submit(document))
            await client.send(calls.cancel(job.id))
            states = [event.data.get("to") async for event in client.stream(calls.follow_events(job.id))]
            with pytest.raises(ApiError, match="no job"):
                await client.send(calls.job("job_000000000000"))
            return states

    assert asyncio.run(main()) == [None, "CANCELLED"]


def test_the_address_comes_from_the_environment_then_the_home_then_the_default(tmp_path):
    def found(**environment):
        return find_url(Settings.from_environment({"MANTA_HOME": str(tmp_path), **environment}))

    assert found() == "http://127.0.0.1:8400"
    service_file = tmp_path / "service.json"
    service_file.write_text('{"url": "http://127.0.0.1:')
    assert found() == "http://127.0.0.1:8400"
    service_file.write_text(json.dumps({"url": "http://127.0.0.1:1234", "pid": 1}))
    assert found() == "http://127.0.0.1:1234"
    assert found(MANTA_URL="http://far:1") == "http://far:1"


def test_streams_are_parsed_as_the_standard_says():
    parser = EventParser()
    lines = [": hello", "", "id: 1", "data: a", "data:b", "", "event: end", "data: {}", "", "data: cut"]
    events = [event for event in map(parser.feed, lines) if event is not None]
    assert events == [ServerEvent("a\nb", "message", "1"), ServerEvent("{}", "end", "")]
