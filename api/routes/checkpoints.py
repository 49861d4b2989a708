"""A job's durable checkpoints."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query

from api import schemas, views
from api.access import JobId
from api.parameters import CheckpointId, Control, Cursor, Limit
from api.problem_codes import OF_A_JOB, changes, reads
from service.store import checkpoints, jobs

router = APIRouter(prefix="/v1/jobs/{job_id}/checkpoints", tags=["checkpoints"])


@router.get("", responses=reads(*OF_A_JOB, "invalid_parameter"))
def list_checkpoints(
    control: Control, job_id: JobId, limit: Limit = 100, cursor: Cursor = None
) -> schemas.Items[schemas.Checkpoint]:
    """Checkpoints, those of the highest step first."""
    with control.store.read() as session:
        job = jobs.get(session, job_id)
        page = checkpoints.page(session, job_id, limit, cursor)
        kept = checkpoints.kept_because(session, job)
    now = time.time()
    items = [views.checkpoint_view(row, now, kept) for row in page.items]
    return schemas.Items(items=items, next_cursor=page.next_cursor)


@router.delete(
    "/{checkpoint_id}",
    responses=changes(*OF_A_JOB, "checkpoint_not_found", "checkpoint_needed", "files_not_removed", "invalid_parameter"),
)
def delete_checkpoint(
    control: Control,
    job_id: JobId,
    checkpoint_id: CheckpointId,
    force: Annotated[bool, Query(description="Also the newest whole one of a job that would go on from it")] = False,
) -> schemas.Checkpoint:
    """Delete a checkpoint and its files for good. The newest whole one of a job that may go on is refused without
    `force`, and one that is being saved or restored from in any case."""
    return views.checkpoint_view(control.delete_checkpoint(job_id, checkpoint_id, force), time.time())
