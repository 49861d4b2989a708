"""Every REST call as it is sent."""

import httpx
import pytest

from manta.api import requests
from manta.api.client import calls
from manta.api.client.rest_call import ApiError, Call
from manta.workers.spec.problems import SpecError

ADDRESS = "http://manta.test"


def sent(call):
    """Method, target, body and headers of the call's own."""
    client = httpx.Client(base_url=ADDRESS)
    request = call.request(client)
    own = {
        name: request.headers[name]
        for name in ("If-Match", "Idempotency-Key", "Last-Event-ID")
        if name in request.headers
    }
    return request.method, request.url.raw_path.decode(), request.content.decode(), own


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (calls.submit({"name": "a"}, "once"), ("POST", "/v1/jobs", '{"name": "a"}', {"Idempotency-Key": "once"})),
        (calls.submit({}), ("POST", "/v1/jobs", "{}", {})),
        (calls.dry_run({"name": "a"}), ("POST", "/v1/jobs?dry_run=true", '{"name": "a"}', {})),
        (calls.jobs("FAILED", "b", 7, "c"), ("GET", "/v1/jobs?state=FAILED&name=b&limit=7&cursor=c", "", {})),
        (calls.jobs(), ("GET", "/v1/jobs?limit=50", "", {})),
        (calls.job("j", 5.0, "QUEUED"), ("GET", "/v1/jobs/j?wait=5.0&state=QUEUED", "", {})),
        (calls.cancel("j"), ("POST", "/v1/jobs/j/cancel", "", {})),
        (calls.edit("j", "n", 0, "e"), ("PATCH", "/v1/jobs/j", '{"name": "n", "priority": 0}', {"If-Match": "e"})),
        (calls.edit("j", priority=3), ("PATCH", "/v1/jobs/j", '{"priority": 3}', {})),
        (calls.delete("j"), ("DELETE", "/v1/jobs/j", "", {})),
        (calls.pause("j"), ("POST", "/v1/jobs/j/pause", "", {})),
        (calls.resume("j"), ("POST", "/v1/jobs/j/resume", "", {})),
        (calls.retry("j"), ("POST", "/v1/jobs/j/retry", "", {})),
        (calls.resize("j", 4), ("POST", "/v1/jobs/j/resize", '{"data": 4}', {})),
        (
            calls.metrics("j", ["loss", "tokens"], 9, 20),
            ("GET", "/v1/jobs/j/metrics?names=loss%2Ctokens&after_step=9&max_points=20", "", {}),
        ),
        (calls.metrics("j"), ("GET", "/v1/jobs/j/metrics?after_step=0&max_points=1000", "", {})),
        (calls.events("j", "c", 3), ("GET", "/v1/jobs/j/events?cursor=c&limit=3", "", {})),
        (calls.all_events("j", "t", "c", 3), ("GET", "/v1/events?job=j&type=t&cursor=c&limit=3", "", {})),
        (calls.logs("j", 0, "c", 3), ("GET", "/v1/jobs/j/logs?rank=0&cursor=c&limit=3", "", {})),
        (calls.ranks("j"), ("GET", "/v1/jobs/j/ranks", "", {})),
        (calls.checkpoints("j", 3, "c"), ("GET", "/v1/jobs/j/checkpoints?limit=3&cursor=c", "", {})),
        (calls.ledger("j"), ("GET", "/v1/jobs/j/ledger", "", {})),
        (calls.machines(), ("GET", "/v1/machines", "", {})),
        (calls.job_spec("j"), ("GET", "/v1/jobs/j/spec", "", {})),
        (calls.job_plan("j"), ("GET", "/v1/jobs/j/plan", "", {})),
        (calls.job_plan_picture("j"), ("GET", "/v1/jobs/j/plan/picture", "", {})),
        (calls.recoveries("j", 3, "c"), ("GET", "/v1/jobs/j/recoveries?limit=3&cursor=c", "", {})),
        (
            calls.request_trace("j", requests.TraceRequest(steps=3)),
            ("POST", "/v1/jobs/j/traces", '{"steps": 3, "step": 0, "profiler_ranks": []}', {}),
        ),
        (calls.traces("j"), ("GET", "/v1/jobs/j/traces", "", {})),
        (calls.trace("j", "../1"), ("GET", "/v1/jobs/j/traces/..%2F1", "", {})),
        (calls.trace_for_perfetto("j", "trace_1"), ("GET", "/v1/jobs/j/traces/trace_1/perfetto", "", {})),
        (calls.profile("j", "trace_1", 3), ("GET", "/v1/jobs/j/traces/trace_1/profiles/3", "", {})),
        (calls.budget("j"), ("GET", "/v1/jobs/j/budget", "", {})),
        (calls.budget("j", "phases"), ("GET", "/v1/jobs/j/budget?from=phases", "", {})),
        (calls.drain("a/b", 60.0), ("POST", "/v1/nodes/a%2Fb/drain", '{"deadline_seconds": 60.0}', {})),
        (calls.undrain("a/b"), ("DELETE", "/v1/nodes/a%2Fb/drain", "", {})),
        (calls.cluster(), ("GET", "/v1/cluster", "", {})),
        (calls.check_cluster(), ("POST", "/v1/cluster/check", "", {})),
        (calls.create_project("p"), ("POST", "/v1/projects", '{"name": "p"}', {})),
        (calls.projects(3, "c"), ("GET", "/v1/projects?limit=3&cursor=c", "", {})),
        (calls.keys(3, "c"), ("GET", "/v1/keys?limit=3&cursor=c", "", {})),
        (calls.revoke_key("k/1"), ("DELETE", "/v1/keys/k%2F1", "", {})),
        (calls.audit("k", "t", 3, "c"), ("GET", "/v1/audit?key=k&target=t&limit=3&cursor=c", "", {})),
        (calls.create_link(), ("POST", "/v1/links", "", {})),
        (calls.me(), ("GET", "/v1/me", "", {})),
        (calls.end_session(), ("DELETE", "/v1/session", "", {})),
        (calls.ready(), ("GET", "/readyz", "", {})),
        (calls.follow_events("j", "8"), ("GET", "/v1/jobs/j/events?follow=true", "", {"Last-Event-ID": "8"})),
        (calls.follow_all_events("j", "t"), ("GET", "/v1/events?follow=true&job=j&type=t", "", {})),
        (calls.follow_logs("j", 2, "p"), ("GET", "/v1/jobs/j/logs?follow=true&rank=2", "", {"Last-Event-ID": "p"})),
    ],
    ids=lambda value: str(value.path) if isinstance(value, Call) else "",
)
def test_call_builds_its_request_from_its_arguments(call, expected):
    assert sent(call) == expected


def test_call_to_create_a_key_omits_unset_fields():
    _, _, body, _ = sent(calls.create_key(requests.NewKey(name="laptop", scope="read", expires_in_days=2)))
    assert body == '{"name": "laptop", "scope": "read", "expires_in_days": 2.0, "installation": false}'


def test_call_to_inject_sends_every_field_of_the_fault():
    fault = requests.FaultRequest(kind="slow", rank=3, at_step=7, phase="backward", seconds=0.5)
    _, target, body, _ = sent(calls.inject("j", fault))
    assert target == "/v1/jobs/j/faults"
    assert requests.FaultRequest.model_validate_json(body) == fault


@pytest.mark.parametrize(
    ("call", "seconds"), [(calls.job("j", 20.0), 30.0), (calls.job("j"), 10.0), (calls.delete("j"), 610.0)]
)
def test_slow_calls_extend_the_read_timeout_of_the_client(call, seconds):
    request = call.request(httpx.Client(base_url=ADDRESS, timeout=10.0))
    assert request.extensions["timeout"]["read"] == seconds
    assert request.extensions["timeout"]["connect"] == 10.0


@pytest.mark.parametrize("job", ["", "../keys", "a?b=c", ".", "a/b", "a\n", "a" * 101])
def test_impossible_job_ids_and_names_are_refused_before_a_request(job):
    with pytest.raises(ApiError, match=r"(?s)no job can have the id or the name .*; `manta ps` lists the jobs"):
        calls.job(job)


@pytest.mark.parametrize(
    ("status", "content"), [(200, "<html>hello</html>"), (200, '{"odd": 1}'), (502, "bad gateway"), (404, "{}")]
)
def test_answer_of_a_foreign_service_is_reported_as_foreign(status, content):
    request = httpx.Request("GET", f"{ADDRESS}/v1/jobs/j")
    with pytest.raises(ApiError, match="something that is not Manta's; is another service running there") as caught:
        calls.job("j").read(httpx.Response(status, text=content, request=request))
    assert (caught.value.problem.code, caught.value.problem.status) == ("foreign_answer", status)


def test_self_referencing_document_is_refused_before_it_is_sent():
    document = {"name": "a"}
    document["again"] = document
    with pytest.raises(SpecError, match="contains itself"):
        sent(calls.submit(document))


def test_stream_calls_accept_event_streams():
    request = calls.follow_events("j").request(httpx.Client(base_url=ADDRESS))
    assert request.headers["Accept"] == "text/event-stream"
