"""Whether the service lives, whether it can work, and its numbers for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy.exc import SQLAlchemyError

from api import schemas
from api.parameters import Control
from api.problem_codes import reads
from api.problems import NotReady

router = APIRouter(tags=["health"])


@router.get("/healthz", responses=reads())
async def get_health() -> schemas.Health:
    """The process is alive."""
    return schemas.Health(status="ok")


@router.get("/readyz", responses=reads("not_ready"))
def get_readiness(control: Control) -> schemas.Health:
    """Database and cluster can be reached; else 503 with the reasons."""
    try:
        control.store.ping()
    except SQLAlchemyError as error:
        raise NotReady([f"the database does not answer: {' '.join(str(error).split())}"]) from error
    reasons = control.ready()
    if reasons:
        raise NotReady(reasons)
    return schemas.Health(status="ready")


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **reads("database_unavailable")},
)
def get_prometheus_metrics(request: Request) -> Response:
    """Numbers in Prometheus' text format."""
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)
