"""Puts the REST API together."""

from __future__ import annotations

from collections.abc import Collection

from fastapi import Depends, FastAPI
from prometheus_client import CollectorRegistry, ProcessCollector

from manta.api import problems
from manta.api.app_state import AppState, attach_state
from manta.api.caches import RenderedJobs, RenderedPages, RenderedSeriesOfJobs, RenderedSparklines
from manta.api.metrics.control_plane import ControlPlaneCollector, RequestTimer
from manta.api.openapi import describe
from manta.api.parameters import only_known_parameters
from manta.api.routes import (
    access,
    checkpoints,
    cluster,
    events,
    faults,
    health,
    history,
    jobs,
    logs,
    metrics,
    plans,
    ranks,
    traces,
)
from manta.api.security.access import JobProjects, authorize
from manta.api.security.auditing import Audit
from manta.api.security.credentials import Identities
from manta.api.security.identification import Identification
from manta.api.security.rate_limits import CallerLimits
from manta.api.security.request_guard import RequestGuard, VersionHeader
from manta.api.streams import Changes, StateWaits, StoredVersions
from manta.api.threads import ReadThreads
from manta.service.control.control_plane import ControlPlane
from manta.service.settings import RequestLimits
from manta.service.step_traces.reading import TraceReader
from manta.service.store import jobs as store_jobs

_RESOURCES = (
    jobs, metrics, events, logs, ranks, checkpoints, history, traces, faults, cluster, plans, access, health,
)  # fmt: skip
"""In the order of the API's description."""


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
        dependencies=[Depends(authorize), Depends(only_known_parameters)],
        generate_unique_id_function=lambda route: route.name,
    )
    registry = CollectorRegistry()
    registry.register(ControlPlaneCollector(control))
    ProcessCollector(registry=registry)
    rendered_jobs = RenderedJobs()
    state = AppState(
        control=control,
        registry=registry,
        waits=StateWaits(lambda job_ids: control.store.query(store_jobs.states, job_ids)),
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
