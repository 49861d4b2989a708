"""The machines that jobs run on."""

from __future__ import annotations

from fastapi import APIRouter

from api import schemas
from api.parameters import Control
from api.problem_codes import reads

router = APIRouter(prefix="/v1/cluster", tags=["cluster"])


@router.get("", responses=reads("cluster_unavailable", "database_unavailable"))
def get_cluster(control: Control) -> schemas.Cluster:
    """Nodes, their GPUs or slots, and what runs where."""
    return schemas.Cluster.model_validate(control.cluster())
