"""The addresses of the dashboard, below where it is mounted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from fastapi import Request
from nicegui import ui

from api import calls
from api.client import ApiError, AsyncMantaClient, ServiceUnreachable
from api.ui.components import frame
from api.ui.job_page import JobPage
from api.ui.list_page import JobList
from api.ui.viewer import viewer_of

_PATIENCE_SECONDS = 1.0


def register(client_of: Callable[[Request], AsyncMantaClient]) -> None:
    """Make NiceGUI serve the pages; `client_of` finds the client that belongs to a request."""

    @ui.page("/", title="Jobs – Manta")
    async def jobs(request: Request) -> None:
        viewer, url = await viewer_of(client_of(request)), str(request.base_url).rstrip("/").removesuffix("/ui")
        await JobList(viewer, url).live.start()

    @ui.page("/jobs/{job_id}", title="Job – Manta")
    async def job(request: Request, job_id: str) -> None:
        viewer = await viewer_of(client_of(request))
        if not await _exists(viewer.client, job_id):
            _nothing_here("There is no such job.", job_id)
            return
        await JobPage(viewer, job_id).live.start()


async def _exists(client: AsyncMantaClient, job_id: str) -> bool:
    """Whether there is such a job. When the service cannot say, its page will tell about that."""
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            job = await client.send(calls.job(job_id))
    except ApiError as error:
        return error.problem.status != HTTPStatus.NOT_FOUND
    except (ServiceUnreachable, TimeoutError):
        return True
    ui.page_title(f"{job.name} – Manta")
    return True


def not_found() -> None:
    """The page for every other address."""
    _nothing_here("There is no such page.")


def _nothing_here(text: str, what: str = "") -> None:
    ui.context.client.status_code = HTTPStatus.NOT_FOUND
    frame()
    with ui.element("main").classes("page"), ui.element("section").classes("panel welcome"):
        with ui.element("h2"):
            ui.label(text)
        if what:
            ui.label(what).classes("mono")
        ui.link("Back to the jobs", "/")
