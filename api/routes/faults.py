"""Faults in jobs, for those who want to see a job survive them."""

from __future__ import annotations

import secrets

from fastapi import APIRouter

from api import schemas
from api.parameters import Control, JobId
from service.store import jobs
from workers.protocol.messages import Fault

router = APIRouter(prefix="/v1/jobs/{job_id}/faults", tags=["faults"])


@router.post("", status_code=202)
def inject(control: Control, job_id: JobId, wanted: schemas.FaultRequest) -> schemas.Fault:
    """Make a fault in a running job. Refused unless the service was started with `--allow-faults`."""
    with control.store.read() as session:
        jobs.get(session, job_id)
    fault = Fault(id=f"fault_{secrets.token_hex(6)}", **wanted.model_dump())
    control.inject(job_id, fault)
    return schemas.Fault(id=fault.id, message=fault.sentence)
