"""Every error as `application/problem+json` (RFC 9457), with a stable code."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manta.api.problem_codes import KINDS, MEDIA_TYPE, RETRY_SECONDS
from manta.api.schemas import FieldProblem, Problem
from manta.api.security.access import Forbidden, PriorityTooHigh, Unauthenticated
from manta.api.security.permissions import shown
from manta.api.security.rate_limits import TooManyRequests
from manta.api.threads import FilesTimeout
from manta.service.cluster.errors import ClusterUnavailable, NodeLeaving, NodeNotFound, NodeUnreachable
from manta.service.cluster.sizes import SizeOutOfBounds
from manta.service.control.faults import FaultNotPossible, FaultsNotAllowed
from manta.service.control.running_ranks import NoRanks, RankNotFound, RankTimeout
from manta.service.exports import ExportNotPossible, InvalidTarget
from manta.service.ids import KEY_ID_PATTERN, NODE_ID_PATTERN, TARGET_PATTERN
from manta.service.keys.identity import PROJECT_PATTERN
from manta.service.logs.pages import LogsUnavailable
from manta.service.planner.job_plan import NotPlanned
from manta.service.removal.deletion import (
    CheckpointNeeded,
    CheckpointNotRemoved,
    CheckpointStillRemoving,
    FilesNotRemoved,
    StillRemoving,
)
from manta.service.step_traces.reading import NothingMeasured
from manta.service.store import (
    CheckpointNotFound,
    DatabaseLost,
    ExportNotFound,
    IdempotencyConflict,
    IllegalTransition,
    InvalidCursor,
    JobBeingDeleted,
    JobBeingExported,
    JobChanged,
    JobNotFinal,
    JobNotFound,
    KeyNotFound,
    LinkInvalid,
    OutcomeUnknown,
    ProjectExists,
    ProjectNotFound,
    TooManyLabels,
    TraceNotFound,
    TraceNotPossible,
)
from manta.service.stored_specs import SpecNotUnderstood
from manta.workers.errors import MantaError
from manta.workers.spec.problems import SpecError, describe_rule

log = logging.getLogger(__name__)

_USUAL_HEADERS = {401: {"WWW-Authenticate": 'Bearer realm="manta"'}, 503: {"Retry-After": RETRY_SECONDS}}
_CODES = {404: "not_found", 405: "method_not_allowed"}


class MalformedJson(MantaError):
    """The body of a request is not JSON."""


class NotReady(MantaError):
    """The service cannot run jobs right now."""

    def __init__(self, reasons: Sequence[str]):
        self.reasons = reasons
        super().__init__("; ".join(reasons))


DATABASE_ERRORS = (OperationalError, InterfaceError, InternalError, NoConnectionLeft)
"""Errors of a database that does not answer."""

_OF_ERRORS: tuple[tuple[type[MantaError], str], ...] = (
    (JobNotFound, "job_not_found"),
    (IllegalTransition, "illegal_transition"),
    (JobNotFinal, "job_not_final"),
    (JobBeingDeleted, "job_being_deleted"),
    (JobBeingExported, "job_being_exported"),
    (JobChanged, "precondition_failed"),
    (FilesNotRemoved, "files_not_removed"),
    (StillRemoving, "files_not_removed"),
    (CheckpointNotFound, "checkpoint_not_found"),
    (ExportNotFound, "export_not_found"),
    (ExportNotPossible, "export_not_possible"),
    (CheckpointNeeded, "checkpoint_needed"),
    (CheckpointNotRemoved, "files_not_removed"),
    (CheckpointStillRemoving, "files_not_removed"),
    (IdempotencyConflict, "idempotency_conflict"),
    (FaultsNotAllowed, "faults_not_allowed"),
    (FaultNotPossible, "fault_not_possible"),
    (NoRanks, "no_ranks"),
    (RankNotFound, "rank_not_found"),
    (RankTimeout, "rank_silent"),
    (TraceNotFound, "trace_not_found"),
    (TraceNotPossible, "trace_not_possible"),
    (NothingMeasured, "nothing_measured"),
    (NotPlanned, "nothing_planned"),
    (NodeNotFound, "node_not_found"),
    (NodeLeaving, "node_leaving"),
    (NodeUnreachable, "node_unreachable"),
    (ClusterUnavailable, "cluster_unavailable"),
    (FilesTimeout, "files_silent"),
    (LogsUnavailable, "logs_unavailable"),
    (MalformedJson, "malformed_json"),
    (SizeOutOfBounds, "size_out_of_bounds"),
    (SpecNotUnderstood, "not_understood"),
    (Unauthenticated, "unauthenticated"),
    (Forbidden, "forbidden"),
    (ProjectNotFound, "project_not_found"),
    (ProjectExists, "project_exists"),
    (KeyNotFound, "key_not_found"),
    (LinkInvalid, "link_not_good"),
)
"""Errors whose message is complete, and the code that each is answered with."""


def problem(
    code: str,
    detail: str,
    errors: Sequence[FieldProblem] = (),
    headers: dict[str, str] | None = None,
    status: int | None = None,
) -> Response:
    """A problem document as a response. `status`: if it differs from that of the code."""
    status = status or KINDS[code].status
    document = Problem(
        code=code, title=HTTPStatus(status).phrase, status=status, detail=detail, errors=list(errors)
    ).model_dump_json()
    usual = _USUAL_HEADERS.get(status, {})
    return Response(document, status, media_type=MEDIA_TYPE, headers={**usual, **(headers or {})})


def install(app: FastAPI) -> None:
    """Make `app` answer every error with a problem document."""
    for kind, code in _OF_ERRORS:
        app.add_exception_handler(kind, _answer(code))
    app.add_exception_handler(TooManyRequests, _too_many_requests)
    for away in DATABASE_ERRORS:
        app.add_exception_handler(away, _database_unavailable)
    app.add_exception_handler(SpecError, _spec_error)
    app.add_exception_handler(InvalidCursor, _invalid_field("cursor"))
    app.add_exception_handler(TooManyLabels, _invalid_field("labels"))
    app.add_exception_handler(InvalidTarget, _invalid_field("to"))
    app.add_exception_handler(PriorityTooHigh, _invalid_field("priority"))
    app.add_exception_handler(NotReady, _not_ready)
    app.add_exception_handler(RequestValidationError, _invalid_parameter)
    app.add_exception_handler(HTTPException, _http_error)


def _answer(code: str) -> Callable[[Request, Exception], Awaitable[Response]]:
    """A handler that answers with the exception's message."""

    async def handler(_request: Request, error: Exception) -> Response:
        return problem(code, str(error))

    return handler


async def _database_unavailable(request: Request, error: Exception) -> Response:
    cause = getattr(error, "orig", None) or error  # without the values in the statement
    log.warning("%s %s: the database does not answer (%s)", request.method, shown(request.url.path), cause)
    return database_unavailable(error)


def database_unavailable(error: Exception) -> Response:
    """The answer while the database is away; `error` says why."""
    detail = "the job database does not answer; jobs run on, and nothing was changed by this request: try it again"
    if isinstance(error, OutcomeUnknown):
        detail = "the job database went away in the middle; jobs run on; see whether this request has changed anything"
    elif isinstance(error, DatabaseLost):
        detail = (
            "the file of the job database is gone, or is not the one that the service has opened, whose log says what "
            "to do; jobs run on, and nothing was changed by this request"
        )
    return problem("database_unavailable", detail)


async def _too_many_requests(_request: Request, error: Exception) -> Response:
    assert isinstance(error, TooManyRequests)
    return too_many(error)


def too_many(error: TooManyRequests) -> Response:
    """The answer to one request too many."""
    return problem("too_many_requests", str(error), headers={"Retry-After": str(math.ceil(error.retry_seconds))})


async def _spec_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, SpecError)
    code = "unsupported" if all(entry.unsupported for entry in error.problems) else "invalid_spec"
    errors = [FieldProblem(path=entry.path, rule=entry.rule, suggestion=entry.suggestion) for entry in error.problems]
    return problem(code, str(error), errors)


def _invalid_field(path: str) -> Callable[[Request, Exception], Awaitable[Response]]:
    """A handler for a problem with the field at `path`."""

    async def handler(_request: Request, error: Exception) -> Response:
        return problem("invalid_parameter", str(error), [FieldProblem(path=path, rule=str(error))])

    return handler


async def _not_ready(_request: Request, error: Exception) -> Response:
    assert isinstance(error, NotReady)
    errors = [FieldProblem(path="", rule=reason) for reason in error.reasons]
    return problem("not_ready", str(error), errors)


async def _invalid_parameter(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = [
        FieldProblem(path=".".join(str(part) for part in entry["loc"][1:] if part != "[key]"), rule=_rule(entry))
        for entry in error.errors()
    ]
    detail = "; ".join(f"{entry.path}: {entry.rule}" for entry in errors)
    return problem("invalid_parameter", detail, errors)


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
        404: f"there is nothing at {request.url.path}; /openapi.json lists what there is",
        405: f"{request.url.path} does not take {request.method}",
    }
    code = _CODES.get(error.status_code, "http_error")
    detail = details.get(error.status_code, str(error.detail))
    return problem(code, detail, headers=dict(error.headers or {}), status=error.status_code)


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
            answer = problem("internal_error", "something went wrong inside the service; its log says what")
            await answer(scope, receive, send)
