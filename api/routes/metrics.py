"""A job's metrics over its steps."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated

from fastapi import APIRouter, BackgroundTasks, Query, Response
from fastapi.exceptions import RequestValidationError
from pydantic_core import to_json
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from api import schemas
from api.access import JobId
from api.parameters import AfterStep, Control
from api.problem_codes import OF_A_JOB, reads
from api.threads import Threads
from service.store import JobNotFound, Store, jobs, metric_bins, metrics
from service.store.tables import METRIC_NAMES
from workers.nonfinite import spell_series

router = APIRouter(prefix="/v1/jobs/{job_id}/metrics", tags=["metrics"])

_NAMES = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}(,[A-Za-z][A-Za-z0-9_]{0,63}){0,63}")


@router.get("", response_model=schemas.MetricSeries, responses=reads(*OF_A_JOB, "invalid_parameter"))
async def get_metrics(
    control: Control,
    threads: Threads,
    job_id: JobId,
    afterwards: BackgroundTasks,
    names: Annotated[str | None, Query(description="Metric names, separated by commas; default: all")] = None,
    after_step: AfterStep = 0,
    max_points: Annotated[int, Query(ge=1, le=10_000, description="Most steps in the answer")] = 1000,
) -> Response:
    """Metrics, thinned out to `max_points` steps: the first, the last, and the highest losses in between."""
    body, behind = await threads.run(partial(_read, control.store, job_id, _names(names), after_step, max_points))
    if behind:
        afterwards.add_task(_catch_up, control.store, job_id)
    return Response(body, media_type="application/json", background=afterwards)


def _read(store: Store, job_id: str, names: Sequence[str], after_step: int, max_points: int) -> tuple[bytes, bool]:
    """The series, and whether bins are missing. Ten thousand numbers are not worth a look at each by Pydantic."""
    with store.read() as session:
        behind = metric_bins.is_behind(session, jobs.get(session, job_id))
        points = metrics.series(session, job_id, names, after_step, max_points)
    spelled = {name: spell_series(numbers) for name, numbers in points.series.items()}
    return to_json({"steps": points.steps, "series": spelled}), behind


async def _catch_up(store: Store, job_id: str) -> None:
    """Make the bins that are missing, so that the next answer comes quickly; whoever else writes gets in between."""
    with contextlib.suppress(JobNotFound, SQLAlchemyError):  # whoever asks next tries again
        while await store.write_async(partial(_catch_up_some, job_id=job_id)):
            pass


def _catch_up_some(session: Session, job_id: str) -> bool:
    return metric_bins.catch_up(session, jobs.get(session, job_id, lock=True))


def _names(text: str | None) -> tuple[str, ...]:
    """The names in a comma-separated list, each once; `step` is always there and needs no asking for."""
    if text is None:
        return METRIC_NAMES
    if not _NAMES.fullmatch(text):
        message = "must be at most 64 metric names, separated by commas, such as loss,tokens_per_second"
        raise RequestValidationError([{"loc": ("query", "names"), "msg": message, "type": "value_error"}])
    return tuple(name for name in dict.fromkeys(text.split(",")) if name != "step")
