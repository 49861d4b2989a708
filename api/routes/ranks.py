"""Where a job's ranks run, and how they are doing."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from api import schemas, views
from api.access import JobId
from api.parameters import AfterStep, Control
from api.problem_codes import OF_A_JOB, reads
from service.store import jobs, rank_numbers, ranks

router = APIRouter(prefix="/v1/jobs/{job_id}/ranks", tags=["ranks"])


@router.get("", responses=reads(*OF_A_JOB))
def list_ranks(control: Control, job_id: JobId) -> schemas.Items[schemas.Rank]:
    """All ranks of the job's current gang, by number, and what is known of their last few seconds."""
    with control.store.read() as session:
        jobs.get(session, job_id)
        rows = ranks.of_job(session, job_id)
        numbers = rank_numbers.newest(session, job_id)
    return schemas.Items(items=views.rank_views(rows, numbers))


@router.get("/history", responses=reads(*OF_A_JOB, "invalid_parameter"))
def get_rank_history(
    control: Control,
    job_id: JobId,
    after_step: AfterStep = 0,
    max_points: Annotated[
        int, Query(ge=1, le=rank_numbers.SLOTS, description="Most samples; of many ranks there are fewer")
    ] = rank_numbers.SLOTS,
) -> schemas.RankHistory:
    """Own times of all ranks over the newest samples, of which there is one every two seconds at most. Samples from
    before the number of ranks changed, or of steps that were done again, are left out."""
    with control.store.read() as session:
        jobs.get(session, job_id)
        found = rank_numbers.history(session, job_id, after_step, max_points)
    return schemas.RankHistory(
        steps=found.steps, times=[views.moment(at) for at in found.times], own_seconds=found.own_seconds
    )
