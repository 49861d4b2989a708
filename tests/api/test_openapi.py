"""The API says of itself what it does: names of operations, errors with their codes, what is inside of streams.

That every answer is as described is checked wherever a test asks for something; see `support/described_api.py`.
"""

import json
from collections.abc import Iterator

import jsonschema
import pytest

from manta.api import problems
from manta.api.app import create_app
from manta.api.client.retries import EventParser
from manta.api.problems import MEDIA_TYPE
from manta.service.errors import ErrorKind, ServiceError
from manta.service.logs.pages import log_file, log_folder
from tests.api.support.described_api import PROBLEM, DescribedApi

OPERATIONS = [
    "list_jobs", "submit_job", "count_jobs", "list_sparklines", "get_job",
    "edit_job", "delete_job", "get_job_spec", "cancel_job", "pause_job", "resume_job",
    "retry_job", "resize_job", "get_metrics", "list_job_events", "list_events", "list_logs", "list_ranks",
    "get_rank_history", "get_expert_tokens", "get_waits", "get_rank_stack",
    "list_checkpoints", "delete_checkpoint",
    "export_checkpoint", "list_exports", "get_export", "get_ledger", "get_job_plan",
    "get_job_plan_picture", "list_recoveries",
    "request_trace", "list_traces", "get_trace", "get_trace_for_perfetto", "get_profile", "get_budget", "inject_fault",
    "get_cluster", "check_cluster", "drain_node", "undrain_node", "make_plans", "list_machines",
    "create_project", "list_projects", "create_key", "list_keys", "revoke_key", "list_audit", "create_link",
    "open_link", "get_me", "end_session", "get_health", "get_readiness", "get_prometheus_metrics",
]  # fmt: skip


@pytest.fixture(scope="module")
def api():
    return DescribedApi(create_app(control=type("NoControl", (), {"store": None})()).openapi())


def test_openapi_operation_ids_are_the_listed_ones(api):
    assert [operation.id for operation in api.operations] == OPERATIONS


def test_openapi_errors_are_problem_documents_with_their_codes(api):
    for operation in api.operations:
        for status, response in operation.document["responses"].items():
            if int(status) >= 400:
                assert list(response["content"]) == [MEDIA_TYPE] == [PROBLEM], operation.id
        for status, codes in operation.errors.items():
            assert codes, f"{operation.id} {status}"
            headers = operation.document["responses"][str(status)].get("headers", {})
            assert ("Retry-After" in headers) == (status in (429, 503))
            assert ("WWW-Authenticate" in headers) == (status == 401)


def kinds_of(error: type[ServiceError]) -> Iterator[ErrorKind]:
    """Each kind once, however many classes share it."""
    if "kind" in vars(error):
        yield error.kind
    for subclass in error.__subclasses__():
        assert hasattr(subclass, "kind"), subclass
        yield from kinds_of(subclass)


def test_every_code_belongs_to_one_kind_of_error():
    of_classes, others = (
        [*kinds_of(ServiceError)],
        [each for each in vars(problems).values() if isinstance(each, ErrorKind)],
    )
    codes = [kind.code for kind in (*of_classes, *others)]
    assert len(codes) > 50 and len(codes) == len(set(codes))


def test_openapi_describes_refusals_that_happen_before_routing(api):
    for operation in api.operations:
        changes = operation.method != "GET"
        assert "unknown_host" in operation.codes(403)
        assert "other_release" in operation.codes(400)
        assert ("cross_site" in operation.codes(403)) == (changes or operation.id == "open_link")
        assert operation.codes(413) == ["body_too_large"]
        assert operation.codes(415) == (["unsupported_media_type"] if changes else [])


def test_openapi_lists_exactly_the_errors_of_each_operation(api):
    errors = {operation.id: operation.errors for operation in api.operations}
    assert errors["get_health"] == {
        400: ["other_release"], 403: ["unknown_host"], 408: ["body_too_slow"], 413: ["body_too_large"],
        429: ["too_many_requests"], 431: ["head_too_large"], 500: ["internal_error"], 503: ["too_many_connections"],
    }  # fmt: skip
    assert errors["list_jobs"][401] == ["unauthenticated"]
    assert errors["get_job"][404] == ["job_not_found"]
    assert errors["submit_job"][422] == ["invalid_parameter", "invalid_spec", "unsupported"]
    assert errors["list_ranks"][422] == ["invalid_parameter"], "of one that it does not have"
    assert 404 not in errors["list_jobs"]
    assert errors["inject_fault"][403] == ["unknown_host", "forbidden", "cross_site", "faults_not_allowed"]
    assert errors["drain_node"][503] == [
        "too_many_connections", "database_unavailable", "node_unreachable", "cluster_unavailable",
    ]  # fmt: skip
    assert errors["undrain_node"][409] == ["node_leaving"]


def test_openapi_describes_bodies_that_routes_parse_themselves(api):
    bodies = {
        operation.id: operation.document["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
        for operation in api.operations
        if "requestBody" in operation.document
    }
    assert bodies == {
        "submit_job": "JobSpec", "edit_job": "JobChanges", "resize_job": "Resize",
        "export_checkpoint": "ExportRequest", "request_trace": "TraceRequest", "inject_fault": "FaultRequest",
        "drain_node": "DrainRequest", "make_plans": "PlanDocument", "create_project": "NewProject",
        "create_key": "NewKey",
    }  # fmt: skip


def test_openapi_references_resolve_and_default_validation_errors_are_absent(api):
    names = set(api.document["components"]["schemas"])
    references = {part.split('"')[0] for part in json.dumps(api.document).split('"#/components/schemas/')[1:]}
    assert references <= names
    assert not names & {"HTTPValidationError", "ValidationError"}


def parts_of(document) -> Iterator[dict]:
    """The document and all objects in it."""
    if isinstance(document, dict):
        yield document
    for each in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        yield from parts_of(each)


def test_openapi_has_nothing_that_generators_of_clients_leave_out(api):
    """That is openapi-python-client, of which 0.29 was tried."""
    for part in parts_of(api.document):
        assert not isinstance(part.get("default"), dict) and "allOf" not in part
    for operation in api.operations:
        for response in operation.document["responses"].values():
            schema = response.get("content", {}).get(PROBLEM, {}).get("schema")
            assert schema is None or schema["$ref"].endswith("/Problem")
    models = api.document["components"]["schemas"]
    for name, model in models.items():
        for field in model.get("properties", {}).values():
            assert f"{name}{field.get('title', '')}" not in models or "title" not in field, "two classes of one name"


@pytest.mark.parametrize("resource", ["events", "logs"])
def test_openapi_describes_stream_events_as_they_are_sent(service, job, api, resource):
    service.move(job["id"], "CANCELLED")
    folder = log_folder(service.control.home, job["id"])
    folder.mkdir(parents=True)
    log_file(folder, 0).write_text('{"time": 1, "rank": 0, "generation": 1, "text": "hello"}\n')
    text = service.http.get(f"/v1/jobs/{job['id']}/{resource}?follow=true").text
    parser = EventParser()
    events = [event for event in map(parser.feed, text.splitlines()) if event is not None]
    assert len(events) >= 2
    schema = api.stream_schema(f"/v1/jobs/{{job_id}}/{resource}")
    for event in events:
        api.validate({"event": event.event, "data": event.data, **({"id": event.id} if event.id else {})}, schema)
        (shape,) = [each for each in schema["anyOf"] if each["properties"]["event"]["const"] == event.event]
        api.validate(json.loads(event.data), shape["properties"]["data"]["contentSchema"])
    assert events[-1].event == "end"


def test_openapi_validation_rejects_a_wrong_answer(api):
    with pytest.raises(jsonschema.ValidationError):
        api.validate({"status": 5}, {"$ref": "#/components/schemas/Health"})


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b'{"data": NaN}', b'{"a": Infinity}', b'{"\\ud800": 1}', b"[" * 100_000, b"1" * 5000],
)
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs/{id}/resize", "/v1/jobs/{id}/faults", "/v1/nodes/abcd/drain"])
def test_malformed_json_body_is_refused_by_every_operation(service, path, body):
    path = path.replace("{id}", service.submit()["id"])
    response = service.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["code"]) == (400, "malformed_json")
