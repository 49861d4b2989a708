"""A job's durable checkpoints."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from manta.api import requests, schemas, views
from manta.api.openapi import json_request
from manta.api.parameters import CheckpointId, Control, Cursor, ExportId, Limit, body_as
from manta.api.problems import OF_A_JOB, MalformedJson, changes, reads
from manta.api.security.access import JobId
from manta.api.threads import read_threads_of
from manta.service.control.exports import ExportNotPossible
from manta.service.control.removal import CheckpointNeeded, NotRemoved
from manta.service.store import checkpoints, exports, jobs, leases, metrics
from manta.service.store.errors import CheckpointNotFound, ExportNotFound, JobBeingDeleted

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["checkpoints"])


@router.get("/checkpoints", responses=reads(*OF_A_JOB))
def list_checkpoints(
    control: Control, job_id: JobId, limit: Limit = 100, cursor: Cursor = None
) -> schemas.Items[schemas.Checkpoint]:
    """Checkpoints, highest step first."""
    with control.store.read() as session:
        job = jobs.get(session, job_id)
        page = checkpoints.page(session, job_id, limit, cursor)
        kept = checkpoints.kept_because(session, job)
        losses = metrics.losses_at(session, job_id, {row.step for row in page.items})
    now = time.time()
    items = [views.checkpoint_view(row, now, kept, losses) for row in page.items]
    return schemas.Items(items=items, next_cursor=page.next_cursor)


@router.delete(
    "/checkpoints/{checkpoint_id}",
    responses=changes(*OF_A_JOB, CheckpointNotFound, CheckpointNeeded, NotRemoved),
)
async def delete_checkpoint(
    request: Request,
    control: Control,
    job_id: JobId,
    checkpoint_id: CheckpointId,
    force: Annotated[
        bool, Query(description="Also delete the newest complete one, which the job would continue from")
    ] = False,
) -> schemas.Checkpoint:
    """Delete a checkpoint and its files permanently. The newest complete checkpoint of a job that may continue is only
    deleted with `force`; one that is being saved or restored from is never deleted."""
    threads = read_threads_of(request).deletions
    deleted = await threads.run(lambda: control.delete_checkpoint(job_id, checkpoint_id, force))
    return views.checkpoint_view(deleted, time.time())


@router.post(
    "/checkpoints/{checkpoint_id}/export",
    status_code=202,
    openapi_extra=json_request(requests.ExportRequest),
    responses=changes(
        *OF_A_JOB,
        CheckpointNotFound,
        ExportNotPossible,
        JobBeingDeleted,
        MalformedJson,
    ),
)
async def export_checkpoint(
    request: Request,
    control: Control,
    job_id: JobId,
    checkpoint_id: CheckpointId,
    wanted: Annotated[requests.ExportRequest, Depends(body_as(requests.ExportRequest))],
) -> schemas.Export:
    """Export the weights of a complete checkpoint to a folder on the service's machine. Returns immediately;
    `get_export` reports the progress."""
    slow, about = read_threads_of(request).slow, (job_id, checkpoint_id, wanted.to, wanted.format, wanted.dtype)
    row = await slow.run(lambda: control.exports.begin(*about))
    return views.export_view(row, row.updated_at)


@router.get("/exports", responses=reads(*OF_A_JOB))
def list_exports(control: Control, job_id: JobId) -> schemas.Items[schemas.Export]:
    """The newest hundred exports of the job's checkpoints, newest first."""
    with control.store.read() as session:
        jobs.get(session, job_id)
        rows, now = exports.of_job(session, job_id), leases.now(session)
    return schemas.Items(items=[views.export_view(row, now) for row in rows])


@router.get("/exports/{export_id}", responses=reads(*OF_A_JOB, ExportNotFound))
def get_export(control: Control, job_id: JobId, export_id: ExportId) -> schemas.Export:
    """Progress and result of an export."""
    with control.store.read() as session:
        jobs.get(session, job_id)
        row, now = exports.get(session, job_id, export_id), leases.now(session)
    return views.export_view(row, now)
