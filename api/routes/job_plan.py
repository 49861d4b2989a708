"""What was planned of a job, and what became of it."""

from __future__ import annotations

from fastapi import APIRouter

from api import schemas, views
from api.access import JobId
from api.parameters import Control
from api.problem_codes import OF_A_JOB, reads
from service.store import plans

router = APIRouter(prefix="/v1/jobs/{job_id}/plan", tags=["plans"])


@router.get("", responses=reads(*OF_A_JOB))
def get_job_plan(control: Control, job_id: JobId) -> schemas.JobPlan:
    """What the job's step was planned to take when it last began or changed its layout, beside what its steps take."""
    with control.store.read() as session:
        return views.job_plan_view(plans.newest(session, job_id))
