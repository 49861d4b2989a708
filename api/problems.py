"""Every error as `application/problem+json` (RFC 9457), with a stable code."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft
from starlette.exceptions import HTTPException

from api.schemas import FieldProblem, Problem
from service.cluster.errors import ClusterUnavailable, NodeNotFound, NodeUnreachable
from service.cluster.sizes import SizeOutOfBounds
from service.faults import FaultNotPossible, FaultsNotAllowed
from service.store import IdempotencyConflict, IllegalTransition, InvalidCursor, JobNotFound
from workers.errors import MantaError
from workers.spec.problems import SpecError

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = "5"
"""What a 503 says about when to try again."""
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


class MalformedJson(MantaError):
    """The body of a request is not JSON."""


class NotReady(MantaError):
    """The service cannot run jobs right now."""

    def __init__(self, reasons: Sequence[str]):
        self.reasons = reasons
        super().__init__("; ".join(reasons))


def problem(
    status: int, code: str, detail: str, errors: Sequence[FieldProblem] = (), headers: dict[str, str] | None = None
) -> Response:
    """A problem document as a response."""
    document = Problem(
        code=code, title=HTTPStatus(status).phrase, status=status, detail=detail, errors=list(errors)
    ).model_dump_json()
    return Response(document, status, media_type=MEDIA_TYPE, headers=headers)


def install(app: FastAPI) -> None:
    """Make `app` answer every error with a problem document."""
    known = ((JobNotFound, 404, "job_not_found"), (IllegalTransition, 409, "illegal_transition"),
             (IdempotencyConflict, 409, "idempotency_conflict"),
             (FaultsNotAllowed, 403, "faults_not_allowed"), (FaultNotPossible, 409, "fault_not_possible"),
             (NodeNotFound, 404, "node_not_found"), (NodeUnreachable, 503, "node_unreachable"),
             (ClusterUnavailable, 503, "cluster_unavailable"),
             (MalformedJson, 400, "malformed_json"),
             (SizeOutOfBounds, 422, "size_out_of_bounds"))  # fmt: skip
    for kind, status, code in known:
        app.add_exception_handler(kind, _answer(status, code))
    for away in (OperationalError, InterfaceError, NoConnectionLeft):
        app.add_exception_handler(away, _database_unavailable)
    app.add_exception_handler(SpecError, _spec_error)
    app.add_exception_handler(InvalidCursor, _invalid_cursor)
    app.add_exception_handler(NotReady, _not_ready)
    app.add_exception_handler(RequestValidationError, _invalid_parameter)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)


def _answer(status: int, code: str) -> Callable[[Request, Exception], Awaitable[Response]]:
    """A handler that says what the exception says."""

    headers = {"Retry-After": RETRY_SECONDS} if status == 503 else None

    async def handler(_request: Request, error: Exception) -> Response:
        return problem(status, code, str(error), headers=headers)

    return handler


async def _database_unavailable(request: Request, error: Exception) -> Response:
    log.warning("%s %s: the database does not answer (%s)", request.method, request.url.path, error)
    detail = "the job database does not answer; jobs run on, and nothing was changed by this request: try it again"
    return problem(503, "database_unavailable", detail, headers={"Retry-After": RETRY_SECONDS})


async def _spec_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, SpecError)
    code = "unsupported" if all(entry.unsupported for entry in error.problems) else "invalid_spec"
    errors = [FieldProblem(path=entry.path, rule=entry.rule, suggestion=entry.suggestion) for entry in error.problems]
    return problem(422, code, str(error), errors)


async def _invalid_cursor(_request: Request, error: Exception) -> Response:
    return problem(422, "invalid_parameter", str(error), [FieldProblem(path="cursor", rule=str(error))])


async def _not_ready(_request: Request, error: Exception) -> Response:
    assert isinstance(error, NotReady)
    errors = [FieldProblem(path="", rule=reason) for reason in error.reasons]
    return problem(503, "not_ready", str(error), errors, {"Retry-After": RETRY_SECONDS})


async def _invalid_parameter(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = [
        FieldProblem(path=".".join(str(part) for part in entry["loc"][1:]), rule=entry["msg"])
        for entry in error.errors()
    ]
    detail = "; ".join(f"{entry.path}: {entry.rule}" for entry in errors)
    return problem(422, "invalid_parameter", detail, errors)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    details = {
        404: f"there is nothing at {request.url.path}; /openapi.json lists what there is",
        405: f"{request.url.path} does not take {request.method}",
    }
    code = _CODES.get(error.status_code, "http_error")
    detail = details.get(error.status_code, str(error.detail))
    return problem(error.status_code, code, detail, headers=dict(error.headers or {}))


async def _internal_error(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem(500, "internal_error", "something went wrong inside the service; its log says what")
