"""A job's ledger."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query

from manta.api import schemas, views
from manta.api.parameters import Control
from manta.api.problems import OF_A_JOB, reads
from manta.api.security.access import JobId
from manta.service.errors import InvalidParameter
from manta.service.store import ledgers

router = APIRouter(prefix="/v1/jobs/{job_id}/ledger", tags=["ledger"])


@router.get("", responses=reads(*OF_A_JOB, InvalidParameter))
def get_ledger(
    control: Control,
    job_id: JobId,
    intervals: Annotated[bool, Query(description="Whether to include the timeline")] = False,
) -> schemas.Ledger:
    """Every second of the job by class, from its submission to its end, or until now."""
    return views.ledger_view(control.store.query(ledgers.of_job, job_id, time.time()), intervals)
