"""Hangs the dashboard into a FastAPI app.

NiceGUI has one app a process. It is mounted below `/ui` only, so that every other path stays the API's, and each of
our apps tells the pages which service they are about through the request.
"""

from __future__ import annotations

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse
from nicegui import app as nicegui_app
from nicegui import ui
from starlette.types import ASGIApp, Receive, Scope, Send

from api.client import AsyncMantaClient
from api.permissions import DASHBOARD, DASHBOARD_PATH
from api.ui.pages import not_found, register

_SCOPE_KEY = "manta.service"
_IDENTITY = ("authorization", "cookie")
_FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#2563eb"/>'
    '<path d="M4 15c5-1 8-5 12-8 4 3 7 7 12 8-4 2-8 3-10 5l-2 7-2-7c-2-2-6-3-10-5z" fill="#fff"/></svg>'
)


class _Introduce:
    """ASGI middleware that tells pages which app they belong to."""

    def __init__(self, app: ASGIApp, service: FastAPI):
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_SCOPE_KEY] = self._service
        await self._app(scope, receive, send)


def _client_of(request: Request) -> AsyncMantaClient:
    """A client with the rights of whoever opens the page: it shows what their browser has shown, and comes from where
    they are, through all that every other request goes through."""
    shown = {name: request.headers[name] for name in _IDENTITY if name in request.headers}
    address = (request.client.host, request.client.port) if request.client else ("", 0)
    transport = httpx.ASGITransport(request.scope[_SCOPE_KEY], raise_app_exceptions=False, client=address)
    return AsyncMantaClient(f"http://{request.headers.get('host', '')}", transport, headers=shown)


def mount(app: FastAPI) -> None:
    """Serve the dashboard at `/ui`, and lead `/` there. Call it once an app, before the app starts.

    The pages ask the app for all that they show, like everybody else. A process may have several such apps, but only
    one that runs at a time.
    """
    register(_client_of)
    _forget_earlier_app()
    app.add_middleware(_Introduce, service=app)
    for path in ("/", DASHBOARD_PATH):
        app.add_api_route(path, _to_dashboard, methods=["GET", "HEAD"], include_in_schema=False, name=DASHBOARD)
    ui.run_with(
        app,
        root=not_found,
        mount_path=DASHBOARD_PATH,
        title="Manta",
        favicon=_FAVICON,
        dark=None,  # as the browser prefers
        tailwind=False,
        reconnect_timeout=5.0,
        show_welcome_message=False,
    )


def _to_dashboard(request: Request) -> RedirectResponse:
    return RedirectResponse(f"{request.scope.get('root_path', '')}{DASHBOARD_PATH}/")


def _forget_earlier_app() -> None:
    """Let NiceGUI's app take its middleware anew, which Starlette refuses to one that has served before."""
    nicegui_app.user_middleware.clear()
    nicegui_app.middleware_stack = None
