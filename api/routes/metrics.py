"""A job's metrics by step."""

from __future__ import annotations

import contextlib
import re
from functools import partial
from typing import Annotated

from fastapi import APIRouter, BackgroundTasks, Query, Request, Response
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from manta.api import schemas
from manta.api.app_state import state_of
from manta.api.parameters import AfterStep, Control, refused
from manta.api.problems import OF_A_JOB, reads
from manta.api.security.access import JobId
from manta.api.threads import read_threads_of
from manta.service.store import Store, jobs, metric_bins
from manta.service.store.errors import JobNotFound
from manta.service.store.metric_points import LAST_STEP

router = APIRouter(prefix="/v1/jobs/{job_id}/metrics", tags=["metrics"])

_NAMES = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}(,[A-Za-z][A-Za-z0-9_]{0,63}){0,63}")


@router.get("", response_model=schemas.MetricSeries, responses=reads(*OF_A_JOB))
async def get_metrics(
    request: Request,
    control: Control,
    job_id: JobId,
    afterwards: BackgroundTasks,
    names: Annotated[str | None, Query(description="Metric names, separated by commas; default: all")] = None,
    after_step: AfterStep = 0,
    until_step: Annotated[
        int, Query(ge=0, le=LAST_STEP, description="Only steps up to this one; default: all")
    ] = LAST_STEP,
    every: Annotated[
        int,
        Query(
            ge=1,
            le=LAST_STEP,
            description="Only steps that are multiples of this, such as train.validate_every, and the job's last step",
        ),
    ] = 1,
    max_points: Annotated[int, Query(ge=1, le=10_000, description="Maximum number of steps in the response")] = 1000,
) -> Response:
    """Metrics, downsampled to `max_points` steps: the first, the last, and the highest losses in between; with `every`
    at equal distances."""
    rendered = state_of(request.app).rendered_series
    read = partial(rendered.one, control.store, job_id, _names(names), after_step, max_points, until_step, every)
    series = await read_threads_of(request).series.run(control.store, read)
    if series.is_lagging:
        afterwards.add_task(_catch_up, control.store, job_id)
    return Response(series.body, media_type="application/json", background=afterwards)


async def _catch_up(store: Store, job_id: str) -> None:
    """Create missing bins, so that the next response is fast; other writers are not blocked."""
    with contextlib.suppress(JobNotFound, SQLAlchemyError):  # the next request tries again
        while await store.write_async(partial(_catch_up_batch, job_id=job_id)):
            pass


def _catch_up_batch(session: Session, job_id: str) -> bool:
    return metric_bins.catch_up(session, jobs.get(session, job_id, lock=True))


def _names(text: str | None) -> tuple[str, ...] | None:
    """The distinct names in a comma-separated list; `step` is always included. None: all."""
    if text is None:
        return None
    if not _NAMES.fullmatch(text):
        message = "must be at most 64 metric names, separated by commas, such as loss,tokens_per_second"
        raise refused("names", message)
    return tuple(name for name in dict.fromkeys(text.split(",")) if name != "step")
