"""Where a job's time went: its ledger, its plan compared with measurements, its recoveries."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from manta.api import schemas, views
from manta.api.parameters import Control, Cursor, Limit
from manta.api.problems import OF_A_JOB, reads
from manta.api.security.access import JobId
from manta.api.threads import read_threads_of
from manta.service.control.control_plane import ControlPlane
from manta.service.planner.job_plan import NotPlanned, drawn
from manta.service.store import jobs, ledgers, plans, recoveries
from manta.service.stored_specs import SpecNotUnderstood, stored_spec

router = APIRouter(prefix="/v1/jobs/{job_id}")
SVG = "image/svg+xml"


@router.get("/ledger", tags=["ledger"], responses=reads(*OF_A_JOB))
def get_ledger(
    control: Control,
    job_id: JobId,
    intervals: Annotated[bool, Query(description="Whether to include the timeline")] = False,
) -> schemas.Ledger:
    """Every second of the job by class, from its submission to its end, or until now."""
    return views.ledger_view(control.store.query(ledgers.of_job, job_id, time.time()), intervals)


@router.get("/plan", tags=["plans"], responses=reads(*OF_A_JOB))
def get_job_plan(control: Control, job_id: JobId) -> schemas.JobPlan:
    """The planned time and memory of the job's steps, from when it last started or changed its layout, with
    measurements."""
    return views.job_plan_view(control.store.query(plans.newest, job_id))


@router.get(
    "/plan/picture",
    tags=["plans"],
    response_class=Response,
    responses={
        200: {"content": {SVG: {"schema": {"type": "string"}}}},
        **reads(*OF_A_JOB, NotPlanned, SpecNotUnderstood),
    },
)
async def get_job_plan_picture(request: Request, control: Control, job_id: JobId) -> Response:
    """A drawing of the plan as SVG: the pipeline of one step, its time by part, memory by rank. Contains no scripts and
    loads no resources."""
    picture = await read_threads_of(request).plans.run(lambda: _picture(control, job_id))
    return Response(picture, media_type=SVG)


@router.get("/recoveries", tags=["recoveries"], responses=reads(*OF_A_JOB))
def list_recoveries(
    control: Control, job_id: JobId, limit: Limit = 100, cursor: Cursor = None
) -> schemas.Items[schemas.Recovery]:
    """A job's recoveries, oldest first."""
    with control.store.read() as session:
        jobs.get(session, job_id)
        page = recoveries.page(session, job_id, limit, cursor)
    return schemas.Items(items=[views.recovery_view(row) for row in page.items], next_cursor=page.next_cursor)


def _picture(control: ControlPlane, job_id: str) -> str:
    with control.store.read() as session:
        kept, job = plans.newest(session, job_id), jobs.get(session, job_id)
        spec = stored_spec(job).spec
    if kept is None:
        raise NotPlanned(views.NOT_PLANNED_YET)
    return drawn(spec, kept.plan, f"{job.name} ({job_id}), generation {kept.generation}")
