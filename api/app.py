"""Puts the REST API together."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from api import problems
from api.control import ControlPlane
from api.openapi import describe, operation_id
from api.request_guard import RequestGuard
from api.routes import (
    all_events,
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
from api.state_waits import StateWaits
from api.telemetry import JobCollector, RequestTimer
from service.store import jobs as store_jobs

_RESOURCES = (
    jobs,
    metrics,
    events,
    all_events,
    logs,
    ranks,
    checkpoints,
    ledger,
    recoveries,
    faults,
    cluster,
    nodes,
    health,
)


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
        generate_unique_id_function=operation_id,
    )
    registry = CollectorRegistry()
    registry.register(JobCollector(control.store))
    app.state.control = control
    app.state.registry = registry
    app.state.waits = StateWaits(lambda job_ids: _states(control, job_ids))
    app.add_middleware(RequestGuard, allowed_hosts=allowed_hosts)
    app.add_middleware(RequestTimer, registry=registry)
    problems.install(app)
    for resource in _RESOURCES:
        app.include_router(resource.router)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    return app


def _states(control: ControlPlane, job_ids: Collection[str]) -> Mapping[str, str]:
    with control.store.read() as session:
        return store_jobs.states(session, job_ids)
