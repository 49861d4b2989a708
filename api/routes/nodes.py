"""What can be done to one machine."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from api import schemas
from api.parameters import Control

router = APIRouter(prefix="/v1/nodes/{node_id}", tags=["cluster"])

NodeId = Annotated[str, Path(pattern="^[0-9a-f]{4,64}$", description="Id of a node, or enough of its start.")]


@router.post("/drain", status_code=202)
def drain(control: Control, node_id: NodeId, wanted: schemas.DrainRequest) -> schemas.Node:
    """Have all jobs leave the node before the deadline, without a step done again where there is room elsewhere."""
    return schemas.Node.model_validate(control.drain(node_id, wanted.deadline_seconds))
