"""Plans: estimates for a layout, or the best layouts, before anything runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from manta.api import requests, schemas
from manta.api.openapi import json_request
from manta.api.parameters import Body, Control
from manta.api.planning import cpu_node, current_cluster, gpus, refined_cluster
from manta.api.problems import DATABASE_UNAVAILABLE, INVALID_SPEC, UNSUPPORTED, MalformedJson, changes
from manta.api.security.access import request_of_caller
from manta.api.threads import FilesTimeout, read_threads_of
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.planner.answer import to_json
from manta.service.planner.request import read_request
from manta.workers.spec.submitted import with_shape_of_weights

router = APIRouter(prefix="/v1/plans", tags=["plans"])


@router.post(
    "",
    openapi_extra=json_request(requests.PlanDocument),
    responses=changes(MalformedJson, INVALID_SPEC, UNSUPPORTED, ClusterUnavailable, FilesTimeout, DATABASE_UNAVAILABLE),
)
async def make_plans(request: Request, control: Control, document: Body) -> schemas.Plans:
    """Estimate the time and memory of a layout on a cluster, or with `parallel: auto` find the best layouts. Nothing is
    stored."""
    request_of_caller(request).changes_nothing = True

    threads = read_threads_of(request)
    if isinstance(document, dict) and isinstance(document.get("model"), dict) and "from" in document["model"]:
        document = await threads.files.run(partial(with_shape_of_weights, document, control.data_roots))

    def plans(document: Any) -> schemas.Plans:
        wanted = read_request(document, current_cluster(control), cpu_node(control), gpus(control))
        wanted = replace(wanted, cluster=refined_cluster(control, wanted.cluster))
        return schemas.Plans.model_validate(to_json(wanted, wanted.answer()))

    return await threads.searches.run(partial(plans, document))
