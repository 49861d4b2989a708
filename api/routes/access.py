"""Projects, keys and the audit log; signing in a browser, where a one-time link is exchanged for a cookie."""

from __future__ import annotations

import html
import time
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from sqlalchemy.orm import Session

from manta.api import requests, schemas, views
from manta.api.app_state import state_of
from manta.api.openapi import json_request
from manta.api.parameters import Control, Cursor, Limit, body_as
from manta.api.problems import CROSS_SITE, DATABASE_UNAVAILABLE, MalformedJson, anonymous, changes, reads
from manta.api.schemas import access as access_schemas
from manta.api.security.access import Caller, Forbidden, refuse_priority, request_of_caller
from manta.api.security.credentials import cookie_name
from manta.api.security.permissions import DASHBOARD_PATH, LINK_PATH, RequiredPermission
from manta.service.errors import InvalidParameter
from manta.service.identity import Identity, digest_of, new_browser_token, new_key
from manta.service.ids import JOB_ID_PATTERN, KEY_ID_PATTERN, TARGET_PATTERN
from manta.service.store import audit, keys, projects
from manta.service.store.audit import AuditRecord
from manta.service.store.errors import KeyNotFound, LinkInvalid, ProjectExists, ProjectNotFound
from manta.service.store.installation_tables import BrowserToken

router = APIRouter(tags=["access"])

KeyId = Annotated[str, Path(description="Id of a key")]
KeyFilter = Annotated[str | None, Query(pattern=f"^{KEY_ID_PATTERN}$", description="Only requests with this key")]
TargetFilter = Annotated[
    str | None,
    Query(pattern=TARGET_PATTERN, description="Only requests about this job, key, node or project"),
]
_DAY_SECONDS = 86_400.0
_PRIVATE_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
# A page instead of a redirect: if the link is on another site's page, browsers treat a redirect as cross-site, too, and
# omit the cookie that was just set. The empty icon is so that browsers do not ask for /favicon.ico, which is a 404.
_REDIRECT = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Manta</title><link rel="icon" href="data:,">
<meta http-equiv="refresh" content="0; url={address}">
<p>You are signed in: <a href="{address}">the dashboard</a></p></html>"""


@router.post(
    "/v1/projects",
    status_code=201,
    openapi_extra=json_request(requests.NewProject),
    responses=changes(MalformedJson, ProjectExists),
)
def create_project(
    request: Request,
    control: Control,
    wanted: Annotated[requests.NewProject, Depends(body_as(requests.NewProject))],
) -> access_schemas.Project:
    """Create a project. Keys of the project can only access its jobs."""
    request_of_caller(request).target = wanted.name
    return control.store.write(
        lambda session: views.answer(access_schemas.Project, projects.create(session, wanted.name))
    )


@router.get("/v1/projects", responses=reads())
def list_projects(
    control: Control, caller: Caller, limit: Limit = 50, cursor: Cursor = None
) -> schemas.Items[access_schemas.Project]:
    """The key's project, or all projects if the key is valid for all projects, sorted by name."""
    page = control.store.query(projects.page, caller.bound, limit, cursor)
    items = [views.answer(access_schemas.Project, item) for item in page.items]
    return schemas.Items(items=items, next_cursor=page.next_cursor)


@router.post(
    "/v1/keys",
    status_code=201,
    openapi_extra=json_request(requests.NewKey),
    responses=changes(MalformedJson, ProjectNotFound),
)
def create_key(
    request: Request,
    response: Response,
    control: Control,
    caller: Caller,
    wanted: Annotated[requests.NewKey, Depends(body_as(requests.NewKey))],
) -> access_schemas.NewApiKey:
    """Create a key. It is only returned in this response. Creating a key for another project, or for all projects,
    requires a key for all projects."""
    project = wanted.project or caller.project
    _refuse_wider_scope(caller, wanted, project)
    secret, expires_at = new_key(), None
    highest = caller.highest_priority if wanted.highest_priority is None else wanted.highest_priority
    refuse_priority(caller, highest)
    if wanted.expires_in_days is not None:
        expires_at = time.time() + wanted.expires_in_days * _DAY_SECONDS
    made = control.store.write(
        lambda session: keys.create(
            session,
            digest_of(secret),
            wanted.name,
            wanted.scope,
            project,
            user=wanted.user,
            installation=wanted.installation,
            expires_at=expires_at,
            highest_priority=highest,
        )
    )
    request_of_caller(request).target = made.id
    response.headers["Cache-Control"] = "no-store"
    return views.answer(access_schemas.NewApiKey, made, key=secret)


def _refuse_wider_scope(caller: Identity, wanted: requests.NewKey, project: str) -> None:
    if caller.installation:
        return
    if wanted.installation:
        raise Forbidden(RequiredPermission(wanted.scope, installation=True), caller)
    if project != caller.project:
        raise ProjectNotFound(project)


@router.get("/v1/keys", responses=reads())
def list_keys(
    control: Control, caller: Caller, limit: Limit = 50, cursor: Cursor = None
) -> schemas.Items[access_schemas.ApiKey]:
    """The project's keys, or all keys if the caller's key is valid for all projects, newest first, including revoked
    and expired ones. The keys themselves are not stored."""
    page = control.store.query(keys.page, caller.bound, limit, cursor)
    items = [views.answer(access_schemas.ApiKey, item) for item in page.items]
    return schemas.Items(items=items, next_cursor=page.next_cursor)


@router.delete("/v1/keys/{key_id}", responses=changes(KeyNotFound))
def revoke_key(request: Request, control: Control, caller: Caller, key_id: KeyId) -> access_schemas.ApiKey:
    """Revoke a key, immediately in this process and within a second in others. Browsers signed in with it are signed
    out, and its streams end. It remains in the list."""
    revoked = control.store.write(
        lambda session: views.answer(access_schemas.ApiKey, keys.revoke(session, caller.bound, key_id))
    )
    state_of(request.app).identities.forget()
    return revoked


@router.get("/v1/audit", responses=reads())
def list_audit(
    control: Control,
    caller: Caller,
    key: KeyFilter = None,
    target: TargetFilter = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> schemas.Items[access_schemas.AuditEntry]:
    """Requests of the project's keys to change something, including rejected ones, newest first; those of all projects
    if the caller's key is valid for all projects."""
    page = control.store.query(audit.page, caller.bound, key, target, limit, cursor)
    return schemas.Items(items=[views.audit_view(item) for item in page.items], next_cursor=page.next_cursor)


@router.post("/v1/links", status_code=201, responses=changes())
def create_link(response: Response, control: Control, caller: Caller) -> access_schemas.OneTimeLink:
    """Create a link that signs a browser in with the permissions of this key. It works once, within ten minutes."""
    token = new_browser_token()
    link = control.store.write(lambda session: keys.add_link(session, caller.key_id, digest_of(token)))
    response.headers["Cache-Control"] = "no-store"
    return access_schemas.OneTimeLink(path=f"{LINK_PATH}{token}", expires_at=link.expires_at)


@router.get(
    f"{LINK_PATH}{{token}}",
    response_class=HTMLResponse,
    responses={
        200: {"description": "Signed in: a page that forwards to the dashboard"},
        303: {"description": "The link is not valid: redirects to the dashboard, or to instructions for signing in"},
        **anonymous(CROSS_SITE, InvalidParameter, LinkInvalid, DATABASE_UNAVAILABLE),
    },
)
def open_link(
    request: Request,
    control: Control,
    token: Annotated[str, Path(description="The secret")],
    job: Annotated[str | None, Query(pattern=f"^{JOB_ID_PATTERN}$", description="Job whose page is opened")] = None,
) -> Response:
    """Sign this browser in, and forward it to the dashboard. A browser that opens the link again is forwarded, too."""
    dashboard = f"{request.scope.get('root_path', '')}{DASHBOARD_PATH}/" + (f"jobs/{job}" if job else "")
    secret, address = new_browser_token(), request_of_caller(request).address

    def operation(session: Session) -> BrowserToken:
        key, begun = keys.open_link(session, digest_of(token), digest_of(secret))
        audit.append(session, keys.identity_of(key), AuditRecord("open_link", None, address, 200))
        return begun

    try:
        begun = control.store.write(operation)
    except LinkInvalid:
        if "text/html" not in request.headers.get("accept", ""):
            raise
        return RedirectResponse(dashboard, HTTPStatus.SEE_OTHER, headers=_PRIVATE_HEADERS)
    answer = HTMLResponse(_REDIRECT.format(address=html.escape(dashboard)), headers=_PRIVATE_HEADERS)
    answer.set_cookie(
        cookie_name(request.headers.get("host", "")),
        secret,
        max_age=int(begun.expires_at - time.time()),
        httponly=True,
        samesite="strict",
        secure=state_of(request.app).secure_cookies,
    )
    return answer


@router.get("/v1/me", responses=reads())
def get_me(request: Request, caller: Caller) -> access_schemas.Me:
    """The key of the request, and its permissions."""
    return views.me_view(caller, _session_of(request) is not None)


@router.delete("/v1/session", responses=changes())
def end_session(request: Request, response: Response, control: Control, caller: Caller) -> access_schemas.Me:
    """Sign this browser out: its session becomes invalid. The key remains valid. Returns the key of the session."""
    session = _session_of(request)
    if session is not None:
        control.store.write(lambda store: keys.end_session(store, session))
        state_of(request.app).identities.forget()
        response.delete_cookie(cookie_name(request.headers.get("host", "")), httponly=True, samesite="strict")
    return views.me_view(caller, session is not None)


def _session_of(request: Request) -> str | None:
    """Digest of the browser session of the request; None if it has a key."""
    shown = request_of_caller(request).credential
    return None if shown is None or shown.is_key else shown.digest
