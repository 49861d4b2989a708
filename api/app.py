"""Puts the REST API together."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fastapi import Depends, FastAPI
from prometheus_client import CollectorRegistry, ProcessCollector

from manta.api import problems
from manta.api.app_state import AppState, attach_state
from manta.api.caches import RenderedJobs, RenderedPages, RenderedSeriesOfJobs, RenderedSparklines
from manta.api.metrics.control_plane import ControlPlaneCollector
from manta.api.metrics.requests import RequestTimer
from manta.api.openapi import describe, operation_id
from manta.api.routes import (
    all_events,
    audit,
    checkpoints,
    cluster,
    events,
    faults,
    health,
    job_lists,
    job_plan,
    jobs,
    keys,
    ledger,
    links,
    logs,
    machines,
    me,
    metrics,
    nodes,
    plans,
    projects,
    ranks,
    recoveries,
    traces,
)
from manta.api.security.access import JobProjects, authorize
from manta.api.security.auditing import Audit
from manta.api.security.credentials import Identities
from manta.api.security.identification import Identification
from manta.api.security.rate_limits import CallerLimits
from manta.api.security.request_guard import RequestGuard, VersionHeader
from manta.api.streams.changes import Changes, StateWaits, StoredVersions
from manta.api.threads import ReadThreads
from manta.service.control.control_plane import ControlPlane
from manta.service.settings import RequestLimits
from manta.service.step_traces.reading import TraceReader
from manta.service.store import jobs as store_jobs

_RESOURCES = (
    job_lists,  # before the routes that would take the next part of its path for a job's id
    jobs,
    metrics,
    events,
    all_events,
    logs,
    ranks,
    checkpoints,
    ledger,
    job_plan,
    recoveries,
    traces,
    faults,
    cluster,
    nodes,
    plans,
    machines,
    projects,
    keys,
    audit,
    links,
    me,
    health,
)


def create_app(
    control: ControlPlane,
    allowed_hosts: Collection[str] = (),
    limits: RequestLimits | None = None,
    secure_cookies: bool = False,
    listens_on: str = "localhost",
) -> FastAPI:
    """The API on top of `control`. Each app has its own Prometheus registry, so that several can live in a process.

    `allowed_hosts`: names of the service in addition to those of this machine, such as a proxy's. `limits`: for each
    caller; by default the usual ones. `secure_cookies`: browsers only reach the service over TLS. `listens_on`: name or
    address."""
    app = FastAPI(
        title="Manta",
        description="Elastic 3D-parallel training on Ray",
        version="1",
        docs_url=None,  # the interactive pages would load their scripts from elsewhere
        redoc_url=None,
        openapi_url=None,  # our own route, which requires a key
        redirect_slashes=False,  # one address per resource; all others get a problem document
        dependencies=[Depends(authorize)],
        generate_unique_id_function=operation_id,
    )
    registry = CollectorRegistry()
    registry.register(ControlPlaneCollector(control))
    ProcessCollector(registry=registry)
    rendered_jobs = RenderedJobs()
    state = AppState(
        control=control,
        registry=registry,
        waits=StateWaits(lambda job_ids: _states(control, job_ids)),
        changes=Changes(StoredVersions(lambda: control.store, lambda: control.logs)),
        read_threads=ReadThreads(),
        rendered_jobs=rendered_jobs,
        rendered_pages=RenderedPages(rendered_jobs),
        rendered_series=RenderedSeriesOfJobs(),
        rendered_sparklines=RenderedSparklines(),
        traces=TraceReader(lambda: control.store),
        limits=CallerLimits(limits or RequestLimits()),
        identities=Identities(lambda: control.store),
        job_projects=JobProjects(lambda: control.store),
        secure_cookies=secure_cookies,
    )
    attach_state(app, state)
    app.add_middleware(RequestGuard, listens_on=listens_on, allowed_hosts=allowed_hosts, by_tls=secure_cookies)
    app.add_middleware(
        Identification,
        identities=state.identities,
        limits=state.limits,
        audit=Audit(lambda: control.store),
    )
    app.add_middleware(problems.FailureResponses)
    app.add_middleware(VersionHeader)
    app.add_middleware(RequestTimer, registry=registry)
    problems.install(app)
    for resource in _RESOURCES:
        app.include_router(resource.router)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    return app


def _states(control: ControlPlane, job_ids: Collection[str]) -> Mapping[str, str]:
    return control.store.query(store_jobs.states, job_ids)
