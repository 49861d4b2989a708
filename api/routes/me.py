"""The caller's key, and signing out."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from manta.api import views
from manta.api.app_state import state_of
from manta.api.parameters import Control
from manta.api.problems import changes, reads
from manta.api.schemas import access as access_schemas
from manta.api.security.access import Caller, request_of_caller
from manta.api.security.credentials import cookie_name
from manta.service.store import keys

router = APIRouter(tags=["access"])


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
