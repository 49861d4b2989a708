"""Whatever is wrong with a request, the answer is a problem document that says what to do."""

import asyncio
import contextlib
import logging
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from sqlalchemy.exc import InternalError, OperationalError

from manta.api.problems import FailureResponses, problem_of
from manta.api.rest_version import HEADER, REST
from manta.api.security.rate_limits import TooManyRequests
from manta.service.store.errors import OutcomeUnknown

PROBLEM_KEYS = {"code", "title", "status", "detail", "errors"}

JSON = {"Content-Type": "application/json"}


def check(response, status, code):
    assert (response.status_code, response.json()["code"]) == (status, code), response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert set(document) == PROBLEM_KEYS
    assert document["status"] == status
    assert document["title"] and document["detail"]
    return document


def test_unknown_spec_key_is_reported_with_the_closest_known_key(service, document):
    document["train"]["step"] = document["train"].pop("steps")
    problem = check(service.http.post("/v1/jobs", json=document), 422, "invalid_spec")
    errors = {error["path"]: error for error in problem["errors"]}
    assert errors["train.step"]["suggestion"] == "train.steps"
    assert "train.steps" in errors


def test_a_layout_that_does_not_fit_names_the_nearest_that_does(service, document):
    document["parallel"] = {"tensor": 3}
    problem = check(service.http.post("/v1/jobs", json=document), 422, "invalid_spec")
    assert problem["errors"][0]["path"] == "parallel.tensor"
    assert problem["errors"][0]["suggestion"] in ("1", "2")


def with_part_of_a_custom_model(document):
    """What the rules do not support: nobody knows the parameters of such a model."""
    theirs = document["model"] | {"family": "custom", "entrypoint": "theirs:build"}
    return document | {"model": theirs, "train": document["train"] | {"frozen": ["embedding"]}}


def test_unsupported_spec_value_is_reported_with_supported_values(service, document):
    problem = check(service.http.post("/v1/jobs", json=with_part_of_a_custom_model(document)), 422, "unsupported")
    rule = "not supported for custom models, whose parameters are unknown"
    assert problem["errors"] == [{"path": "train.frozen", "rule": rule, "suggestion": "[]"}]


def test_an_unsupported_value_beside_a_wrong_one_is_an_invalid_spec(service, document):
    wrong = with_part_of_a_custom_model(document) | {"parallel": {"tensor": 3}}
    check(service.http.post("/v1/jobs", json=wrong), 422, "invalid_spec")


@pytest.mark.parametrize(("body", "key"), [
    ('{"name": "a", "train": {"steps": 1, "seed": 2, "steps": 3}}', "train.steps"),
    ('{"name": "a", "name": "a"}', "name"), ('{"": {"": [0, {"a": 1, "\\u0061": 1}]}}', "..1.a"),
    ('{"a": {"b": 1}, "a": {"b": 1, "b": 2}}', "a"),
    ('[{"' + "k" * 999 + '": 1, "' + "k" * 999 + '": 2}]', "0." + "k" * 198),
])  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/plans", "/v1/keys"])
def test_body_with_a_key_twice_is_refused_with_the_path_of_the_key(service, body, key, path):
    problem = check(service.http.post(path, content=body, headers=JSON), 400, "malformed_json")
    assert problem["detail"] == f"the body has the key {key} twice: leave one of them out"


@pytest.mark.parametrize(("path", "status", "detail"), [
    ("/v1/jobs?limti=1&owner=a", 422, "limti: unknown parameter; known are cursor, label, limit"),
    ("/v1/cluster?wait=1", 422, "wait: unknown parameter; this call has none"),
    ("/v1/jobs?limit=many", 422, "limit: must be an integer, not 'many'"),
    ("/v1/jobs/by-name", 404, "'by-name' is not a job's id; GET /v1/jobs?name=NAME finds"),
])  # fmt: skip
def test_misspelled_parameter_or_name_in_an_address_is_answered_with_what_works(service, path, status, detail):
    response = service.http.get(path)
    assert response.status_code == status and response.json()["detail"].startswith(detail)


@pytest.mark.parametrize("body", [b"null", b"[]", b"5", b'"name: x"', b"{}"])
def test_submission_of_json_that_is_no_spec_is_refused(service, body):
    check(service.http.post("/v1/jobs", content=body, headers=JSON), 422, "invalid_spec")


def test_submission_with_too_many_steps_is_refused(service, document):
    document["train"]["steps"] = 10**30
    problem = check(service.http.post("/v1/jobs", json=document), 422, "invalid_spec")
    assert problem["errors"][0]["path"] == "train.steps"


@pytest.mark.parametrize("chunked", [False, True])
def test_submission_with_an_oversized_body_is_refused(service, chunked):
    body = b" " * (2 * 1024 * 1024)
    content = (body[start : start + 65536] for start in range(0, len(body), 65536)) if chunked else body
    check(service.http.post("/v1/jobs", content=content, headers=JSON), 413, "body_too_large")


@pytest.mark.parametrize("job_id", ["job_000000000000", "nonsense", "job_%2e%2e%2f%2e%2e", "%00", "job_00000000000%0a"])
@pytest.mark.parametrize("resource", ["", "/metrics", "/events", "/logs", "/ranks", "/checkpoints"])
def test_every_resource_of_an_unknown_job_is_not_found(service, job_id, resource):
    response = service.http.get(f"/v1/jobs/{job_id}{resource}")
    assert response.status_code == 404
    assert response.json()["code"] in ("job_not_found", "not_found")


def test_unknown_job_is_reported_with_the_command_that_lists_jobs(service):
    assert "manta ps" in check(service.http.get("/v1/jobs/job_000000000000"), 404, "job_not_found")["detail"]
    check(service.http.post("/v1/jobs/job_000000000000/cancel"), 404, "job_not_found")


@pytest.mark.parametrize("path", ["/", "/v2", "/v1/job", "/v1/jobs/", "/v1/jobs/job_000000000000/sleep"])
def test_unknown_route_is_not_found(service, path):
    check(service.http.get(path), 404, "not_found")


def test_wrong_method_is_refused_with_the_allowed_ones(service):
    response = service.http.delete("/v1/jobs")
    check(response, 405, "method_not_allowed")
    assert response.headers["allow"]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/jobs?limit=0", "limit"), ("/v1/jobs?limit=many", "limit"), ("/v1/jobs?limit=99999", "limit"),
        ("/v1/jobs?state=ASLEEP", "state"), ("/v1/jobs?cursor=%21", "cursor"), ("/v1/jobs?cursor=", "cursor"),
        ("/v1/jobs/{id}/logs?cursor=", "cursor"), ("/v1/jobs?cursor=AAAA", "cursor"),
        ("/v1/jobs/{id}/metrics?max_points=0", "max_points"), ("/v1/jobs/{id}/metrics?after_step=-1", "after_step"),
        ("/v1/jobs/{id}/metrics?after_step=99999999999999999999", "after_step"),
        ("/v1/jobs/{id}/metrics?names=loss%3B--", "names"), ("/v1/jobs/{id}/metrics?names=", "names"),
        ("/v1/jobs/{id}/logs?rank=-1", "rank"), ("/v1/jobs/{id}/logs?cursor=AAAA", "cursor"),
        ("/v1/jobs/{id}/events?cursor=AAAA", "cursor"), ("/v1/jobs/{id}/checkpoints?cursor=AAAA", "cursor"),
    ],
)  # fmt: skip
def test_invalid_query_parameter_is_named(service, job, path, field):
    problem = check(service.http.get(path.replace("{id}", job["id"])), 422, "invalid_parameter")
    assert [error["path"] for error in problem["errors"]] == [field]


def test_cursor_is_valid_only_for_its_own_list_and_filter(service):
    """Used for another list or filter it would leave things out, or show them twice."""
    first, second = service.submit(), service.submit()
    of_jobs = service.http.get("/v1/jobs?limit=1").json()["next_cursor"]
    of_events = service.http.get(f"/v1/jobs/{first['id']}/events").json()["resume_cursor"]
    of_logs = service.http.get(f"/v1/jobs/{first['id']}/logs?rank=0").json()["resume_cursor"]
    for path in (
        f"/v1/jobs?state=QUEUED&cursor={of_jobs}",
        f"/v1/jobs?name=small&cursor={of_jobs}",
        f"/v1/jobs?cursor={of_events}",
        f"/v1/jobs/{second['id']}/events?cursor={of_events}",
        f"/v1/jobs/{first['id']}/checkpoints?cursor={of_events}",
        f"/v1/jobs/{first['id']}/recoveries?cursor={of_events}",
        f"/v1/jobs/{first['id']}/logs?cursor={of_logs}",
        f"/v1/jobs/{first['id']}/logs?rank=1&cursor={of_logs}",
        f"/v1/jobs/{second['id']}/logs?rank=0&cursor={of_logs}",
    ):
        problem = check(service.http.get(path), 422, "invalid_parameter")
        assert [error["path"] for error in problem["errors"]] == ["cursor"]
        assert "another filter" in problem["detail"]
    assert service.http.get(f"/v1/jobs?limit=5&cursor={of_jobs}").status_code == 200, "a page may have another size"


def test_a_bad_last_event_id_is_refused(service, job):
    for resource in ("events", "logs"):
        headers = {"Last-Event-ID": "x!", "Accept": "text/event-stream"}
        check(service.http.get(f"/v1/jobs/{job['id']}/{resource}", headers=headers), 422, "invalid_parameter")


def test_an_internal_error_is_logged_and_kept_from_the_client(service, caplog, monkeypatch):
    monkeypatch.setattr(service.control, "cluster", Mock(side_effect=RuntimeError("secret detail")))
    with caplog.at_level(logging.ERROR, logger="manta.api.problems"):
        response = service.http.get("/v1/cluster")
    check(response, 500, "internal_error")
    assert response.headers.get_list(HEADER) == [str(REST)]
    assert "secret" not in response.text
    assert any(record.exc_info and "secret detail" in str(record.exc_info[1]) for record in caplog.records)


@pytest.mark.parametrize("begun", [False, True])
def test_exception_after_the_start_of_an_answer_breaks_the_answer_off(begun):
    sent = []

    async def app(_scope, _receive, send):
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/v1/jobs"}
    with pytest.raises(RuntimeError) if begun else contextlib.nullcontext():
        asyncio.run(FailureResponses(app)(scope, None, send))
    assert [message["status"] for message in sent if "status" in message] == [200 if begun else 500]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (OperationalError, "nothing was changed by this request: try it again"),
        (InternalError, "nothing was changed by this request: try it again"),
        (OutcomeUnknown, "check whether this request has changed anything"),
    ],
)
def test_a_database_that_does_not_answer_is_a_503_that_says_when_to_try_again(
    service, document, monkeypatch, kind, said
):
    monkeypatch.setattr(
        service.control.store,
        "write_async",
        AsyncMock(side_effect=kind("BEGIN IMMEDIATE", {}, Exception("database is locked"))),
    )
    response = service.http.post("/v1/jobs", json=document)
    check(response, 503, "database_unavailable")
    assert response.headers["Retry-After"] == "5"
    assert response.json()["detail"].endswith(said)
    assert "BEGIN" not in response.text
    monkeypatch.undo()
    assert service.http.get("/v1/jobs").json()["items"] == []


@pytest.mark.parametrize("kind_of_database", ["sqlite"], indirect=True)
def test_missing_database_file_is_a_503_for_all_requests_until_it_is_back(service, document):
    file, job = service.control.store.database.file, service.http.post("/v1/jobs", json=document).json()["id"]
    file.rename(f"{file}.away")
    paths = ("/v1/jobs", f"/v1/jobs/{job}", "/v1/events", f"/v1/jobs/{job}/events", "/v1/projects", "/metrics")
    answers = [service.http.post(each, json=document) for each in ("/v1/jobs", f"/v1/jobs/{job}/cancel")]
    for response in (*answers, *map(service.http.get, paths)):
        check(response, 503, "database_unavailable")
        assert "log says what to do" in response.text and str(file.parent) not in response.text
    assert f"file {file} is gone" in service.http.get("/readyz").text
    Path(f"{file}.away").rename(file)
    assert [(each["id"], each["state"]) for each in service.http.get("/v1/jobs").json()["items"]] == [(job, "QUEUED")]


def test_retry_after_is_rounded_up_to_a_whole_second():
    assert problem_of(TooManyRequests("too many", 0.1)).headers["Retry-After"] == "1"
