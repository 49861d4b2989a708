"""Fault injection, for testing recovery."""

from __future__ import annotations

import secrets
from typing import Annotated

from fastapi import APIRouter, Depends

from manta.api import requests, schemas
from manta.api.openapi import json_request
from manta.api.parameters import Control, body_as
from manta.api.problems import OF_A_JOB, MalformedJson, changes
from manta.api.security.access import Caller, Forbidden, JobId
from manta.api.security.permissions import NEEDS
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.control.faults import FaultNotConfirmed, FaultNotPossible, FaultsNotAllowed
from manta.service.store import jobs
from manta.service.stored_specs import SpecNotUnderstood
from manta.workers.protocol.messages import Fault
from manta.workers.protocol.requests import Arm

router = APIRouter(prefix="/v1/jobs/{job_id}/faults", tags=["faults"])


@router.post(
    "",
    status_code=202,
    openapi_extra=json_request(requests.FaultRequest),
    responses=changes(
        *OF_A_JOB,
        MalformedJson,
        FaultsNotAllowed,
        FaultNotPossible,
        SpecNotUnderstood,
        ClusterUnavailable,
    ),
)
def inject_fault(
    control: Control,
    caller: Caller,
    job_id: JobId,
    wanted: Annotated[requests.FaultRequest, Depends(body_as(requests.FaultRequest))],
) -> schemas.Fault:
    """Inject a fault into a running job. Rejected unless the service was started with `--allow-faults`. The fault
    `node` requires a key for all projects, since it also kills other projects' processes on that node."""
    if wanted.kind == "node" and not NEEDS["drain_node"].is_met_by(caller):
        raise Forbidden(NEEDS["drain_node"], caller)
    control.store.query(jobs.get, job_id)
    fault = Fault(id=f"fault_{secrets.token_hex(6)}", **wanted.model_dump())
    try:
        control.tell(job_id, Arm(fault))
    except FaultNotConfirmed as unconfirmed:
        return schemas.Fault(id=fault.id, message=f"{fault.sentence}: {unconfirmed}", confirmed=False)
    return schemas.Fault(id=fault.id, message=fault.sentence)
