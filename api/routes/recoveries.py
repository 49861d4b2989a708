"""A job's recoveries: the failure, the replaced ranks, and the duration of each phase."""

from __future__ import annotations

from fastapi import APIRouter

from manta.api import schemas, views
from manta.api.parameters import Control, Cursor, Limit
from manta.api.problems import OF_A_JOB, reads
from manta.api.security.access import JobId
from manta.service.errors import InvalidParameter
from manta.service.store import jobs, recoveries

router = APIRouter(prefix="/v1/jobs/{job_id}/recoveries", tags=["recoveries"])


@router.get("", responses=reads(*OF_A_JOB, InvalidParameter))
def list_recoveries(
    control: Control, job_id: JobId, limit: Limit = 100, cursor: Cursor = None
) -> schemas.Items[schemas.Recovery]:
    """A job's recoveries, oldest first."""
    with control.store.read() as session:
        jobs.get(session, job_id)
        page = recoveries.page(session, job_id, limit, cursor)
    return schemas.Items(items=[views.recovery_view(row) for row in page.items], next_cursor=page.next_cursor)
