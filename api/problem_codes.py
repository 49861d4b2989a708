"""Every code of a problem document: the one table that both the answers and their description are generated from, so
that they agree.

Routes declare the codes that they can answer with, `responses=reads("job_not_found")`; a test compares each answer with
that.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = "5"
"""Value of the Retry-After header of a 503."""


@dataclass(frozen=True)
class Kind:
    """Meaning of a code."""

    status: int
    """HTTP status that it comes with."""
    meaning: str
    """When it is used."""


KINDS: dict[str, Kind] = {
    "malformed_json": Kind(400, "the body is not JSON in UTF-8"),
    "http_error": Kind(400, "the request is not one that a server can read"),
    "other_release": Kind(400, "the client is of a release whose REST API this service does not support"),
    "unauthenticated": Kind(401, "there is no key with the request, or it is unknown, expired or revoked"),
    "forbidden": Kind(403, "the key does not allow this; `detail` names the scope that is needed"),
    "unknown_host": Kind(403, "the Host header names another site"),
    "cross_site": Kind(403, "a page of another site sent the request"),
    "faults_not_allowed": Kind(403, "the service was started without --allow-faults"),
    "not_found": Kind(404, "there is nothing at this path"),
    "job_not_found": Kind(404, "there is no such job"),
    "trace_not_found": Kind(404, "the job has no such trace, or nothing was recorded for it"),
    "project_not_found": Kind(404, "there is no such project"),
    "key_not_found": Kind(404, "there is no such key"),
    "link_not_good": Kind(404, "the link was used before, has expired or was never issued"),
    "checkpoint_not_found": Kind(404, "the job has no such checkpoint"),
    "export_not_found": Kind(404, "the job has no such export"),
    "rank_not_found": Kind(404, "the job has no such rank"),
    "node_not_found": Kind(404, "there is no such node, or several ids begin like that"),
    "method_not_allowed": Kind(405, "the path does not take this method"),
    "body_too_slow": Kind(408, "the body took too long to arrive"),
    "illegal_transition": Kind(409, "the job's state does not allow it"),
    "job_not_final": Kind(409, "the job is not over: cancel it first"),
    "job_being_deleted": Kind(409, "the job is being deleted"),
    "job_being_exported": Kind(409, "weights of the job are being exported"),
    "files_not_removed": Kind(409, "a file cannot be removed, so what it belongs to is still there"),
    "export_not_possible": Kind(409, "the checkpoint is not complete, or too many exports are being written already"),
    "checkpoint_needed": Kind(409, "the checkpoint is in use, or the job would resume from it"),
    "project_exists": Kind(409, "there is a project of this name already"),
    "idempotency_conflict": Kind(409, "the Idempotency-Key was used before with another body"),
    "no_ranks": Kind(409, "the job has no running ranks"),
    "fault_not_possible": Kind(409, "the fault could never happen"),
    "node_leaving": Kind(409, "the node's machine has announced that it is about to shut down"),
    "trace_not_possible": Kind(409, "the trace cannot be recorded"),
    "nothing_measured": Kind(409, "nothing has been measured yet of where the job's steps go"),
    "nothing_planned": Kind(409, "the job has no plan, or none that can be drawn; `detail` says why"),
    "not_understood": Kind(409, "another release stored the job's spec, and this one does not understand it"),
    "precondition_failed": Kind(412, "the job has changed since the version that If-Match names"),
    "body_too_large": Kind(413, "the body is longer than any request needs"),
    "unsupported_media_type": Kind(415, "the Content-Type of the body is not JSON"),
    "invalid_parameter": Kind(422, "a parameter or a field of the body breaks a rule; `errors` has each of them"),
    "invalid_spec": Kind(422, "the JobSpec breaks rules; `errors` has each of them"),
    "unsupported": Kind(422, "the JobSpec uses features that are not built yet; `errors` say what works"),
    "size_out_of_bounds": Kind(422, "the job cannot have this size"),
    "too_many_requests": Kind(429, "the caller sends more requests than it may at once or in a second"),
    "head_too_large": Kind(431, "the address and headers are longer, or more, than any request needs"),
    "internal_error": Kind(500, "an error of the service itself; its log says more"),
    "too_many_connections": Kind(503, "the service holds as many connections as it can"),
    "not_ready": Kind(503, "jobs cannot run right now; `errors` has the reasons"),
    "database_unavailable": Kind(503, "the job database does not answer"),
    "cluster_unavailable": Kind(503, "Ray does not answer"),
    "files_silent": Kind(503, "a file system that the JobSpec names does not answer"),
    "logs_unavailable": Kind(503, "the place where logs are kept does not answer"),
    "rank_silent": Kind(503, "the rank's agent does not answer, or no trainer runs there"),
    "node_unreachable": Kind(503, "the node does not answer"),
}
OF_A_JOB = ("job_not_found", "database_unavailable")
"""Codes of every route about one job."""
_ANY_REQUEST = (
    "other_release",
    "unknown_host",
    "body_too_slow",
    "body_too_large",
    "too_many_requests",
    "head_too_large",
    "internal_error",
    "too_many_connections",
)
_ANY_CALLER = (*_ANY_REQUEST, "unauthenticated", "forbidden", "database_unavailable")
_ANY_CHANGE = ("cross_site", "unsupported_media_type")
_RETRY_AFTER = {
    "Retry-After": {"description": "Seconds after which to try again", "schema": {"type": "integer", "minimum": 0}}
}
_CHALLENGE = {"WWW-Authenticate": {"description": "That a bearer key is asked for", "schema": {"type": "string"}}}
_HEADERS: dict[int, dict[str, Any]] = {401: _CHALLENGE, 429: _RETRY_AFTER, 503: _RETRY_AFTER}

Responses = dict[int | str, dict[str, Any]]
"""The type of FastAPI's `responses`."""


def reads(*codes: str) -> Responses:
    """The errors of a route that changes nothing: `codes`, and those that any request with a key may get."""
    return _described((*_ANY_CALLER, *codes))


def anonymous(*codes: str) -> Responses:
    """The errors of a route that needs no key: `codes`, and those that any request may get."""
    return _described((*_ANY_REQUEST, *codes))


def changes(*codes: str) -> Responses:
    """The errors of a route that changes something: `codes`, and those that any such request may get."""
    return _described((*_ANY_CALLER, *_ANY_CHANGE, *codes))


def _described(codes: tuple[str, ...]) -> Responses:
    by_status: dict[int, list[str]] = {}
    for code in dict.fromkeys(codes):
        by_status.setdefault(KINDS[code].status, []).append(code)
    return {status: _response(status, by_status[status]) for status in sorted(by_status)}


def _response(status: int, codes: list[str]) -> dict[str, Any]:
    meanings = "; ".join(f"`{code}`: {KINDS[code].meaning}" for code in codes)
    schema = {
        "allOf": [
            {"$ref": "#/components/schemas/Problem"},
            {"properties": {"code": {"enum": codes}, "status": {"const": status}}},
        ]
    }
    response: dict[str, Any] = {
        "description": f"{HTTPStatus(status).phrase}. {meanings}",
        "content": {MEDIA_TYPE: {"schema": schema}},
    }
    return {**response, "headers": _HEADERS[status]} if status in _HEADERS else response
