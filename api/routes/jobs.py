"""Jobs: list, count, submit, read, change, delete, resize, pause, resume, cancel, retry."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel

from manta.api import requests, schemas, views
from manta.api.app_state import state_of
from manta.api.caches import MAX_JOBS
from manta.api.openapi import json_request
from manta.api.parameters import (
    Body,
    Control,
    Cursor,
    IdempotencyKey,
    IfMatch,
    Limit,
    WaitSeconds,
    body_as,
    digest_of,
    refused,
    versions_in,
)
from manta.api.planning import cluster_for, clusters_for, plan_of_layout, with_shape
from manta.api.problems import DATABASE_UNAVAILABLE, INVALID_SPEC, OF_A_JOB, UNSUPPORTED, MalformedJson, changes, reads
from manta.api.security.access import Caller, JobId, refuse_priority, request_of_caller, while_authorized
from manta.api.security.auditing import append_with_change
from manta.api.threads import FileReads, FilesTimeout, ReadThreads, read_threads_of
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.cluster.sizes import SizeOutOfBounds
from manta.service.control.control_plane import ControlPlane
from manta.service.control.removal import NotRemoved
from manta.service.ids import is_job_id
from manta.service.job.inbox import Cancel, Pause, Resize
from manta.service.planner.submission import (
    LAYOUT_KEYS,
    Decided,
    decide,
    leaves_layout,
    not_decided,
    without_layout,
)
from manta.service.states import STATE_NAMES
from manta.service.store import job_rows, jobs, pauses_and_retries
from manta.service.store.errors import (
    IdempotencyConflict,
    IllegalTransition,
    JobBeingDeleted,
    JobBeingExported,
    JobChanged,
    JobNotFinal,
)
from manta.service.store.job_rows import JobFilter, JobOrder
from manta.service.store.tables import Job
from manta.service.stored_specs import SpecNotUnderstood, as_written
from manta.workers.config import JobSpec
from manta.workers.data.roots import named_paths
from manta.workers.spec.problems import Problem, SpecError
from manta.workers.spec.reading import parse_job_spec
from manta.workers.spec.submitted import with_vocabulary

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_MAX_LABELS = 16
_STATES = Query(
    description=f"Only jobs in one of these states; may be repeated or separated by commas: {', '.join(STATE_NAMES)}"
)
_LABELS = Query(description="Only jobs with this label, key=value, or key for any value; repeated: with all labels")
_LOCATION = {"Location": {"description": "Path of the job", "schema": {"type": "string"}}}
_ETAG = {"ETag": {"description": "`etag` of the job, for If-Match", "schema": {"type": "string"}}}
_ACTION = changes(*OF_A_JOB, IllegalTransition)
_STATE = f"^({'|'.join(STATE_NAMES)})$"

KnownState = Annotated[str | None, Query(pattern=_STATE, description="With `wait`: the state known to the client")]


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


@router.get("", response_model=schemas.Items[schemas.Job], responses=reads(DATABASE_UNAVAILABLE))
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


@router.get("/counts", responses=reads(DATABASE_UNAVAILABLE))
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
    responses=reads(DATABASE_UNAVAILABLE),
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
        raise refused("jobs", f"must be at most {MAX_JOBS} ids of jobs, separated by commas")
    rendered, threads = state_of(request.app).rendered_sparklines, read_threads_of(request).series
    body = await threads.run(control.store, lambda: rendered.some(control.store, job_ids, caller.bound))
    return Response(body, media_type="application/json")


@router.post(
    "",
    status_code=201,
    response_model=None,  # differs by status; see `responses`
    openapi_extra=json_request(JobSpec),
    responses={
        200: {"model": schemas.Job | schemas.DryRun, "description": "A repeated request, or a dry run"},
        201: {"model": schemas.SubmittedJob, "description": "The job, QUEUED", "headers": _LOCATION},
        **changes(
            MalformedJson,
            IdempotencyConflict,
            INVALID_SPEC,
            UNSUPPORTED,
            ClusterUnavailable,
            FilesTimeout,
            DATABASE_UNAVAILABLE,
        ),
    },
)
async def submit_job(
    request: Request,
    control: Control,
    caller: Caller,
    document: Body,
    idempotency_key: IdempotencyKey = None,
    dry_run: Annotated[bool, Query(description="Only check the spec")] = False,
) -> Response:
    """Check a JobSpec, decide what it leaves out (layout, precision, micro-batch size: `notes` says how), and store it
    as a QUEUED job of the key's project. With `dry_run` nothing is stored; the answer has the layout and the estimated
    time and memory of a step, on the cluster that a section `cluster` describes, as in a plan's request, or on the
    service's own."""
    about, digest = request_of_caller(request), digest_of(document)
    if idempotency_key is not None and not dry_run:
        # Before validation: the rules may have changed since, and a repeated request must return its job.
        earlier = await run_in_threadpool(_made_before, control, idempotency_key, digest, caller.project)
        if earlier is not None:
            about.changes_nothing = True
            return _json(earlier, 200)
    threads = read_threads_of(request)
    if not dry_run and _describes(document):
        problem = "describes a cluster for `manta plan` and `manta submit --dry-run`; jobs run on the service's own"
        raise SpecError([Problem("cluster", f"{problem}: leave it out")])
    decided, written = await _decided(document, control, threads)
    spec = decided.spec
    refuse_priority(caller, spec.priority)
    if dry_run:
        about.changes_nothing = True
        plan = await threads.plans.run(lambda: plan_of_layout(spec, cluster_for(document, control)))
        data_problem = await _problem_of_data(spec, control, threads)
        return _json(views.dry_run_view(spec, *plan, data_problem, decided.notes), 200)
    await _refuse_first_rows(spec, control, threads.files)

    def operation(session: Any) -> tuple[schemas.Job, bool]:
        made = jobs.create(session, spec, idempotency_key, digest, caller.project, caller.owner, decided.notes, written)
        job, created = made
        if created:
            append_with_change(session, request, job.id, 201)
        session.flush()
        return views.job_view(session, job), created

    job, created = await control.store.write_async(operation)
    about.audited, about.changes_nothing = created, not created
    if not created:
        return _json(job, 200)
    control.submitted(job.id)
    answer = schemas.SubmittedJob(**dict(job), notes=list(decided.notes))
    return _json(answer, 201, Location=f"/v1/jobs/{job.id}")


@router.get(
    "/{job_id}",
    response_model=schemas.Job,
    responses={200: {"headers": _ETAG}, **reads(*OF_A_JOB)},
)
async def get_job(
    request: Request, control: Control, job_id: JobId, wait: WaitSeconds = 0.0, state: KnownState = None
) -> Response:
    """One job. With `wait`: returns when its state differs from `state` (default: its current state) or is final, or
    after `wait` seconds."""
    if wait:
        await while_authorized(request, state_of(request.app).waits.until_changed(job_id, state, wait))
    rendered, threads = state_of(request.app).rendered_jobs, read_threads_of(request).jobs
    job = await threads.run(control.store, lambda: rendered.one(control.store, job_id))
    return Response(job.body, media_type="application/json", headers={"ETag": job.etag})


@router.get("/{job_id}/spec", responses=reads(*OF_A_JOB))
def get_job_spec(control: Control, job_id: JobId) -> schemas.WrittenSpec:
    """A job's spec as it is in force, and as it was written."""
    with control.store.read() as session:
        job = jobs.get(session, job_id)
        return schemas.WrittenSpec(spec=job.spec, written=job.submitted)


@router.patch(
    "/{job_id}",
    openapi_extra=json_request(requests.JobChanges),
    responses={
        200: {"headers": _ETAG},
        **changes(*OF_A_JOB, MalformedJson, JobChanged),
    },
)
def edit_job(
    response: Response,
    control: Control,
    caller: Caller,
    job_id: JobId,
    wanted: Annotated[requests.JobChanges, Depends(body_as(requests.JobChanges))],
    if_match: IfMatch = None,
) -> schemas.Job:
    """Change a job's name, priority or labels, in any state. Omitted fields and labels are unchanged; a null removes a
    label. With `If-Match` only if it has not been changed in the meantime."""
    expected = versions_in(if_match)
    if "priority" in wanted.given:
        refuse_priority(caller, wanted.priority)

    def operation(session: Any) -> schemas.Job:
        return views.job_view(session, jobs.edit(session, job_id, **wanted.given, expected=expected))

    job = control.store.write(operation)
    control.submitted(job_id)
    response.headers["ETag"] = job.etag or ""
    return job


@router.delete(
    "/{job_id}",
    responses=changes(*OF_A_JOB, JobNotFinal, JobBeingExported, NotRemoved, ClusterUnavailable),
)
async def delete_job(request: Request, control: Control, job_id: JobId) -> schemas.DeletedJob:
    """Delete a finished job permanently, with its database rows, checkpoints, logs and snapshots in memory. If
    something cannot be removed, the job remains and can be deleted again."""
    deletion = await read_threads_of(request).deletions.run(lambda: control.delete(job_id))
    return views.answer(schemas.DeletedJob, deletion.files, id=job_id, rows=deletion.rows)


@router.post("/{job_id}/cancel", status_code=202, responses=_ACTION)
def cancel_job(control: Control, job_id: JobId) -> schemas.Job:
    """Stop a job permanently. Its checkpoints are kept."""
    job = _changed(control, lambda session: jobs.request_cancel(session, job_id))
    control.tell(job_id, Cancel())
    return job


@router.post("/{job_id}/pause", status_code=202, responses=_ACTION)
def pause_job(control: Control, job_id: JobId) -> schemas.Job:
    """Save a job's state after the current step, in memory and as a durable checkpoint, and release its resources; a
    queued job leaves the queue."""
    job = _changed(control, lambda session: pauses_and_retries.request_pause(session, job_id))
    control.tell(job_id, Pause())
    return job


@router.post("/{job_id}/resume", status_code=202, responses=_ACTION)
def resume_job(control: Control, job_id: JobId) -> schemas.Job:
    """Continue a PAUSED job where it was paused, as soon as there are resources for it."""
    job = _changed(control, lambda session: pauses_and_retries.request_resume(session, job_id))
    control.submitted(job_id)
    return job


@router.post("/{job_id}/retry", status_code=202, responses=changes(*OF_A_JOB, IllegalTransition, JobBeingDeleted))
def retry_job(control: Control, job_id: JobId) -> schemas.Job:
    """Continue a failed job from where it failed: from its snapshots in memory, if they are still kept, or from its
    newest checkpoint."""
    job = _changed(control, lambda session: pauses_and_retries.request_retry(session, job_id))
    control.submitted(job_id)
    return job


@router.post(
    "/{job_id}/resize",
    status_code=202,
    openapi_extra=json_request(requests.Resize),
    responses=changes(*OF_A_JOB, IllegalTransition, SpecNotUnderstood, MalformedJson, SizeOutOfBounds),
)
def resize_job(
    control: Control, job_id: JobId, wish: Annotated[requests.Resize, Depends(body_as(requests.Resize))]
) -> schemas.Job:
    """Change the number of replicas, with the same global batch, as soon as there is room for them."""
    job = _changed(control, lambda session: jobs.request_resize(session, job_id, wish.data))
    control.tell(job_id, Resize())
    return job


def _made_before(control: ControlPlane, idempotency_key: str, digest: str, project: str) -> schemas.Job | None:
    with control.store.read() as session:
        job = jobs.made_before(session, idempotency_key, digest, project)
        return None if job is None else views.job_view(session, job)


def _json(answer: BaseModel, status: int, **headers: str) -> Response:
    return Response(answer.model_dump_json(), status, headers, media_type="application/json")


def _changed(control: ControlPlane, change: Callable[[Any], Job]) -> schemas.Job:
    """The job after `change` in the database."""
    return control.store.write(lambda session: views.job_view(session, change(session)))


async def _decided(document: Any, control: ControlPlane, threads: ReadThreads) -> tuple[Decided, dict[str, Any]]:
    """The JobSpec in `document` with decisions on what that leaves out, and what the user wrote. Raises SpecError."""
    checked = {key: value for key, value in document.items() if key != "cluster"} if _describes(document) else document
    spec = await _checked(without_layout(checked) if leaves_layout(checked) else checked, control, threads.files)
    written = _named(as_written(spec), document) | {key: document[key] for key in LAYOUT_KEYS if key in document}
    try:
        clusters = await threads.nodes.run(lambda: clusters_for(spec, document, control))
    except SpecError as error:
        return not_decided(spec, document, error), written
    return await threads.searches.run(lambda: decide(spec, document, *clusters)), written


def _named(written: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `written` that `document` has, without what its weights and its tokenizer filled in."""
    both = {key: (value, document[key]) for key, value in written.items() if key in document}
    return {
        key: _named(value, own) if isinstance(value, dict) and isinstance(own, dict) else value
        for key, (value, own) in both.items()
    }


def _describes(document: Any) -> bool:
    """Whether the document, of a dry run, describes a cluster."""
    return isinstance(document, dict) and "cluster" in document


async def _checked(document: Any, control: ControlPlane, files: FileReads) -> JobSpec:
    """The JobSpec in `document`. Raises SpecError."""
    document = await with_shape(document, control, files)
    spec = await run_in_threadpool(parse_job_spec, document)  # a document of a megabyte takes a while
    if foreign := control.model_packages.problems(spec):
        raise SpecError(foreign)
    # Resolving paths accesses file systems, which may be slow.
    outside = await files.run(partial(control.data_roots.problems, spec)) if named_paths(spec) else []
    if outside:
        raise SpecError(outside)
    return await files.run(partial(with_vocabulary, spec)) if spec.data.tokenizer_file is not None else spec


async def _refuse_first_rows(spec: JobSpec, control: ControlPlane, files: FileReads) -> None:
    """Raise SpecError if a file of the job, as this machine sees it, begins with something that is not a document. What
    is not known in time is found out before the job starts."""
    if not named_paths(spec):
        return
    with contextlib.suppress(FilesTimeout):
        problem = await files.run(partial(control.data_roots.problem_of_first_rows, spec))
        if problem is not None:
            raise SpecError([Problem("data", problem)])


async def _problem_of_data(spec: JobSpec, control: ControlPlane, threads: ReadThreads) -> str | None:
    """Why the data cannot be used; None also if no node has reported."""
    try:
        return await threads.files.run(lambda: control.problem_of_data(spec))
    except ClusterUnavailable:
        return None


def _states(given: list[str]) -> tuple[str, ...]:
    """The distinct states in a parameter that may be repeated. Raises RequestValidationError."""
    states = {state for text in given for state in text.split(",")}
    if unknown := sorted(states - set(STATE_NAMES)):
        raise refused("state", f"{unknown[0][:100]!r} is not a state; states are {', '.join(STATE_NAMES)}")
    return tuple(sorted(states))


def _labels(given: list[str]) -> tuple[tuple[str, str | None], ...]:
    """The labels in a parameter that may be repeated. Raises RequestValidationError."""
    if len(given) > _MAX_LABELS:
        raise refused("label", f"at most {_MAX_LABELS} labels per request")
    parts = [text.partition("=") for text in dict.fromkeys(given)]
    if not all(key for key, _, _ in parts):
        raise refused("label", "must be key=value, or a key alone")
    return tuple((key, value if equals else None) for key, equals, value in parts)
