"""The Python client: typed answers, readable errors, streams; the same for event loops."""

import asyncio
import json
import math
import re
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from manta.api.client import ApiError, AsyncClient, Client, ServiceUnreachable, calls, find_url, rest_call
from manta.api.client.retries import EventParser, ServerEvent
from manta.api.streams import KEEPALIVE_SECONDS, MAX_WAIT_SECONDS
from manta.service.settings import Settings
from tests.api.support.silent_service import SilentService

ROOT = Path(__file__).parents[2]


@pytest.fixture
def client(service):
    with Client(service.url) as client:
        yield client


def test_client_follows_a_job_from_submission_to_its_end(service, client, document):
    assert client.dry_run(document).layout.world_size == 4
    job = client.submit(document, idempotency_key="k")
    assert client.submit(document, idempotency_key="k").id == job.id
    assert abs((datetime.now(UTC) - job.created_at).total_seconds()) < 60
    service.report(job.id, [{"step": 1, "loss": float("nan"), "tokens": 64}])
    assert math.isnan(client.job(job.id).metrics.latest["loss"])
    curves = client.metrics(job.id, ["loss", "tokens"])
    assert curves.steps == [1]
    assert math.isnan(curves.series["loss"][0])
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


def test_client_changes_override_values_of_the_document(client, document):
    changes = {"train.steps": 7, "train.optimizer.beta1": 0.8}
    spec = client.submit(document, changes=changes).spec
    assert (spec["train"]["steps"], spec["train"]["optimizer"]["beta1"], document["train"]["steps"]) == (7, 0.8, 10)
    assert client.dry_run(document, {"parallel.tensor": 1}).layout.world_size == 2
    with pytest.raises(ApiError, match=r"train\.stepps: unknown key"):
        client.dry_run(document, {"train.stepps": 7})


def test_a_pause_and_its_end(client, document):
    job = client.submit(document)
    assert [client.pause(job.id).state for _ in range(2)] == ["PAUSED", "PAUSED"]
    assert client.resume(job.id).state == "QUEUED"


def test_streams_yield_items_until_the_job_is_final(service, client, document):
    job = client.submit(document)
    stream = client.follow_events(job.id)
    first = next(stream)
    assert first.type == "submitted"
    service.move(job.id, "CANCELLED")
    assert [event.data["to"] for event in stream] == ["CANCELLED"]
    assert [event.type for event in client.follow_events(job.id, after=first.id)] == ["state_changed"]
    assert list(client.follow_logs(job.id)) == []


def test_refused_call_raises_an_api_error_with_sentence_and_problem(client, document):
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
def test_unreachable_url_raises_service_unreachable_with_advice(url):
    with pytest.raises(ServiceUnreachable, match="manta up"):
        Client(url).jobs()


@pytest.mark.parametrize("status", [200, 502])
def test_answer_of_another_web_service_raises_an_api_error(status):
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text="<html>hello</html>"))
    with pytest.raises(ApiError, match="not Manta's"):
        Client("http://elsewhere", transport).jobs()


def test_async_client_sends_the_same_calls(service, document):
    async def main():
        async with AsyncClient(service.url) as client:
            job = await client.send(calls.submit(document))
            await client.send(calls.cancel(job.id))
            states = [event.data.get("to") async for event in client.stream(calls.follow_events(job.id))]
            with pytest.raises(ApiError, match="no job"):
                await client.send(calls.job("job_000000000000"))
            return states

    assert asyncio.run(main()) == [None, "CANCELLED"]


def test_python_client_examples_of_the_documentation_run(service, monkeypatch, capsys):
    """Jobs are over as soon as they are submitted."""
    monkeypatch.setenv("MANTA_URL", service.url)
    monkeypatch.setattr(service.control, "submitted", lambda job_id: service.move(job_id, "CANCELLED"))
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(), re.M | re.S)
    monkeypatch.chdir(ROOT)
    for block in blocks:
        exec(block, {})
    printed = capsys.readouterr().out
    assert len(blocks) == 3 and printed.count("CANCELLED") >= 2 and "-> CANCELLED" in printed


def test_the_address_comes_from_the_environment_then_the_home_then_the_default(tmp_path):
    def address(**environment):
        return find_url(Settings.from_environment({"MANTA_HOME": str(tmp_path), **environment}))

    assert address() == "http://127.0.0.1:8400"
    service_file = tmp_path / "service.json"
    service_file.write_text('{"url": "http://127.0.0.1:')
    assert address() == "http://127.0.0.1:8400"
    service_file.write_text(json.dumps({"url": "http://127.0.0.1:1234", "pid": 1}))
    assert address() == "http://127.0.0.1:1234"
    assert address(MANTA_URL="http://far:1") == "http://far:1"


def test_streams_are_parsed_as_the_standard_says():
    parser = EventParser()
    lines = [": hello", "", "id: 1", "data: a", "data:b", "", "event: end", "data: {}", "", "data: cut"]
    events = [event for event in map(parser.feed, lines) if event is not None]
    assert events == [ServerEvent("a\nb", "message", "1"), ServerEvent("{}", "end", "")]


JOB = "job_000000000001"
EVENT_STREAM = {"accept": "text/event-stream"}
FROM_0 = {**EVENT_STREAM, "last-event-id": "0"}


@pytest.mark.parametrize(
    ("ask", "line", "body", "headers"),
    [
        (lambda c: c.submit({"name": "a"}, "once"), "POST /v1/jobs", {"name": "a"}, {"idempotency-key": "once"}),
        (lambda c: c.dry_run({"name": "a"}), "POST /v1/jobs?dry_run=true", {"name": "a"}, {}),
        (lambda c: c.jobs("FAILED", "a", 7, "x"), "GET /v1/jobs?state=FAILED&name=a&limit=7&cursor=x", None, {}),
        (lambda c: c.job(JOB), f"GET /v1/jobs/{JOB}", None, {}),
        (lambda c: c.job(JOB, 0, "QUEUED"), f"GET /v1/jobs/{JOB}?wait=0&state=QUEUED", None, {}),
        (lambda c: c.resize(JOB, 3), f"POST /v1/jobs/{JOB}/resize", {"data": 3}, {}),
        (lambda c: c.retry(JOB), f"POST /v1/jobs/{JOB}/retry", None, {}),
        (lambda c: c.cancel(JOB), f"POST /v1/jobs/{JOB}/cancel", None, {}),
        (
            lambda c: c.edit(JOB, "a", 0, '"e"'),
            f"PATCH /v1/jobs/{JOB}",
            {"name": "a", "priority": 0},
            {"if-match": '"e"'},
        ),
        (lambda c: c.delete(JOB), f"DELETE /v1/jobs/{JOB}", None, {}),
        (
            lambda c: c.metrics(JOB, ["loss", "tokens"], 3, 9),
            f"GET /v1/jobs/{JOB}/metrics?names=loss,tokens&after_step=3&max_points=9",
            None,
            {},
        ),
        (lambda c: c.events(JOB, "x", 7), f"GET /v1/jobs/{JOB}/events?cursor=x&limit=7", None, {}),
        (lambda c: c.all_events(JOB, "t", "x", 7), f"GET /v1/events?job={JOB}&type=t&cursor=x&limit=7", None, {}),
        (lambda c: c.logs(JOB, 0, "x", 7), f"GET /v1/jobs/{JOB}/logs?rank=0&cursor=x&limit=7", None, {}),
        (lambda c: next(c.follow_events(JOB, "0")), f"GET /v1/jobs/{JOB}/events?follow=true", None, FROM_0),
        (
            lambda c: next(c.follow_all_events(JOB, "t", "0")),
            f"GET /v1/events?follow=true&job={JOB}&type=t",
            None,
            FROM_0,
        ),
        (lambda c: next(c.follow_logs(JOB, 0)), f"GET /v1/jobs/{JOB}/logs?follow=true&rank=0", None, EVENT_STREAM),
        (lambda c: c.ranks(JOB), f"GET /v1/jobs/{JOB}/ranks", None, {}),
        (lambda c: c.checkpoints(JOB, 7, "x"), f"GET /v1/jobs/{JOB}/checkpoints?limit=7&cursor=x", None, {}),
        (lambda c: c.ledger(JOB), f"GET /v1/jobs/{JOB}/ledger", None, {}),
        (lambda c: c.machines(), "GET /v1/machines", None, {}),
        (lambda c: c.job_spec(JOB), f"GET /v1/jobs/{JOB}/spec", None, {}),
        (lambda c: c.job_plan(JOB), f"GET /v1/jobs/{JOB}/plan", None, {}),
        (lambda c: c.recoveries(JOB, 7, "x"), f"GET /v1/jobs/{JOB}/recoveries?limit=7&cursor=x", None, {}),
        (lambda c: c.drain("ab/c", 0.0), "POST /v1/nodes/ab%2Fc/drain", {"deadline_seconds": 0.0}, {}),
        (lambda c: c.undrain("ab/c"), "DELETE /v1/nodes/ab%2Fc/drain", None, {}),
        (lambda c: c.cluster(), "GET /v1/cluster", None, {}),
        (lambda c: c.check_cluster(), "POST /v1/cluster/check", None, {}),
        (lambda c: c.ready(), "GET /readyz", None, {}),
    ],
)
def test_arguments_of_each_client_method_reach_its_request(ask, line, body, headers):
    """Zero is as good as any other number, and not taken for nothing."""
    service = SilentService()
    with Client("http://there", service) as client, pytest.raises(ApiError):
        ask(client)
    (asked,) = service.asked
    assert (asked.line, asked.body) == (line, body)
    assert {name: asked.headers[name] for name in headers} == headers


def test_client_timeouts_exceed_the_longest_answer_time():
    service = SilentService()

    def patience(ask):
        with Client("http://there", service) as client, pytest.raises(ApiError):
            ask(client)
        return service.asked[-1].timeout["read"]

    assert patience(lambda client: next(client.follow_logs(JOB))) > 2 * KEEPALIVE_SECONDS
    assert patience(lambda client: next(client.follow_all_events())) > 2 * KEEPALIVE_SECONDS
    assert patience(lambda client: client.job(JOB, wait=MAX_WAIT_SECONDS)) > MAX_WAIT_SECONDS
    assert patience(lambda client: client.delete(JOB)) > 60 > patience(lambda client: client.job(JOB))


def test_event_loops_are_as_patient_with_a_stream_that_has_nothing_to_say():
    waited = []

    def note(request):
        waited.append(request.extensions["timeout"]["read"])
        return httpx.Response(200, content=b'event: end\ndata: {"state": "FAILED"}\n\n')

    async def main():
        async with AsyncClient("http://there", httpx.MockTransport(note)) as client:
            return [line async for line in client.stream(calls.follow_logs(JOB))]

    assert asyncio.run(main()) == []
    assert waited[0] > 2 * KEEPALIVE_SECONDS


UNKNOWN = dict.fromkeys(("generation", "rank", "step"))
EVENT = {"id": "1", "time": 0, "type": "t", "message": "m", "data": {}, **UNKNOWN}


class Endless(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A stream of one event after the other, which knows whether somebody has closed it."""

    closed = False
    _line = f"data: {json.dumps(EVENT)}".encode()

    def __iter__(self):
        while True:
            yield self._line + b"\n\n"

    async def __aiter__(self):
        while True:
            yield self._line + b"\n\n"

    def close(self):
        self.closed = True

    async def aclose(self):
        self.closed = True


@pytest.mark.parametrize("status", [200, 404])
def test_client_stream_is_closed_when_its_reader_stops_or_it_is_refused(status):
    bodies, asked = [Endless(), Endless()], []

    def answer(request):
        asked.append(request)
        if status == 200:
            return httpx.Response(200, stream=bodies[len(asked) - 1])
        return httpx.Response(404, json={"code": "c", "title": "t", "status": 404, "detail": "nothing", "errors": []})

    def hear_one():
        with Client("http://here", httpx.MockTransport(answer), key="k") as client:
            stream = client.follow_events(JOB)
            assert next(stream).type == "t"
            stream.close()

    async def hear_one_in_a_loop():
        async with AsyncClient("http://here", httpx.MockTransport(answer), key="k") as client:
            stream = client.stream(calls.follow_events(JOB))
            assert (await anext(stream)).type == "t"
            await stream.aclose()

    for hear in (hear_one, lambda: asyncio.run(hear_one_in_a_loop())):
        if status == 200:
            hear()
        else:
            with pytest.raises(ApiError, match="nothing"):
                hear()
    assert [body.closed for body in bodies] == [status == 200] * 2
    for request in asked:
        read = request.extensions["timeout"]["read"]
        assert read > 2 * KEEPALIVE_SECONDS, "a stream in which nothing happens is not given up"
        assert request.headers["authorization"] == "Bearer k"


class BrokenOff(Endless):
    """A stream that the service breaks off behind its first line."""

    def __iter__(self):
        yield self._line + b"\n\n"
        raise httpx.ReadError("reset")

    async def __aiter__(self):
        yield self._line + b"\n\n"
        raise httpx.ReadError("reset")


@pytest.mark.parametrize("begins", [True, False])
def test_client_stream_that_breaks_raises_service_unreachable(begins):
    def answer(_request):
        if not begins:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, stream=BrokenOff())

    def hear():
        with Client("http://here", httpx.MockTransport(answer), key="k") as client:
            return list(client.follow_events(JOB))

    async def hear_in_a_loop():
        async with AsyncClient("http://here", httpx.MockTransport(answer), key="k") as client:
            return [event async for event in client.stream(calls.follow_events(JOB))]

    for listen in (hear, lambda: asyncio.run(hear_in_a_loop())):
        with pytest.raises(ServiceUnreachable, match="http://here"):
            listen()


async def test_client_that_is_closed_has_no_connection_left():
    closed = []

    class Transport(httpx.MockTransport):
        def close(self):
            closed.append("blocking")

        async def aclose(self):
            closed.append("in a loop")

    with Client("http://here", Transport(lambda request: httpx.Response(200)), key="k"):
        pass
    async with AsyncClient("http://here", Transport(lambda request: httpx.Response(200)), key="k"):
        pass
    assert closed == ["blocking", "in a loop"]


@pytest.mark.parametrize(("content", "why"), [(None, "No such file or directory"), ("none", "NO_CERTIFICATE")])
def test_unusable_certificates_of_the_environment_are_one_sentence(tmp_path, monkeypatch, content, why):
    if content is not None:
        (tmp_path / "ca.pem").write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    with pytest.raises(ServiceUnreachable, match=rf"certificates of SSL_CERT_FILE or .* cannot be read: .*{why}"):
        Client("https://manta.example.org", key="k")
    untrusted = OSError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
    assert "set SSL_CERT_FILE" in str(ServiceUnreachable("https://manta.example.org", untrusted))


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("variable", ["http_proxy", "HTTPS_PROXY", "ALL_PROXY"])
def test_proxy_of_the_environment_never_gets_the_key_of_a_service_on_this_machine(monkeypatch, kind, variable):
    """It could not reach the service either. Elsewhere it is used, or one that is unusable is named."""
    for url in ("http://127.0.0.1:8400", "http://localhost:8400", "http://[::1]:8400"):
        for proxy in ("http://127.0.0.1:9", "socks5://127.0.0.1:9", "nonsense://"):
            monkeypatch.setenv(variable, proxy)
            assert not kind(url, key="manta_secret")._http._mounts
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    assert kind("https://manta.example.org")._http._mounts or variable == "http_proxy"
    monkeypatch.setenv("HTTPS_PROXY", "socks5://127.0.0.1:9")
    with pytest.raises(ServiceUnreachable, match=r"at https://manta.example.org \(the proxy of ALL_"):
        kind("https://manta.example.org")


@pytest.mark.parametrize(
    ("url", "no_proxy", "proxied"),
    [
        ("http://manta.corp", "", True), ("http://manta.corp", "*", False),
        ("http://manta.corp", " a, manta.corp", False),
        ("http://manta.corp", ".corp", False), ("http://manta.corp", "*.corp", False), ("http://acorp", "corp", True),
        ("http://manta.corp:8400", "manta.corp:8400", False), ("http://manta.corp:8400", "manta.corp:80", True),
        ("http://10.1.2.3", "10.0.0.0/8", False), ("http://11.1.2.3", "10.0.0.0/8,fd00::/8", True),
        ("http://[fd00::1]:8400", "fd00::/8", False), ("http://[fd00::1]", "[fd00::1]", False),
        ("http://127.8.8.8:1", "", False),
    ],
)  # fmt: skip
def test_no_proxy_names_hosts_domains_and_networks_of_both_families(monkeypatch, url, no_proxy, proxied):
    monkeypatch.setattr(rest_call, "getproxies", lambda: {"all": "proxy.corp:3128", "no": no_proxy})
    assert rest_call.proxy_for(httpx.URL(url)) == ("http://proxy.corp:3128" if proxied else None)
    with Client(url, key="k") as client:
        assert bool(client._http._mounts) == proxied


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_broken_httpx_dependency_is_not_blamed_on_a_proxy(monkeypatch, kind):
    for variable in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)

    def broken(**options):
        raise ImportError("h2 is no package")

    monkeypatch.setattr(httpx, "Client", broken)
    monkeypatch.setattr(httpx, "AsyncClient", broken)
    with pytest.raises(ServiceUnreachable, match=r"\(httpx cannot be used here: h2 is no package"):
        kind("http://127.0.0.1:8400", key="k")
