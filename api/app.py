"""Puts the REST API together."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from prometheus_client import CollectorRegistry

from api import problems, schemas
from api.control import ControlPlane
from api.request_guard import RequestGuard
from api.routes import (
    checkpoints,
    cluster,
    events,
    faults,
    health,
    jobs,
    ledger,
    logs,
    metrics,
    nodes,
    ranks,
    recoveries,
)
from api.telemetry import JobCollector, RequestTimer
from workers.config import JobSpec

_RESOURCES = (jobs, metrics, events, logs, ranks, checkpoints, ledger, recoveries, faults, cluster, nodes, health)


def create_app(control: ControlPlane, allowed_hosts: Collection[str] = ()) -> FastAPI:
    """The API on top of `control`. Each app has its own Prometheus registry, so that several can live in a process.

    `allowed_hosts`: names of the service beside this machine's own, such as a proxy's."""
    app = FastAPI(
        title="Manta",
        description="Elastic 3D-parallel training on Ray",
        version="1",
        docs_url=None,  # the interactive pages would fetch their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # one address a resource; anything else is a problem document
        responses={"default": {"model": schemas.Problem, "description": "Problem (RFC 9457)"}},
    )
    registry = CollectorRegistry()
    registry.register(JobCollector(control.store))
    app.state.control = control
    app.state.registry = registry
    app.add_middleware(RequestGuard, allowed_hosts=allowed_hosts)
    app.add_middleware(RequestTimer, registry=registry)
    problems.install(app)
    for resource in _RESOURCES:
        app.include_router(resource.router)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The API's description, with the JobSpec, which routes read without FastAPI's help."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    spec = JobSpec.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas_by_name = document.setdefault("components", {}).setdefault("schemas", {})
    schemas_by_name.update(spec.pop("$defs", {}))
    schemas_by_name["JobSpec"] = spec
    app.openapi_schema = document
    return document
