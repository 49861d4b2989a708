"""Results of calibrations."""

from __future__ import annotations

from fastapi import APIRouter

from manta.api import schemas, views
from manta.api.parameters import Control
from manta.api.planning import job_measurements
from manta.api.problems import reads
from manta.service.planner.machines import kept
from manta.workers.paths import Paths
from manta.workers.system.resources import node_type

router = APIRouter(prefix="/v1/machines", tags=["plans"])


@router.get("", responses=reads())
def list_machines(control: Control) -> schemas.Items[schemas.Machine]:
    """Types of nodes measured by `manta calibrate`, stored in the home of the control plane that answers, and types
    that jobs have refined."""
    own, folder, seen = node_type(), Paths.of(control.home).machines, job_measurements(control)
    machines = [views.machine_view(each, own, seen.of_type(each.name, folder)) for each in kept(folder)]
    for name in sorted(seen.by_type.keys() - {machine.name for machine in machines}):
        if (refined := seen.of_type(name, folder)) is not None:
            machines.append(views.refined_machine_view(name, seen.newest(name), own, refined))
    return schemas.Items[schemas.Machine](items=machines, next_cursor=None)
