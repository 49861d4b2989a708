"""The audit log."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from manta.api import schemas, views
from manta.api.parameters import Control, Cursor, Limit
from manta.api.problems import reads
from manta.api.schemas import access as access_schemas
from manta.api.security.access import Caller
from manta.service.errors import InvalidParameter
from manta.service.ids import KEY_ID_PATTERN, TARGET_PATTERN
from manta.service.store import audit

router = APIRouter(prefix="/v1/audit", tags=["access"])

KeyFilter = Annotated[str | None, Query(pattern=f"^{KEY_ID_PATTERN}$", description="Only requests with this key")]
TargetFilter = Annotated[
    str | None,
    Query(pattern=TARGET_PATTERN, description="Only requests about this job, key, node or project"),
]


@router.get("", responses=reads(InvalidParameter))
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
