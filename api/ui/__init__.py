"""The dashboard: one document for all its addresses, and its modules in `static/`, which ask REST for all that they
show (decision 0023); and the conversion of YAML that a user writes in the browser."""

from __future__ import annotations

import hashlib
import html
import json
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, ConfigDict
from pydantic_core import to_json

from manta.api.parameters import body_as
from manta.api.problems import NOT_FOUND, problem
from manta.api.security.access import request_of_caller
from manta.api.security.permissions import DASHBOARD, DASHBOARD_PATH
from manta.service.planner.part_labels import PHASE_LABELS
from manta.service.states import ACTIONS, FINAL, STATE_NAMES
from manta.service.store.tables import METRIC_NAMES
from manta.workers.protocol.json_codec import spell
from manta.workers.spec.reading import document_in

_ROOT = Path(__file__).parent / "static"
_MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_STYLES = ("style", "parts", "charts", "narrow")
_DARK = "(prefers-color-scheme: dark)"
"""When `dark.css` applies, unless a viewer decides otherwise (`core/theme.js`)."""
_HEADERS = {
    # Nothing but our own files is run, fetched or framed, whatever a job's name or log has in it.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}
_PAGES = frozenset({"", "jobs", "compare", "queue", "cluster", "submit", "plan", "access"})
"""First parts of the addresses that are pages; `static/main.js` knows what is below them."""
_IMMUTABLE = {"Cache-Control": "private, max-age=31536000, immutable"}
_NEVER = {"Cache-Control": "no-store"}


@dataclass(frozen=True)
class StaticFile:
    """A file that a browser loads."""

    content: bytes
    media_type: str


def _read() -> dict[str, StaticFile]:
    paths = sorted(path for path in _ROOT.rglob("*") if path.suffix in _MEDIA_TYPES)
    return {
        path.relative_to(_ROOT).as_posix(): StaticFile(path.read_bytes(), _MEDIA_TYPES[path.suffix]) for path in paths
    }


FILES = _read()
"""By path below `static/`."""
DIGEST = hashlib.sha256(b"\0".join(name.encode() + file.content for name, file in FILES.items())).hexdigest()[:16]
"""Of all of them, and part of their addresses."""


_PRELOADED = ("main.js", *(name for name in FILES if name.startswith("core/")))


@lru_cache
def document_for(base: str) -> str:
    """The document for a service whose addresses begin with `base`."""
    static = f"{html.escape(base)}{DASHBOARD_PATH}/static/{DIGEST}"
    styles = "".join(f'<link rel="stylesheet" href="{static}/{name}.css">\n' for name in _STYLES)
    styles += f'<link rel="stylesheet" id="dark" media="{_DARK}" href="{static}/dark.css">\n'
    preloads = "".join(f'<link rel="modulepreload" href="{static}/{name}">\n' for name in _PRELOADED)
    facts = json.dumps(_facts()).replace("<", "\\u003c")  # no text in it ends the element
    return f"""<!doctype html>
<html lang="en" data-base="{html.escape(base)}">
<head>
<meta charset="utf-8">
<title>Manta</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="{static}/icon.svg" type="image/svg+xml">
{styles}{preloads}<script type="application/json" id="facts">{facts}</script>
<script type="module" src="{static}/main.js"></script>
</head>
<body><noscript>The dashboard needs JavaScript; the command <code>manta</code> shows the same.</noscript></body>
</html>
"""


def _facts() -> dict[str, Any]:
    return {
        "version": metadata.version("manta-train"),
        "states": list(STATE_NAMES),
        "final_states": sorted(FINAL),
        "actions": ACTIONS,
        "metrics": list(METRIC_NAMES),
        "step_parts": PHASE_LABELS,
    }


class EditedDocument(BaseModel):
    """A document that a user has written in the browser."""

    model_config = ConfigDict(extra="forbid")

    text: str
    """YAML."""


async def read_edited_document(
    request: Request, written: Annotated[EditedDocument, Depends(body_as(EditedDocument))]
) -> Response:
    """The document in it, with relative paths as those of the service's root. Raises SpecError."""
    request_of_caller(request).changes_nothing = True
    body = await run_in_threadpool(_as_json, written.text)  # a long text takes a second
    return Response(body, media_type="application/json")


def _as_json(text: str) -> bytes:
    document: Any = document_in(text, "what you wrote", Path("/"))
    return to_json({"document": spell(document)}, fallback=str)


def mount(app: FastAPI) -> None:
    """Serve the dashboard at `/ui`, and lead `/` there."""
    for path in ("/", DASHBOARD_PATH):
        _add(app, path, _to_dashboard)
    app.add_api_route(
        f"{DASHBOARD_PATH}/yaml", read_edited_document, methods=["POST"], include_in_schema=False, name=DASHBOARD
    )
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
        return problem(NOT_FOUND, "there is no such file in this release: load the page again")
    return Response(file.content, HTTPStatus.OK, media_type=file.media_type, headers={**_HEADERS, **_IMMUTABLE})


def _base(request: Request) -> str:
    """Path below which a proxy shows the service."""
    return str(request.scope.get("root_path", ""))
