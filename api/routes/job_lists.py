"""Lists of jobs, counts by state, and sparklines of losses."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.exceptions import RequestValidationError

from manta.api import schemas
from manta.api.app_state import state_of
from manta.api.caches import MAX_JOBS
from manta.api.parameters import Control, Cursor, Limit
from manta.api.problems import DATABASE_UNAVAILABLE, reads
from manta.api.security.access import Caller
from manta.api.threads import read_threads_of
from manta.service.errors import InvalidParameter
from manta.service.ids import is_job_id
from manta.service.states import STATE_NAMES
from manta.service.store import job_rows
from manta.service.store.job_rows import JobFilter, JobOrder

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_MAX_LABELS = 16
_STATES = Query(
    description=f"Only jobs in one of these states; may be repeated or separated by commas: {', '.join(STATE_NAMES)}"
)
_LABELS = Query(description="Only jobs with this label, key=value, or key for any value; repeated: with all labels")


def _wanted_jobs(
    caller: Caller,
    state: Annotated[list[str] | None, _STATES] = None,
    name: Annotated[str | None, Query(max_length=100, description="Only jobs with exactly this name")] = None,
    search: Annotated[
        str | None, Query(min_length=1, max_length=100, description="Only jobs whose name or id contains this")
    ] = None,
    label: Annotated[list[str] | None, _LABELS] = None,
    owner: Annotated[
        str | None, Query(max_length=100, description="Only jobs of this user, or submitted with the key of this name")
    ] = None,
) -> JobFilter:
    return JobFilter(_states(state or []), name, search, _labels(label or []), owner, caller.bound)


Wanted = Annotated[JobFilter, Depends(_wanted_jobs)]


@router.get("", response_model=schemas.Items[schemas.Job], responses=reads(InvalidParameter, DATABASE_UNAVAILABLE))
async def list_jobs(
    request: Request,
    control: Control,
    wanted: Wanted,
    sort: Annotated[schemas.JobSort, Query(description="Sort key")] = "created",
    order: Annotated[
        schemas.Direction, Query(description="Jobs without a value come last in both directions")
    ] = "desc",
    limit: Limit = 50,
    cursor: Cursor = None,
    spec: Annotated[bool, Query(description="Whether to include each job's spec; false makes the page smaller")] = True,
) -> Response:
    """Jobs; by default the newest first."""
    rendered, asked = state_of(request.app).rendered_pages, (wanted, JobOrder(sort, order == "desc"), limit, cursor)
    threads = read_threads_of(request).lists
    body = await threads.run(control.store, lambda: rendered.page(control.store, *asked, with_spec=spec))
    return Response(body, media_type="application/json")


@router.get("/counts", responses=reads(InvalidParameter, DATABASE_UNAVAILABLE))
def count_jobs(control: Control, wanted: Wanted) -> schemas.JobCounts:
    """Number of jobs in each state, with the same filters as the list."""
    with control.store.read_once() as connection:
        counted = job_rows.counts(connection, wanted)
    return schemas.JobCounts(
        total=sum(counted.values()), by_state={state: counted.get(state, 0) for state in STATE_NAMES}
    )


@router.get(
    "/sparklines",
    response_model=schemas.Items[schemas.Sparkline],
    responses=reads(InvalidParameter, DATABASE_UNAVAILABLE),
)
async def list_sparklines(
    request: Request,
    control: Control,
    caller: Caller,
    jobs: Annotated[str, Query(max_length=20 * MAX_JOBS, description=f"At most {MAX_JOBS} ids, separated by commas")],
) -> Response:
    """Losses of several jobs, downsampled for a sparkline in a table. Jobs that the caller cannot access are
    omitted."""
    job_ids = tuple(dict.fromkeys(jobs.split(",")))
    if len(job_ids) > MAX_JOBS or not all(map(is_job_id, job_ids)):
        raise _refused("jobs", f"must be at most {MAX_JOBS} ids of jobs, separated by commas")
    rendered, threads = state_of(request.app).rendered_sparklines, read_threads_of(request).series
    body = await threads.run(control.store, lambda: rendered.some(control.store, job_ids, caller.bound))
    return Response(body, media_type="application/json")


def _states(given: list[str]) -> tuple[str, ...]:
    """The distinct states in a parameter that may be repeated. Raises RequestValidationError."""
    states = {state for text in given for state in text.split(",")}
    if unknown := sorted(states - set(STATE_NAMES)):
        raise _refused("state", f"{unknown[0][:100]!r} is not a state; states are {', '.join(STATE_NAMES)}")
    return tuple(sorted(states))


def _labels(given: list[str]) -> tuple[tuple[str, str | None], ...]:
    """The labels in a parameter that may be repeated. Raises RequestValidationError."""
    if len(given) > _MAX_LABELS:
        raise _refused("label", f"at most {_MAX_LABELS} labels per request")
    parts = [text.partition("=") for text in dict.fromkeys(given)]
    if not all(key for key, _, _ in parts):
        raise _refused("label", "must be key=value, or a key alone")
    return tuple((key, value if equals else None) for key, equals, value in parts)


def _refused(parameter: str, rule: str) -> RequestValidationError:
    return RequestValidationError([{"loc": ("query", parameter), "msg": rule, "type": "value_error"}])
