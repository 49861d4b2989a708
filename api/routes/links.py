"""Signing in a browser: a one-time link is exchanged for a cookie."""

from __future__ import annotations

import html
import time
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from sqlalchemy.orm import Session

from manta.api import views
from manta.api.app_state import state_of
from manta.api.parameters import Control
from manta.api.problems import CROSS_SITE, DATABASE_UNAVAILABLE, anonymous, changes
from manta.api.schemas import access as access_schemas
from manta.api.security.access import Caller, request_of_caller
from manta.api.security.credentials import cookie_name
from manta.api.security.permissions import DASHBOARD_PATH, LINK_PATH
from manta.service.identity import digest_of, new_browser_token
from manta.service.store import audit, keys
from manta.service.store.audit import AuditRecord
from manta.service.store.errors import LinkInvalid
from manta.service.store.installation_tables import BrowserToken

router = APIRouter(tags=["access"])

_PRIVATE_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
# A page instead of a redirect: if the link is on another site's page, browsers treat a redirect as cross-site, too, and
# omit the cookie that was just set. The empty icon is so that browsers do not ask for /favicon.ico, which is a 404.
_REDIRECT = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Manta</title><link rel="icon" href="data:,">
<meta http-equiv="refresh" content="0; url={address}">
<p>You are signed in: <a href="{address}">the dashboard</a></p></html>"""


@router.post("/v1/links", status_code=201, responses=changes())
def create_link(response: Response, control: Control, caller: Caller) -> access_schemas.OneTimeLink:
    """Create a link that signs a browser in with the permissions of this key. It works once, within ten minutes."""
    token = new_browser_token()
    link = control.store.write(lambda session: keys.add_link(session, caller.key_id, digest_of(token)))
    response.headers["Cache-Control"] = "no-store"
    return access_schemas.OneTimeLink(path=f"{LINK_PATH}{token}", expires_at=views.moment(link.expires_at))


@router.get(
    f"{LINK_PATH}{{token}}",
    response_class=HTMLResponse,
    responses={
        200: {"description": "Signed in: a page that forwards to the dashboard"},
        303: {"description": "The link is not valid: redirects to the dashboard, or to instructions for signing in"},
        **anonymous(CROSS_SITE, LinkInvalid, DATABASE_UNAVAILABLE),
    },
)
def open_link(request: Request, control: Control, token: Annotated[str, Path(description="The secret")]) -> Response:
    """Sign this browser in, and forward it to the dashboard. A browser that opens the link again is forwarded, too."""
    dashboard = f"{request.scope.get('root_path', '')}{DASHBOARD_PATH}/"
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
