"""API keys: create, list, revoke."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from manta.api import requests, schemas, views
from manta.api.app_state import state_of
from manta.api.openapi import json_request
from manta.api.parameters import Control, Cursor, Limit, body_as
from manta.api.problems import MalformedJson, changes, reads
from manta.api.schemas import access as access_schemas
from manta.api.security.access import Caller, Forbidden, refuse_priority, request_of_caller
from manta.api.security.permissions import RequiredPermission
from manta.service.errors import InvalidParameter
from manta.service.identity import Identity, digest_of, new_key
from manta.service.store import keys
from manta.service.store.errors import KeyNotFound, ProjectNotFound

router = APIRouter(prefix="/v1/keys", tags=["access"])

KeyId = Annotated[str, Path(description="Id of a key")]
_DAY_SECONDS = 86_400.0


@router.post(
    "",
    status_code=201,
    openapi_extra=json_request(requests.NewKey),
    responses=changes(MalformedJson, InvalidParameter, ProjectNotFound),
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
    return access_schemas.NewApiKey(**views.key_view(made).model_dump(), key=secret)


def _refuse_wider_scope(caller: Identity, wanted: requests.NewKey, project: str) -> None:
    if caller.installation:
        return
    if wanted.installation:
        raise Forbidden(RequiredPermission(wanted.scope, installation=True), caller)
    if project != caller.project:
        raise ProjectNotFound(project)


@router.get("", responses=reads(InvalidParameter))
def list_keys(
    control: Control, caller: Caller, limit: Limit = 50, cursor: Cursor = None
) -> schemas.Items[access_schemas.ApiKey]:
    """The project's keys, or all keys if the caller's key is valid for all projects, newest first, including revoked
    and expired ones. The keys themselves are not stored."""
    page = control.store.query(keys.page, caller.bound, limit, cursor)
    return schemas.Items(items=[views.key_view(item) for item in page.items], next_cursor=page.next_cursor)


@router.delete("/{key_id}", responses=changes(KeyNotFound))
def revoke_key(request: Request, control: Control, caller: Caller, key_id: KeyId) -> access_schemas.ApiKey:
    """Revoke a key, immediately in this process and within a second in others. Browsers signed in with it are signed
    out, and its streams end. It remains in the list."""
    revoked = control.store.write(lambda session: views.key_view(keys.revoke(session, caller.bound, key_id)))
    state_of(request.app).identities.forget()
    return revoked
