"""Plans: estimates for a layout, or the best layouts, before anything runs; and the results of calibrations that they
use."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from manta.api import requests, schemas, views
from manta.api.openapi import json_request
from manta.api.parameters import Body, Control
from manta.api.planning import cpu_node, current_cluster, gpus, job_measurements, refined_cluster, with_shape
from manta.api.problems import DATABASE_UNAVAILABLE, INVALID_SPEC, UNSUPPORTED, MalformedJson, changes, reads
from manta.api.security.access import request_of_caller
from manta.api.threads import FilesTimeout, read_threads_of
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.planner.answer import to_json
from manta.service.planner.machines import kept
from manta.service.planner.request import read_request
from manta.workers.paths import Paths
from manta.workers.system.resources import node_type

router = APIRouter(prefix="/v1", tags=["plans"])


@router.post(
    "/plans",
    openapi_extra=json_request(requests.PlanDocument),
    responses=changes(MalformedJson, INVALID_SPEC, UNSUPPORTED, ClusterUnavailable, FilesTimeout, DATABASE_UNAVAILABLE),
)
async def make_plans(request: Request, control: Control, document: Body) -> schemas.Plans:
    """Estimate the time and memory of a layout on a cluster, or with `parallel: auto` find the best layouts. Nothing is
    stored."""
    request_of_caller(request).changes_nothing = True

    threads = read_threads_of(request)
    document = await with_shape(document, control, threads.files)

    def plans(document: Any) -> schemas.Plans:
        wanted = read_request(document, current_cluster(control), cpu_node(control), gpus(control))
        wanted = replace(wanted, cluster=refined_cluster(control, wanted.cluster))
        return schemas.Plans.model_validate(to_json(wanted, wanted.answer()))

    return await threads.searches.run(partial(plans, document))


@router.get("/machines", responses=reads())
def list_machines(control: Control) -> schemas.Items[schemas.Machine]:
    """Types of nodes measured by `manta calibrate`, stored in the home of the control plane that answers, and types
    that jobs have refined."""
    own, folder, seen = node_type(), Paths.of(control.home).machines, job_measurements(control)
    machines = [views.machine_view(each, own, seen.of_type(each.name, folder)) for each in kept(folder)]
    for name in sorted(seen.by_type.keys() - {machine.name for machine in machines}):
        if (refined := seen.of_type(name, folder)) is not None:
            machines.append(views.refined_machine_view(name, seen.newest(name), own, refined))
    return schemas.Items[schemas.Machine](items=machines, next_cursor=None)
