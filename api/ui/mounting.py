"""Hangs the dashboard into a FastAPI app.

NiceGUI has one app a process. It is mounted below `/ui` only, so that every other path stays the API's, and each of
our apps tells the pages which service they are about through the request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse
from nicegui import app as nicegui_app
from nicegui import ui
from starlette.types import ASGIApp, Receive, Scope, Send

from api.client import AsyncMantaClient
from api.ui.pages import not_found, register

PATH = "/ui"
"""Where the dashboard lives."""
_SCOPE_KEY = "manta.dashboard"
_FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#2563eb"/>'
    '<path d="M4 15c5-1 8-5 12-8 4 3 7 7 12 8-4 2-8 3-10 5l-2 7-2-7c-2-2-6-3-10-5z" fill="#fff"/></svg>'
)


class Dashboard:
    """What the pages of one app share: the client that they read through."""

    def __init__(self, base_url: Callable[[], str] | str):
        """Reads from the service at `base_url`; a function is asked when the first page is opened."""
        self._base_url = base_url
        self._client: AsyncMantaClient | None = None

    @property
    def client(self) -> AsyncMantaClient:
        """The client, made at first use, when the server listens and its event loop runs."""
        if self._client is None:
            url = self._base_url if isinstance(self._base_url, str) else self._base_url()
            self._client = AsyncMantaClient(url)
        return self._client

    async def close(self) -> None:
        """Close the client's connections."""
        if self._client is not None:
            await self._client.close()
            self._client = None


class _Introduce:
    """ASGI middleware that tells pages which dashboard they belong to."""

    def __init__(self, app: ASGIApp, dashboard: Dashboard):
        self._app = app
        self._dashboard = dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_SCOPE_KEY] = self._dashboard
        await self._app(scope, receive, send)


def _client_of(request: Request) -> AsyncMantaClient:
    return cast(Dashboard, request.scope[_SCOPE_KEY]).client


def mount(app: FastAPI, base_url: Callable[[], str] | str) -> None:
    """Serve the dashboard at `/ui`, and lead `/` there. Call it once an app, before the app starts.

    `base_url` is where the service answers, as seen from this very process: the pages read over HTTP like everybody
    else. A function is asked when the first page is opened, so the port need not be known yet. A process may have
    several such apps, but only one that runs at a time.
    """
    dashboard = Dashboard(base_url)
    register(_client_of)
    _forget_earlier_app()
    app.add_middleware(_Introduce, dashboard=dashboard)
    for path in ("/", PATH):
        app.add_api_route(path, _to_dashboard, methods=["GET", "HEAD"], include_in_schema=False)
    ui.run_with(
        app,
        root=not_found,
        mount_path=PATH,
        title="Manta",
        favicon=_FAVICON,
        dark=None,  # as the browser prefers
        tailwind=False,
        reconnect_timeout=5.0,
        show_welcome_message=False,
    )
    serve_pages = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with serve_pages(app) as state:
            try:
                yield state
            finally:
                await dashboard.close()

    app.router.lifespan_context = lifespan


def _to_dashboard(request: Request) -> RedirectResponse:
    return RedirectResponse(f"{request.scope.get('root_path', '')}{PATH}/")


def _forget_earlier_app() -> None:
    """Let NiceGUI's app take its middleware anew, which Starlette refuses to one that has served before."""
    nicegui_app.user_middleware.clear()
    nicegui_app.middleware_stack = None
