"""A job's metrics over its steps."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.exceptions import RequestValidationError

from api import schemas
from api.access import JobId
from api.parameters import AfterStep, Control
from api.problem_codes import OF_A_JOB, reads
from service.store import jobs, metrics
from service.store.tables import METRIC_NAMES

router = APIRouter(prefix="/v1/jobs/{job_id}/metrics", tags=["metrics"])

_NAMES = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}(,[A-Za-z][A-Za-z0-9_]{0,63}){0,63}")


@router.get("", responses=reads(*OF_A_JOB, "invalid_parameter"))
def get_metrics(
    control: Control,
    job_id: JobId,
    names: Annotated[str | None, Query(description="Metric names, separated by commas; default: all")] = None,
    after_step: AfterStep = 0,
    max_points: Annotated[int, Query(ge=1, le=10_000, description="Most steps in the answer")] = 1000,
) -> schemas.MetricSeries:
    """Metrics, thinned out to `max_points` steps: the first, the last, and the highest losses in between."""
    with control.store.read() as session:
        jobs.get(session, job_id)
        points = metrics.series(session, job_id, _names(names), after_step, max_points)
    return schemas.MetricSeries(steps=points.steps, series=points.series)


def _names(text: str | None) -> tuple[str, ...]:
    """The names in a comma-separated list, each once; `step` is always there and needs no asking for."""
    if text is None:
        return METRIC_NAMES
    if not _NAMES.fullmatch(text):
        message = "must be at most 64 metric names, separated by commas, such as loss,tokens_per_second"
        raise RequestValidationError([{"loc": ("query", "names"), "msg": message, "type": "value_error"}])
    return tuple(name for name in dict.fromkeys(text.split(",")) if name != "step")
