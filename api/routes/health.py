"""Liveness and readiness of the service, and its metrics for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from sqlalchemy.exc import SQLAlchemyError

from manta.api import schemas
from manta.api.app_state import state_of
from manta.api.metrics.jobs import JobCollector
from manta.api.parameters import Control
from manta.api.problems import DATABASE_UNAVAILABLE, NotReady, anonymous, reads
from manta.api.security.access import Caller, request_of_caller
from manta.api.security.permissions import DESCRIPTION
from manta.service.control.control_plane import ControlPlane

router = APIRouter(tags=["health"])


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", responses=anonymous())
async def get_health() -> schemas.Health:
    """The process is alive."""
    return schemas.Health(status="ok")


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", responses=anonymous(NotReady, DATABASE_UNAVAILABLE))
def get_readiness(request: Request, control: Control) -> schemas.Health:
    """Whether database and cluster can be reached; otherwise 503, with the reasons if the request has a key."""
    reasons = _reasons(control)
    if reasons and request_of_caller(request).identity is None:
        raise NotReady(["the service cannot run jobs; ask again with a key to learn why"])
    if reasons:
        raise NotReady(reasons)
    return schemas.Health(status="ready")


def _reasons(control: ControlPlane) -> list[str]:
    try:
        control.store.ping()
    except SQLAlchemyError as error:
        return [f"the database does not answer: {' '.join(str(getattr(error, 'orig', None) or error).split())}"]
    return control.ready()


@router.get("/openapi.json", include_in_schema=False, name=DESCRIPTION)
async def get_description(request: Request) -> JSONResponse:
    """The API's own description."""
    return JSONResponse(request.app.openapi())


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **reads(DATABASE_UNAVAILABLE)},
)
def get_prometheus_metrics(request: Request, control: Control, caller: Caller) -> Response:
    """Metrics of the caller's jobs in Prometheus' text format; with a key for all projects also those of the
    service."""
    of_jobs = CollectorRegistry(auto_describe=False)
    of_jobs.register(JobCollector(control.store, caller.bound))
    text = generate_latest(of_jobs)
    if caller.installation:
        text += generate_latest(state_of(request.app).registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
