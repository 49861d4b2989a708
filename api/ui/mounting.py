"""Mounts the dashboard into a FastAPI app: one document for all its addresses, and the files that it loads."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response

from api.problems import problem
from api.security.permissions import DASHBOARD, DASHBOARD_PATH
from api.ui.document import document_for
from api.ui.files import DIGEST, FILES
from api.ui.yaml_documents import read_written

_HEADERS = {
    # Nothing but our own files is run, fetched or framed, whatever a job's name or log has in it.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}
_PAGES = frozenset({"", "jobs", "compare", "queue", "cluster", "submit", "plan", "access"})
"""First parts of the addresses that are pages; `static/main.js` knows what is below them."""
_FOR_GOOD = {"Cache-Control": "private, max-age=31536000, immutable"}
_NEVER = {"Cache-Control": "no-store"}


def mount(app: FastAPI) -> None:
    """Serve the dashboard at `/ui`, and lead `/` there."""
    for path in ("/", DASHBOARD_PATH):
        _add(app, path, _to_dashboard)
    app.add_api_route(f"{DASHBOARD_PATH}/yaml", read_written, methods=["POST"], include_in_schema=False, name=DASHBOARD)
    _add(app, f"{DASHBOARD_PATH}/static/{{digest}}/{{name:path}}", _file)
    _add(app, f"{DASHBOARD_PATH}/{{rest:path}}", _document)


def _add(app: FastAPI, path: str, answer: object) -> None:
    app.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False, name=DASHBOARD)  # type: ignore[arg-type]


def _to_dashboard(request: Request) -> RedirectResponse:
    return RedirectResponse(f"{_base(request)}{DASHBOARD_PATH}/")


def _document(request: Request, rest: str) -> Response:
    status = HTTPStatus.OK if rest.partition("/")[0] in _PAGES else HTTPStatus.NOT_FOUND
    return Response(document_for(_base(request)), status, media_type="text/html", headers={**_HEADERS, **_NEVER})


def _file(digest: str, name: str) -> Response:
    """A file of this release. Its address changes whenever any of them does, so that browsers may keep it for good."""
    file = FILES.get(name) if digest == DIGEST else None
    if file is None:
        return problem("not_found", "there is no such file in this release: load the page again")
    return Response(file.content, HTTPStatus.OK, media_type=file.media_type, headers={**_HEADERS, **_FOR_GOOD})


def _base(request: Request) -> str:
    """Path below which a proxy shows the service."""
    return str(request.scope.get("root_path", ""))
