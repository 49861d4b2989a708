"""What calibrations have found."""

from __future__ import annotations

from fastapi import APIRouter

from api import schemas, views
from api.parameters import Control
from api.problem_codes import reads
from service.machines import kept
from workers.paths import Paths
from workers.system.processor import node_type

router = APIRouter(prefix="/v1/machines", tags=["plans"])


@router.get("", responses=reads())
def list_machines(control: Control) -> schemas.Items[schemas.Machine]:
    """Types of node that `manta calibrate` has measured in the home of the control plane that answers."""
    own = node_type()
    machines = [views.machine_view(each, own) for each in kept(Paths.of(control.home).machines)]
    return schemas.Items[schemas.Machine](items=machines, next_cursor=None)
