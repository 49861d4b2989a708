"""The cluster's nodes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastapi import APIRouter, Request, Response

from manta.api import schemas
from manta.api.parameters import Control
from manta.api.problems import DATABASE_UNAVAILABLE, changes, reads
from manta.api.security.access import Caller
from manta.api.threads import read_threads_of
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.control.control_plane import ControlPlane
from manta.service.store import jobs

router = APIRouter(prefix="/v1/cluster", tags=["cluster"])


@router.get("", response_model=schemas.Cluster, responses=reads(ClusterUnavailable, DATABASE_UNAVAILABLE))
async def get_cluster(request: Request, control: Control, caller: Caller) -> Response:
    """Nodes, their GPUs or slots, and the ranks of the caller's jobs on them. Free capacity accounts for the jobs of
    all projects."""
    body = await read_threads_of(request).nodes.run(lambda: _cluster(control, caller.bound))
    return Response(body, media_type="application/json")


def _cluster(control: ControlPlane, bound: str | None) -> str:
    cluster = control.cluster()
    if bound is not None:
        _remove_ranks_of_other_projects(control, cluster["nodes"], bound)
    return schemas.Cluster.model_validate(cluster).model_dump_json()


@router.post("/check", responses=changes(ClusterUnavailable, DATABASE_UNAVAILABLE))
async def check_cluster(request: Request, control: Control) -> schemas.ClusterCheck:
    """Check whether the nodes can connect to each other's ports; in large clusters a sample of nodes, each with a
    sample of others. Takes a few seconds."""
    return schemas.ClusterCheck.model_validate(await read_threads_of(request).slow.run(control.check_cluster))


def _remove_ranks_of_other_projects(control: ControlPlane, nodes: Collection[dict[str, Any]], project: str) -> None:
    placed = {rank["job"] for node in nodes for rank in node.get("ranks", ())}
    own = control.store.query(jobs.of_project, placed, project)
    for node in nodes:
        node["ranks"] = [rank for rank in node.get("ranks", ()) if rank["job"] in own]
