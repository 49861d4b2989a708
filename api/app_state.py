"""The objects that one app of `manta.api.app.create_app` shares among its requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from fastapi import FastAPI

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from manta.api.caches import RenderedJobs, RenderedPages, RenderedSeriesOfJobs, RenderedSparklines
    from manta.api.security.access import JobProjects
    from manta.api.security.credentials import Identities
    from manta.api.security.rate_limits import CallerLimits
    from manta.api.streams import Changes, StateWaits
    from manta.api.threads import ReadThreads
    from manta.service.control.control_plane import ControlPlane
    from manta.service.step_traces.reading import TraceReader


@dataclass(frozen=True)
class AppState:
    """Shared by all requests of one app."""

    control: ControlPlane
    registry: CollectorRegistry
    waits: StateWaits
    changes: Changes
    read_threads: ReadThreads
    rendered_jobs: RenderedJobs
    rendered_pages: RenderedPages
    rendered_series: RenderedSeriesOfJobs
    rendered_sparklines: RenderedSparklines
    traces: TraceReader
    limits: CallerLimits
    identities: Identities
    job_projects: JobProjects
    secure_cookies: bool
    """Whether browsers only reach the service over TLS."""


def attach_state(app: FastAPI, state: AppState) -> None:
    """Make `state` that of the app."""
    app.state.of_app = state


def state_of(app: FastAPI) -> AppState:
    """The app's state; a route passes `request.app`."""
    return cast(AppState, app.state.of_app)
