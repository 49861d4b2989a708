"""Where a job's ranks run."""

from __future__ import annotations

from fastapi import APIRouter

from api import schemas, views
from api.access import JobId
from api.parameters import Control
from api.problem_codes import OF_A_JOB, reads
from service.store import jobs, ranks

router = APIRouter(prefix="/v1/jobs/{job_id}/ranks", tags=["ranks"])


@router.get("", responses=reads(*OF_A_JOB))
def list_ranks(control: Control, job_id: JobId) -> schemas.Items[schemas.Rank]:
    """All ranks of the job's current gang, by number."""
    with control.store.read() as session:
        jobs.get(session, job_id)
        rows = ranks.of_job(session, job_id)
    return schemas.Items(items=[views.rank_view(row) for row in rows])
