"""Every error as `application/problem+json` (RFC 9457), with a stable code: the answers, and their description.

Routes declare the errors that they can answer with, `responses=reads(JobNotFound)`; a test compares each answer with
that.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manta.api.schemas import FieldProblem, Problem
from manta.api.security.access import Forbidden, Unauthenticated
from manta.api.security.permissions import shown
from manta.api.security.rate_limits import TooManyRequests
from manta.service.errors import ErrorKind, InvalidParameter, ServiceError
from manta.service.identity import PROJECT_PATTERN
from manta.service.ids import KEY_ID_PATTERN, NODE_ID_PATTERN, TARGET_PATTERN
from manta.service.store.errors import DatabaseLost, JobNotFound, OutcomeUnknown
from manta.workers.spec.problems import SpecError, describe_rule

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
_RETRY_SECONDS = "5"
"""Value of the Retry-After header of a 503."""
_USUAL_HEADERS = {401: {"WWW-Authenticate": 'Bearer realm="manta"'}, 503: {"Retry-After": _RETRY_SECONDS}}
DATABASE_ERRORS = (OperationalError, InterfaceError, InternalError, NoConnectionLeft)
"""Errors of a database that does not answer."""

HTTP_ERROR = ErrorKind("http_error", 400, "the request is not one that a server can read")
OTHER_RELEASE = ErrorKind(
    "other_release", 400, "the client is of a release whose REST API this service does not support"
)
UNKNOWN_HOST = ErrorKind("unknown_host", 403, "the Host header names another site")
CROSS_SITE = ErrorKind("cross_site", 403, "a page of another site sent the request")
NOT_FOUND = ErrorKind("not_found", 404, "there is nothing at this path")
METHOD_NOT_ALLOWED = ErrorKind("method_not_allowed", 405, "the path does not support this method")
BODY_TOO_SLOW = ErrorKind("body_too_slow", 408, "the body took too long to arrive")
BODY_TOO_LARGE = ErrorKind("body_too_large", 413, "the body is longer than any request needs")
UNSUPPORTED_MEDIA_TYPE = ErrorKind("unsupported_media_type", 415, "the Content-Type of the body is not JSON")
INVALID_SPEC = ErrorKind("invalid_spec", 422, "the JobSpec breaks rules; `errors` has each of them")
UNSUPPORTED = ErrorKind("unsupported", 422, "the JobSpec uses features that are not built yet; `errors` say what works")
HEAD_TOO_LARGE = ErrorKind("head_too_large", 431, "the address and headers are longer, or more, than any request needs")
INTERNAL_ERROR = ErrorKind("internal_error", 500, "an error of the service itself; its log says more")
TOO_MANY_CONNECTIONS = ErrorKind("too_many_connections", 503, "the service holds as many connections as it can")
DATABASE_UNAVAILABLE = ErrorKind("database_unavailable", 503, "the job database does not answer")

Answerable = ErrorKind | type[ServiceError]
"""What a route can answer with."""
Responses = dict[int | str, dict[str, Any]]
"""The type of FastAPI's `responses`."""


class MalformedJson(ServiceError):
    """The body of a request is not JSON."""

    kind = ErrorKind("malformed_json", 400, "the body is not JSON in UTF-8")


class NotReady(ServiceError):
    """The service cannot run jobs right now."""

    kind = ErrorKind("not_ready", 503, "jobs cannot run right now; `errors` has the reasons")

    def __init__(self, reasons: Sequence[str]):
        self.reasons = reasons
        super().__init__("; ".join(reasons))

    @property
    def rules(self) -> Sequence[tuple[str, str]]:
        """The reasons, which concern no field."""
        return [("", reason) for reason in self.reasons]


OF_A_JOB: tuple[Answerable, ...] = (JobNotFound, DATABASE_UNAVAILABLE)
"""The errors of every route about one job."""
_ANY_REQUEST: tuple[Answerable, ...] = (
    OTHER_RELEASE,
    UNKNOWN_HOST,
    BODY_TOO_SLOW,
    BODY_TOO_LARGE,
    TooManyRequests,
    HEAD_TOO_LARGE,
    INTERNAL_ERROR,
    TOO_MANY_CONNECTIONS,
)
_ANY_CALLER = (*_ANY_REQUEST, Unauthenticated, Forbidden, InvalidParameter, DATABASE_UNAVAILABLE)
_ANY_CHANGE = (CROSS_SITE, UNSUPPORTED_MEDIA_TYPE)
_RETRY_AFTER = {
    "Retry-After": {"description": "Seconds after which to try again", "schema": {"type": "integer", "minimum": 0}}
}
_CHALLENGE = {"WWW-Authenticate": {"description": "That a bearer key is asked for", "schema": {"type": "string"}}}
_HEADERS: dict[int, dict[str, Any]] = {401: _CHALLENGE, 429: _RETRY_AFTER, 503: _RETRY_AFTER}


def reads(*errors: Answerable) -> Responses:
    """The errors of a route that changes nothing: `errors`, and those that any request with a key may get."""
    return _described((*_ANY_CALLER, *errors))


def anonymous(*errors: Answerable) -> Responses:
    """The errors of a route that needs no key: `errors`, and those that any request may get."""
    return _described((*_ANY_REQUEST, *errors))


def changes(*errors: Answerable) -> Responses:
    """The errors of a route that changes something: `errors`, and those that any such request may get."""
    return _described((*_ANY_CALLER, *_ANY_CHANGE, *errors))


def _described(errors: Sequence[Answerable]) -> Responses:
    by_status: dict[int, list[ErrorKind]] = {}
    for kind in dict.fromkeys(error if isinstance(error, ErrorKind) else error.kind for error in errors):
        by_status.setdefault(kind.status, []).append(kind)
    return {status: _response(status, by_status[status]) for status in sorted(by_status)}


def _response(status: int, kinds: Sequence[ErrorKind]) -> dict[str, Any]:
    meanings = "; ".join(f"`{kind.code}`: {kind.meaning}" for kind in kinds)
    schema = {  # generators of clients, which merge no `allOf` of a type and a constant, see a Problem
        "$ref": "#/components/schemas/Problem",
        "properties": {"code": {"enum": [kind.code for kind in kinds]}, "status": {"const": status}},
    }
    response: dict[str, Any] = {
        "description": f"{HTTPStatus(status).phrase}. {meanings}",
        "content": {MEDIA_TYPE: {"schema": schema}},
    }
    return {**response, "headers": _HEADERS[status]} if status in _HEADERS else response


def problem(
    kind: ErrorKind,
    detail: str,
    errors: Sequence[FieldProblem] = (),
    headers: dict[str, str] | None = None,
    status: int | None = None,
) -> Response:
    """A problem document as a response. `status`: if it differs from that of the kind."""
    status = status or kind.status
    document = Problem(
        code=kind.code, title=HTTPStatus(status).phrase, status=status, detail=detail, errors=list(errors)
    ).model_dump_json()
    usual = _USUAL_HEADERS.get(status, {})
    return Response(document, status, media_type=MEDIA_TYPE, headers={**usual, **(headers or {})})


def problem_of(error: ServiceError) -> Response:
    """The answer to a request that ends with `error`."""
    errors = [FieldProblem(path=path, rule=rule) for path, rule in error.rules]
    seconds = error.retry_seconds
    return problem(error.kind, str(error), errors, {} if seconds is None else {"Retry-After": str(math.ceil(seconds))})


def install(app: FastAPI) -> None:
    """Make `app` answer every error with a problem document."""
    app.add_exception_handler(ServiceError, _service_error)
    for away in DATABASE_ERRORS:
        app.add_exception_handler(away, _database_unavailable)
    app.add_exception_handler(SpecError, _spec_error)
    app.add_exception_handler(RequestValidationError, _invalid_parameter)
    app.add_exception_handler(HTTPException, _http_error)


async def _service_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return problem_of(error)


async def _database_unavailable(request: Request, error: Exception) -> Response:
    cause = getattr(error, "orig", None) or error  # without the values in the statement
    log.warning("%s %s: the database does not answer (%s)", request.method, shown(request.url.path), cause)
    return database_unavailable(error)


def database_unavailable(error: Exception) -> Response:
    """The answer while the database is away; `error` says why."""
    detail = (
        "the job database does not answer; jobs keep running, and nothing was changed by this request: try it again"
    )
    if isinstance(error, OutcomeUnknown):
        detail = (
            "the job database became unreachable during the request; jobs keep running; check whether this request has "
            "changed anything"
        )
    elif isinstance(error, DatabaseLost):
        detail = (
            "the file of the job database is gone, or is not the one that the service has opened, whose log says what "
            "to do; jobs keep running, and nothing was changed by this request"
        )
    return problem(DATABASE_UNAVAILABLE, detail)


async def _spec_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, SpecError)
    kind = UNSUPPORTED if all(entry.unsupported for entry in error.problems) else INVALID_SPEC
    errors = [FieldProblem(path=entry.path, rule=entry.rule, suggestion=entry.suggestion) for entry in error.problems]
    return problem(kind, str(error), errors)


async def _invalid_parameter(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = [
        FieldProblem(path=".".join(str(part) for part in entry["loc"][1:] if part != "[key]"), rule=_rule(entry))
        for entry in error.errors()
    ]
    detail = "; ".join(f"{entry.path}: {entry.rule}" for entry in errors)
    return problem(InvalidParameter.kind, detail, errors)


_PATTERNS = {
    NODE_ID_PATTERN: "must be a node's id, or at least the first 4 characters of it; `manta nodes` lists the nodes",
    f"^{KEY_ID_PATTERN}$": "must be the id of a key; `manta keys list` lists the keys",
    TARGET_PATTERN: "must be the id of a job, key or node, or the name of a project",
    f"^{PROJECT_PATTERN}$": "must be lower-case letters, digits and '-', and neither begin nor end with '-'",
}


def _rule(entry: Any) -> str:
    """The rule that a parameter violates, in words."""
    pattern = entry.get("ctx", {}).get("pattern")
    return _PATTERNS.get(pattern) or describe_rule(entry)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    details = {
        404: f"there is nothing at {request.url.path}; /openapi.json lists all paths",
        405: f"{request.url.path} does not support {request.method}",
    }
    kind = {404: NOT_FOUND, 405: METHOD_NOT_ALLOWED}.get(error.status_code, HTTP_ERROR)
    detail = details.get(error.status_code, str(error.detail))
    return problem(kind, detail, headers=dict(error.headers or {}), status=error.status_code)


class FailureResponses:
    """ASGI middleware that answers unexpected errors. Starlette's own does so too, but raises the error again: the
    server then closes the connection, on which a client may have sent its next request."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass. Raises errors that occur after the beginning of an answer, which cannot be taken
        back."""
        begun = False

        async def note(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception as error:
            if scope["type"] != "http" or begun:
                raise
            log.error("%s %s failed", scope["method"], shown(scope["path"]), exc_info=error)
            answer = problem(INTERNAL_ERROR, "something went wrong inside the service; its log says what")
            await answer(scope, receive, send)
