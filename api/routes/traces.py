"""Traces of a job: single steps, recorded action by action; and the time of its steps by part."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from manta.api import requests, schemas
from manta.api.app_state import state_of
from manta.api.openapi import json_request
from manta.api.parameters import Control, body_as
from manta.api.planning import current_cluster
from manta.api.problems import OF_A_JOB, MalformedJson, changes, reads
from manta.api.schemas import traces as trace_schemas
from manta.api.security.access import JobId
from manta.api.threads import read_threads_of
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.control.control_plane import ControlPlane
from manta.service.job.inbox import Trace
from manta.service.planner.hardware import Cluster
from manta.service.planner.request import for_job
from manta.service.step_traces.reading import NothingMeasured, PlannerCluster, TraceReader
from manta.service.store import step_traces
from manta.service.store.errors import TraceNotFound, TraceNotPossible
from manta.service.stored_specs import SpecNotUnderstood
from manta.workers.config import JobSpec
from manta.workers.spec.problems import SpecError

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["traces"])
TraceId = Annotated[str, Path(pattern=r"^trace_[1-9][0-9]{0,8}$", description="Id of one of the job's traces")]
PERFETTO, GZIP = "application/vnd.perfetto.trace", "application/gzip"


def traces_of(request: Request) -> TraceReader:
    """The app's reader of traces."""
    return state_of(request.app).traces


Traces = Annotated[TraceReader, Depends(traces_of)]


@router.post(
    "/traces",
    status_code=202,
    openapi_extra=json_request(requests.TraceRequest),
    responses=changes(*OF_A_JOB, MalformedJson, TraceNotPossible, SpecNotUnderstood),
)
def request_trace(
    control: Control,
    traces: Traces,
    job_id: JobId,
    wanted: Annotated[requests.TraceRequest, Depends(body_as(requests.TraceRequest))],
) -> trace_schemas.Trace:
    """Record the next steps of a job on all of its ranks. For a job that is queued or paused, recording starts when it
    trains."""

    def request(session: Any) -> str:
        row = step_traces.request(session, job_id, wanted.steps, wanted.step, wanted.profiler_ranks)
        return step_traces.id_of(row.number)

    made = control.store.write(request)
    control.tell(job_id, Trace())
    return trace_schemas.Trace.model_validate(next(each for each in traces.list(job_id) if each["id"] == made))


@router.get("/traces", responses=reads(*OF_A_JOB))
def list_traces(traces: Traces, job_id: JobId) -> schemas.Items[trace_schemas.Trace]:
    """A job's traces, newest first, without the actions of each rank. Only the newest few are kept."""
    return schemas.Items(items=[trace_schemas.Trace.model_validate(each) for each in traces.list(job_id)])


@router.get(
    "/traces/{trace_id}",
    response_model=trace_schemas.TraceDocument,
    responses=reads(*OF_A_JOB, TraceNotFound),
)
async def get_trace(request: Request, control: Control, traces: Traces, job_id: JobId, trace_id: TraceId) -> Response:
    """One trace with every slice of every rank, and the planner's timeline of the same step."""

    def document() -> str:
        return json.dumps(_with_times(traces.document(job_id, trace_id, planner_cluster(control))))

    return Response(await read_threads_of(request).plans.run(document), media_type="application/json")


@router.get(
    "/traces/{trace_id}/perfetto",
    response_class=Response,
    responses={
        200: {"content": {PERFETTO: {"schema": {"type": "string", "format": "binary"}}}},
        **reads(*OF_A_JOB, TraceNotFound),
    },
)
def get_trace_for_perfetto(traces: Traces, job_id: JobId, trace_id: TraceId) -> Response:
    """One trace as a file for ui.perfetto.dev: TrackEvents, as a protocol buffer."""
    headers = {"Content-Disposition": f'attachment; filename="{job_id}-{trace_id}.pftrace"'}
    return Response(traces.perfetto(job_id, trace_id), media_type=PERFETTO, headers=headers)


@router.get(
    "/traces/{trace_id}/profiles/{rank}",
    response_class=Response,
    responses={
        200: {"content": {GZIP: {"schema": {"type": "string", "format": "binary"}}}},
        **reads(*OF_A_JOB, TraceNotFound),
    },
)
def get_profile(
    traces: Traces, job_id: JobId, trace_id: TraceId, rank: Annotated[int, Path(ge=0, le=10**8)]
) -> Response:
    """The torch profile of a rank for the steps of a trace: a Chrome trace, compressed with gzip."""
    headers = {"Content-Disposition": f'attachment; filename="{job_id}-{trace_id}-rank-{rank}.json.gz"'}
    return Response(traces.profile(job_id, trace_id, rank), media_type=GZIP, headers=headers)


@router.get("/budget", responses=reads(*OF_A_JOB, NothingMeasured, SpecNotUnderstood))
async def get_budget(
    request: Request,
    control: Control,
    traces: Traces,
    job_id: JobId,
    source: Annotated[
        Literal["trace", "phases"] | None,
        Query(alias="from", description="Source of the budget; default: the newest complete trace, or the phases"),
    ] = None,
) -> trace_schemas.StepBudget:
    """Time of a job's step by part, starting from the device's peak, as measured and as estimated by the planner."""
    wanted = {"of_trace": source != "phases", "of_phases": source != "trace"}
    budget = partial(traces.budget, job_id, **wanted, cluster=planner_cluster(control))
    return trace_schemas.StepBudget.model_validate(await read_threads_of(request).plans.run(budget))


def planner_cluster(control: ControlPlane) -> PlannerCluster:
    """Returns the cluster as the planner's input; None if Ray does not respond or its devices are unknown."""

    def cluster(spec: JobSpec) -> Cluster | None:
        try:
            return for_job(spec, current_cluster(control))(None)
        except (SpecError, ClusterUnavailable):
            return None

    return cluster


def _with_times(document: dict[str, Any]) -> dict[str, Any]:
    """Converts times for the response; the rest is not validated, since it is long."""
    given = {name: document[name] for name in ("requested_at", "finished_at")}
    times = {name: None if at is None else datetime.fromtimestamp(at, UTC) for name, at in given.items()}
    return {**document, **{name: at and schemas.rfc3339(at) for name, at in times.items()}}
