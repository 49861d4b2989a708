"""Draining nodes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request

from manta.api import requests, schemas
from manta.api.openapi import json_request
from manta.api.parameters import Control, body_as
from manta.api.problems import DATABASE_UNAVAILABLE, MalformedJson, changes
from manta.api.threads import read_threads_of
from manta.service.cluster.errors import ClusterUnavailable, NodeLeaving, NodeNotFound, NodeUnreachable
from manta.service.errors import InvalidParameter
from manta.service.ids import NODE_ID_PATTERN

router = APIRouter(prefix="/v1/nodes/{node_id}", tags=["cluster"])

NodeId = Annotated[str, Path(pattern=NODE_ID_PATTERN, description="Id of a node, or a unique prefix.")]


@router.post(
    "/drain",
    status_code=202,
    openapi_extra=json_request(requests.DrainRequest),
    responses=changes(
        MalformedJson,
        InvalidParameter,
        NodeNotFound,
        NodeUnreachable,
        ClusterUnavailable,
        DATABASE_UNAVAILABLE,
    ),
)
async def drain_node(
    request: Request,
    control: Control,
    node_id: NodeId,
    wanted: Annotated[requests.DrainRequest, Depends(body_as(requests.DrainRequest))],
) -> schemas.Node:
    """Drain a node: all jobs move away before the deadline, without redoing steps if there is room elsewhere."""
    drained = await read_threads_of(request).nodes.run(lambda: control.drain(node_id, wanted.deadline_seconds))
    return schemas.Node.model_validate(drained)


@router.delete(
    "/drain",
    responses=changes(
        InvalidParameter,
        NodeNotFound,
        NodeLeaving,
        NodeUnreachable,
        ClusterUnavailable,
        DATABASE_UNAVAILABLE,
    ),
)
async def undrain_node(request: Request, control: Control, node_id: NodeId) -> schemas.Node:
    """End a node's drain: ranks are placed there again. Jobs that have left do not come back by themselves."""
    stays = await read_threads_of(request).nodes.run(lambda: control.undrain(node_id))
    return schemas.Node.model_validate(stays)
