"""A job's durable checkpoints."""

from __future__ import annotations

from fastapi import APIRouter

from api import schemas, views
from api.access import JobId
from api.parameters import Control, Cursor, Limit
from api.problem_codes import OF_A_JOB, reads
from service.store import checkpoints, jobs

router = APIRouter(prefix="/v1/jobs/{job_id}/checkpoints", tags=["checkpoints"])


@router.get("", responses=reads(*OF_A_JOB, "invalid_parameter"))
def list_checkpoints(
    control: Control, job_id: JobId, limit: Limit = 100, cursor: Cursor = None
) -> schemas.Items[schemas.Checkpoint]:
    """Checkpoints, those of the highest step first."""
    with control.store.read() as session:
        jobs.get(session, job_id)
        page = checkpoints.page(session, job_id, limit, cursor)
    return schemas.Items(items=[views.checkpoint_view(row) for row in page.items], next_cursor=page.next_cursor)
