"""Placement and state of a job's ranks."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from manta.api import schemas, views
from manta.api.parameters import AfterStep, Control
from manta.api.problems import OF_A_JOB, reads
from manta.api.security.access import JobId
from manta.api.threads import read_threads_of
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.control.running_ranks import NoRanks, ObservedWaits, RankNotFound, RankTimeout
from manta.service.store import jobs, ranks
from manta.service.stored_specs import SpecNotUnderstood, stored_spec

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["ranks"])

RankPath = Annotated[int, Path(ge=0, le=10**8, description="Global rank")]


@router.get("/ranks", responses=reads(*OF_A_JOB))
def list_ranks(control: Control, job_id: JobId) -> schemas.Items[schemas.Rank]:
    """All ranks of the job's current gang, sorted by number, with samples of their last few seconds."""
    with control.store.read() as session:
        layout = views.known_layout(jobs.get(session, job_id))
        rows = ranks.of_job(session, job_id)
        numbers = ranks.newest_numbers(session, job_id)
    return schemas.Items(items=views.rank_views(rows, numbers, layout))


@router.get("/ranks/history", responses=reads(*OF_A_JOB))
def get_rank_history(
    control: Control,
    job_id: JobId,
    after_step: AfterStep = 0,
    max_points: Annotated[
        int, Query(ge=1, le=ranks.SLOTS, description="Maximum number of samples; fewer for jobs with many ranks")
    ] = ranks.SLOTS,
) -> schemas.RankHistory:
    """Own times of all ranks over the newest samples, taken at most every two seconds. Samples from before a change of
    the number of ranks, or of steps that were redone, are omitted."""
    with control.store.read() as session:
        jobs.get(session, job_id)
        history = ranks.history(session, job_id, after_step, max_points)
    return views.answer(schemas.RankHistory, history)


@router.get("/experts", responses=reads(*OF_A_JOB, SpecNotUnderstood))
def get_expert_tokens(control: Control, job_id: JobId) -> schemas.ExpertTokens:
    """How many tokens chose each expert in the last step of the newest sample; empty for a job without experts."""
    with control.store.read() as session:
        spec = stored_spec(jobs.get(session, job_id)).spec
        counted = ranks.expert_tokens(session, job_id)
    return views.expert_tokens_view(spec, counted)


@router.get(
    "/waits",
    response_model=schemas.Waits,
    responses=reads(*OF_A_JOB, NoRanks, SpecNotUnderstood, ClusterUnavailable),
)
async def get_waits(request: Request, control: Control, job_id: JobId) -> Response:
    """Which ranks wait for which, as reported by all agents; at most half a second old."""
    body = await read_threads_of(request).nodes.run(lambda: _waits(control.waits(job_id)).model_dump_json())
    return Response(body, media_type="application/json")


def _waits(seen: ObservedWaits) -> schemas.Waits:
    return schemas.Waits(
        at=seen.at,
        ranks=[schemas.WaitingRank(**vars(rank)) for rank in seen.waits.ranks],
        culprits=list(seen.waits.culprits),
        sentence=seen.waits.sentence,
    )


@router.get(
    "/ranks/{rank}/stack",
    responses=reads(*OF_A_JOB, RankNotFound, NoRanks, RankTimeout, ClusterUnavailable),
)
async def get_rank_stack(request: Request, control: Control, job_id: JobId, rank: RankPath) -> schemas.RankStack:
    """The current stacks of all threads of a rank's trainer, which keeps running. They are also written to its log."""
    stack = await read_threads_of(request).nodes.run(lambda: control.stack(job_id, rank))
    return views.answer(schemas.RankStack, stack)
