"""The cluster's nodes, and draining them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request, Response

from manta.api import requests, schemas
from manta.api.openapi import json_request
from manta.api.parameters import Control, body_as
from manta.api.problems import DATABASE_UNAVAILABLE, MalformedJson, changes, reads
from manta.api.security.access import Caller
from manta.api.threads import read_threads_of
from manta.service.cluster.errors import ClusterUnavailable, NodeLeaving, NodeNotFound, NodeUnreachable
from manta.service.control.control_plane import ControlPlane
from manta.service.ids import NODE_ID_PATTERN
from manta.service.store import jobs

router = APIRouter(prefix="/v1", tags=["cluster"])

NodeId = Annotated[str, Path(pattern=NODE_ID_PATTERN, description="Id of a node, or a unique prefix.")]


@router.get("/cluster", response_model=schemas.Cluster, responses=reads(ClusterUnavailable, DATABASE_UNAVAILABLE))
async def get_cluster(request: Request, control: Control, caller: Caller) -> Response:
    """Nodes, their GPUs or slots, and the ranks of the caller's jobs on them. Free capacity accounts for the jobs of
    all projects."""
    body = await read_threads_of(request).nodes.run(lambda: _cluster(control, caller.bound))
    return Response(body, media_type="application/json")


@router.post("/cluster/check", responses=changes(ClusterUnavailable, DATABASE_UNAVAILABLE))
async def check_cluster(request: Request, control: Control) -> schemas.ClusterCheck:
    """Check whether the nodes can connect to each other's ports; in large clusters a sample of nodes, each with a
    sample of others. Takes a few seconds."""
    return schemas.ClusterCheck.model_validate(await read_threads_of(request).slow.run(control.check_cluster))


@router.post(
    "/nodes/{node_id}/drain",
    status_code=202,
    openapi_extra=json_request(requests.DrainRequest),
    responses=changes(
        MalformedJson,
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
    "/nodes/{node_id}/drain",
    responses=changes(
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


def _cluster(control: ControlPlane, bound: str | None) -> str:
    cluster = control.cluster()
    if bound is not None:
        _remove_ranks_of_other_projects(control, cluster["nodes"], bound)
    return schemas.Cluster.model_validate(cluster).model_dump_json()


def _remove_ranks_of_other_projects(control: ControlPlane, nodes: Collection[dict[str, Any]], project: str) -> None:
    placed = {rank["job"] for node in nodes for rank in node.get("ranks", ())}
    own = control.store.query(jobs.of_project, placed, project)
    for node in nodes:
        node["ranks"] = [rank for rank in node.get("ranks", ()) if rank["job"] in own]
