"""Requests drawn from the API's own description, right ones and wrong ones, drawn and judged by schemathesis.

To be imported where requests are drawn: schemathesis takes a second to import, and each process collects all tests.
"""

from urllib.parse import urlencode

import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation.modes import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.api.support.described_api import description_at

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
STATES = {
    "cancel_job": ("STARTING", "RUNNING"),
    "resize_job": ("STARTING", "RUNNING"),
    "pause_job": ("STARTING", "RUNNING"),
    "resume_job": ("PAUSED",),
    "inject_fault": ("STARTING", "RUNNING"),
    "retry_job": ("STARTING", "FAILED"),
}
FINAL = ("CANCELLED",)
"""Of the job that is asked for otherwise: nothing waits for what it will do, and its streams end."""


def requests_of(operation, job_id):
    """Right and wrong requests for a job that is there, and right ones for others."""
    known = {"job_id": job_id} if "{job_id}" in operation.path else None
    right = operation.as_strategy(GenerationMode.POSITIVE, path_parameters=known)
    strategies = [right]
    if known is not None:
        strategies.append(operation.as_strategy(GenerationMode.POSITIVE))
    document = operation.definition.raw
    if "requestBody" in document or any(each["name"] != "job_id" for each in document.get("parameters", ())):
        strategies.append(operation.as_strategy(GenerationMode.NEGATIVE, path_parameters=known))
    return st.one_of(strategies)


def sendable(case):
    """What comes to the service, since no address or header is longer than the HTTP server takes, and is answered to an
    end: a stream of the events of all jobs is not."""
    assume(len(urlencode(case.query or {}, doseq=True)) + len(str(case.headers)) < 60_000)
    if case.operation.path == "/v1/events":
        case.query = {name: value for name, value in (case.query or {}).items() if name != "follow"}
        case.headers.pop("Accept", None)
    return case


def ask(service, operation_id, examples, **options):
    """Ask for one operation, `examples` times."""
    service.control.allow_faults = True
    job_id = service.submit()["id"]
    service.move(job_id, *STATES.get(operation_id, FINAL))
    schema = schemathesis.openapi.from_dict(description_at(service.url).document)
    operation = schema.find_operation_by_id(operation_id)

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck), **options)
    @given(requests_of(operation, job_id).map(sendable))
    def judged(case):
        response = case.call(base_url=service.url, timeout=20)
        case.validate_response(response, checks=CHECKS)

    judged()
