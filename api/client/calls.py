"""Every REST call; both clients use these. A call about a job takes its id, or a name that no other job has, which
clients look up, since REST only accepts ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, TypedDict, TypeVar, Unpack
from urllib.parse import quote

from manta.api import requests, schemas
from manta.api.client.rest_call import ApiError, Call, JobPath
from manta.api.schemas import access as access_schemas
from manta.api.schemas import traces as trace_schemas
from manta.service.ids import is_job_id
from manta.workers.config.fields import JOB_NAME, MAX_CHARACTERS_OF_A_NAME

T = TypeVar("T")
MAX_LISTED = 10
"""Maximum number of jobs of one name that a user can choose from."""
_DELETION_SECONDS = 600.0  # checkpoints may be large, and file systems slow
_TRACE_SECONDS = 60.0  # a trace may have half a million slices
_SEARCH_SECONDS = 60.0  # of the planner, for `parallel: auto`


def _job(job: str, resource: str = "") -> JobPath:
    """Path of a resource of a job, given by its id or name. Raises ApiError for text that can be neither."""
    return JobPath(checked_job(job), resource)


def checked_job(job: str) -> str:
    """`job`, if it can be a job's id or name. Raises ApiError."""
    if not re.fullmatch(JOB_NAME, job) or len(job) > MAX_CHARACTERS_OF_A_NAME:
        raise no_such_job(f"no job can have the id or the name {job!r}")
    return job


def no_such_job(why: str) -> ApiError:
    """The error for a job that does not exist."""
    detail = f"{why}; `manta ps` lists the jobs"
    return ApiError(schemas.Problem(code="job_not_found", title="Not Found", status=404, detail=detail))


def submit(document: Any, idempotency_key: str | None = None) -> Call[schemas.SubmittedJob]:
    """Submit a JobSpec."""
    headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
    return Call(schemas.SubmittedJob, "POST", "/v1/jobs", body=document, headers=headers, extra_seconds=_SEARCH_SECONDS)


def dry_run(document: Any) -> Call[schemas.DryRun]:
    """Check a JobSpec and show its layout; nothing is stored."""
    return Call(schemas.DryRun, "POST", "/v1/jobs", {"dry_run": "true"}, body=document, extra_seconds=_SEARCH_SECONDS)


class JobFilterOptions(TypedDict, total=False):
    """Filters of a list of jobs."""

    search: str | None
    """Jobs with this text in their name or id."""
    labels: Sequence[str] | None
    """Jobs with all of these labels: key=value, or key for any value."""
    owner: str | None
    """Jobs of this user, or submitted with the key of this name."""


class JobListOptions(JobFilterOptions, total=False):
    """Filters and order of a list of jobs; by default those submitted last come first."""

    sort: schemas.JobSort | None
    order: schemas.Direction | None


def _named(more: Mapping[str, Any]) -> dict[str, Any]:
    """With the names of the query parameters."""
    return {"label" if name == "labels" else name: value for name, value in more.items()}


def jobs(
    state: str | Sequence[str] | None = None,
    name: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
    **more: Unpack[JobListOptions],
) -> Call[schemas.Items[schemas.Job]]:
    """A page of jobs in this state or one of these, and with exactly this name."""
    parameters = {"state": state, "name": name, "limit": limit, "cursor": cursor, **_named(more)}
    return Call(schemas.Items[schemas.Job], "GET", "/v1/jobs", parameters)


def count_jobs(
    state: str | Sequence[str] | None = None, name: str | None = None, **more: Unpack[JobFilterOptions]
) -> Call[schemas.JobCounts]:
    """How many jobs there are in each state, with the filters of `jobs`."""
    return Call(schemas.JobCounts, "GET", "/v1/jobs/counts", {"state": state, "name": name, **_named(more)})


def sparklines(job_ids: Sequence[str]) -> Call[schemas.Items[schemas.Sparkline]]:
    """Short series of the losses of at most 200 jobs."""
    return Call(schemas.Items[schemas.Sparkline], "GET", "/v1/jobs/sparklines", {"jobs": ",".join(job_ids)})


def job(job_id: str, wait: float | None = None, state: str | None = None) -> Call[schemas.Job]:
    """One job. With `wait`: as soon as its state differs from `state` (default: from its present one) or is final, and
    after `wait` seconds (at most 60) in any case."""
    return Call(schemas.Job, "GET", _job(job_id), {"wait": wait, "state": state}, extra_seconds=wait or 0.0)


def cancel(job_id: str) -> Call[schemas.Job]:
    """Stop a job for good."""
    return Call(schemas.Job, "POST", _job(job_id, "/cancel"))


def edit(
    job_id: str,
    name: str | None = None,
    priority: int | None = None,
    etag: str | None = None,
    labels: Mapping[str, str | None] | None = None,
) -> Call[schemas.Job]:
    """Change a job's name, priority or labels; a label with None is removed. With `etag`, only if the job has not been
    changed since it was read with that etag."""
    wanted = {"name": name, "priority": priority, "labels": labels}
    body = {key: value for key, value in wanted.items() if value is not None}
    headers = {} if etag is None else {"If-Match": etag}
    return Call(schemas.Job, "PATCH", _job(job_id), body=body, headers=headers)


def delete(job_id: str) -> Call[schemas.DeletedJob]:
    """Delete a job in a final state, and everything that belongs to it."""
    return Call(schemas.DeletedJob, "DELETE", _job(job_id), extra_seconds=_DELETION_SECONDS)


def pause(job_id: str) -> Call[schemas.Job]:
    """Have a job save its state and release its slots."""
    return Call(schemas.Job, "POST", _job(job_id, "/pause"))


def resume(job_id: str) -> Call[schemas.Job]:
    """Resume a PAUSED job."""
    return Call(schemas.Job, "POST", _job(job_id, "/resume"))


def retry(job_id: str) -> Call[schemas.Job]:
    """Retry a failed job."""
    return Call(schemas.Job, "POST", _job(job_id, "/retry"))


def resize(job_id: str, replicas: int) -> Call[schemas.Job]:
    """Continue a job with another number of replicas."""
    return Call(schemas.Job, "POST", _job(job_id, "/resize"), body={"data": replicas})


def metrics(
    job_id: str,
    names: Sequence[str] | None = None,
    after_step: int = 0,
    max_points: int = 1000,
    every: int | None = None,
) -> Call[schemas.MetricSeries]:
    """Metrics of a job; `names` None means all; `every`: only of steps that are multiples of this."""
    parameters = {
        "names": None if names is None else ",".join(names),
        "after_step": after_step,
        "max_points": max_points,
        "every": every,
    }
    return Call(schemas.MetricSeries, "GET", _job(job_id, "/metrics"), parameters)


class EventOptions(TypedDict, total=False):
    """Which events of a job."""

    type: str | None
    """Of these types, separated by commas."""
    generation: int | None
    rank: int | None


def events(
    job_id: str,
    cursor: str | None = None,
    limit: int = 100,
    order: schemas.Direction | None = None,
    **wanted: Unpack[EventOptions],
) -> Call[schemas.Stream[schemas.Event]]:
    """A page of a job's events, oldest first by default."""
    parameters = {"cursor": cursor, "limit": limit, "order": order, **wanted}
    return Call(schemas.Stream[schemas.Event], "GET", _job(job_id, "/events"), parameters)


def all_events(
    job_id: str | None = None, type: str | None = None, cursor: str | None = None, limit: int = 100
) -> Call[schemas.Stream[schemas.JobEvent]]:
    """A page of the events of all jobs, oldest first, optionally only those of one job, or of one type."""
    parameters = {"job": job_id, "type": type, "cursor": cursor, "limit": limit}
    return Call(schemas.Stream[schemas.JobEvent], "GET", "/v1/events", parameters)


class LogOptions(TypedDict, total=False):
    """Which lines of a log."""

    stream: str | None
    search: str | None
    regex: str | None
    level: str | None
    tail: int | None
    """Only this many lines, the newest; a stream begins with them."""
    notices: bool
    """Whether to include notices that PyTorch and Ray print about themselves; by default they are included."""


def logs(
    job_id: str, rank: int | None = None, cursor: str | None = None, limit: int = 500, **wanted: Unpack[LogOptions]
) -> Call[schemas.LogLines]:
    """A page of what a job's ranks printed; `rank` None means all, merged by time."""
    parameters = {"rank": rank, "cursor": cursor, "limit": limit, **wanted}
    return Call(schemas.LogLines, "GET", _job(job_id, "/logs"), parameters)


def ranks(job_id: str) -> Call[schemas.Items[schemas.Rank]]:
    """Where a job's ranks run."""
    return Call(schemas.Items[schemas.Rank], "GET", _job(job_id, "/ranks"))


def rank_history(job_id: str, after_step: int = 0, max_points: int = 300) -> Call[schemas.RankHistory]:
    """How a job's ranks did at the last samples."""
    parameters = {"after_step": after_step, "max_points": max_points}
    return Call(schemas.RankHistory, "GET", _job(job_id, "/ranks/history"), parameters)


def expert_tokens(job_id: str) -> Call[schemas.ExpertTokens]:
    """How tokens are spread over a job's experts."""
    return Call(schemas.ExpertTokens, "GET", _job(job_id, "/experts"))


def waits(job_id: str) -> Call[schemas.Waits]:
    """Which ranks of a job wait for which others."""
    return Call(schemas.Waits, "GET", _job(job_id, "/waits"))


def rank_stack(job_id: str, rank: int) -> Call[schemas.RankStack]:
    """The current stack of a rank's trainer."""
    return Call(schemas.RankStack, "GET", _job(job_id, f"/ranks/{rank}/stack"), extra_seconds=10.0)


def checkpoints(job_id: str, limit: int = 100, cursor: str | None = None) -> Call[schemas.Items[schemas.Checkpoint]]:
    """A page of a job's durable checkpoints, those of the highest step first."""
    parameters = {"limit": limit, "cursor": cursor}
    return Call(schemas.Items[schemas.Checkpoint], "GET", _job(job_id, "/checkpoints"), parameters)


def delete_checkpoint(job_id: str, checkpoint_id: str, force: bool = False) -> Call[schemas.Checkpoint]:
    """Delete a checkpoint and its files; with `force` even the newest one of a job that would resume from it."""
    path = _job(job_id, f"/checkpoints/{quote(checkpoint_id, safe='')}")
    forced = {"force": "true"} if force else {}
    return Call(schemas.Checkpoint, "DELETE", path, forced, extra_seconds=_DELETION_SECONDS)


def export_checkpoint(job_id: str, checkpoint_id: str, wanted: requests.ExportRequest) -> Call[schemas.Export]:
    """Begin to write a checkpoint's weights to a folder on the service's machine."""
    path = _job(job_id, f"/checkpoints/{quote(checkpoint_id, safe='')}/export")
    return Call(schemas.Export, "POST", path, body=wanted.model_dump(mode="json"))


def exports(job_id: str) -> Call[schemas.Items[schemas.Export]]:
    """The newest exports of a job's checkpoints."""
    return Call(schemas.Items[schemas.Export], "GET", _job(job_id, "/exports"))


def export(job_id: str, export_id: str) -> Call[schemas.Export]:
    """The progress of an export."""
    return Call(schemas.Export, "GET", _job(job_id, f"/exports/{quote(export_id, safe='')}"))


def ledger(job_id: str) -> Call[schemas.Ledger]:
    """Where every second of a job went."""
    return Call(schemas.Ledger, "GET", _job(job_id, "/ledger"))


def job_spec(job_id: str) -> Call[schemas.WrittenSpec]:
    """A job's spec as it is in force, and as it was written."""
    return Call(schemas.WrittenSpec, "GET", _job(job_id, "/spec"))


def job_plan(job_id: str) -> Call[schemas.JobPlan]:
    """A job's plan, compared with its measured steps."""
    return Call(schemas.JobPlan, "GET", _job(job_id, "/plan"))


def job_plan_picture(job_id: str) -> Call[bytes]:
    """A job's plan as an SVG picture; to be downloaded."""
    return Call(bytes, "GET", _job(job_id, "/plan/picture"), extra_seconds=60.0)


def machines() -> Call[schemas.Items[schemas.Machine]]:
    """Types of nodes that were calibrated."""
    return Call(schemas.Items[schemas.Machine], "GET", "/v1/machines")


def recoveries(job_id: str, limit: int = 100, cursor: str | None = None) -> Call[schemas.Items[schemas.Recovery]]:
    """A page of a job's recoveries, oldest first."""
    parameters = {"limit": limit, "cursor": cursor}
    return Call(schemas.Items[schemas.Recovery], "GET", _job(job_id, "/recoveries"), parameters)


def request_trace(job_id: str, wanted: requests.TraceRequest) -> Call[trace_schemas.Trace]:
    """Have all ranks of a job record steps."""
    return Call(trace_schemas.Trace, "POST", _job(job_id, "/traces"), body=wanted.model_dump(mode="json"))


def traces(job_id: str) -> Call[schemas.Items[trace_schemas.Trace]]:
    """A job's traces, newest first, without what each rank did."""
    return Call(schemas.Items[trace_schemas.Trace], "GET", _job(job_id, "/traces"))


def trace(job_id: str, trace_id: str) -> Call[trace_schemas.TraceDocument]:
    """One trace in full."""
    path = _job(job_id, f"/traces/{quote(trace_id, safe='')}")
    return Call(trace_schemas.TraceDocument, "GET", path, extra_seconds=_TRACE_SECONDS)


def trace_for_perfetto(job_id: str, trace_id: str) -> Call[bytes]:
    """One trace in Perfetto's format; to be downloaded."""
    path = _job(job_id, f"/traces/{quote(trace_id, safe='')}/perfetto")
    return Call(bytes, "GET", path, extra_seconds=_TRACE_SECONDS)


def profile(job_id: str, trace_id: str, rank: int) -> Call[bytes]:
    """A rank's recording by torch's profiler; to be downloaded."""
    return Call(bytes, "GET", _job(job_id, f"/traces/{quote(trace_id, safe='')}/profiles/{rank}"))


def budget(job_id: str, source: str | None = None) -> Call[trace_schemas.StepBudget]:
    """Where the time of a job's step goes; `source`: a trace or phases."""
    return Call(
        trace_schemas.StepBudget, "GET", _job(job_id, "/budget"), {"from": source}, extra_seconds=_TRACE_SECONDS
    )


def inject(job_id: str, fault: requests.FaultRequest) -> Call[schemas.Fault]:
    """Inject a fault into a job, if the service allows that."""
    return Call(schemas.Fault, "POST", _job(job_id, "/faults"), body=fault.model_dump(mode="json"))


def drain(node: str, seconds: float) -> Call[schemas.Node]:
    """Have all jobs leave a node."""
    return Call(schemas.Node, "POST", f"/v1/nodes/{quote(node, safe='')}/drain", body={"deadline_seconds": seconds})


def undrain(node: str) -> Call[schemas.Node]:
    """Use a node again that is being drained."""
    return Call(schemas.Node, "DELETE", f"/v1/nodes/{quote(node, safe='')}/drain")


def plans(document: Any) -> Call[schemas.Plans]:
    """Predictions for a layout, or the best layouts."""
    return Call(schemas.Plans, "POST", "/v1/plans", body=document, extra_seconds=_SEARCH_SECONDS)


def cluster() -> Call[schemas.Cluster]:
    """The nodes, and what runs on them."""
    return Call(schemas.Cluster, "GET", "/v1/cluster")


def check_cluster() -> Call[schemas.ClusterCheck]:
    """Have the nodes test each other's ports."""
    return Call(schemas.ClusterCheck, "POST", "/v1/cluster/check")


def create_project(name: str) -> Call[access_schemas.Project]:
    """Create a project."""
    return Call(access_schemas.Project, "POST", "/v1/projects", body={"name": name})


def projects(limit: int = 50, cursor: str | None = None) -> Call[schemas.Items[access_schemas.Project]]:
    """A page of projects, by name."""
    return Call(schemas.Items[access_schemas.Project], "GET", "/v1/projects", {"limit": limit, "cursor": cursor})


def create_key(wanted: requests.NewKey) -> Call[access_schemas.NewApiKey]:
    """Create an API key."""
    return Call(access_schemas.NewApiKey, "POST", "/v1/keys", body=wanted.model_dump(mode="json", exclude_none=True))


def keys(limit: int = 50, cursor: str | None = None) -> Call[schemas.Items[access_schemas.ApiKey]]:
    """A page of API keys, newest first."""
    return Call(schemas.Items[access_schemas.ApiKey], "GET", "/v1/keys", {"limit": limit, "cursor": cursor})


def revoke_key(key_id: str) -> Call[access_schemas.ApiKey]:
    """Revoke a key."""
    return Call(access_schemas.ApiKey, "DELETE", f"/v1/keys/{quote(key_id, safe='')}")


def audit(
    key: str | None = None, target: str | None = None, limit: int = 50, cursor: str | None = None
) -> Call[schemas.Items[access_schemas.AuditEntry]]:
    """A page of who changed what, newest first."""
    parameters = {"key": key, "target": target, "limit": limit, "cursor": cursor}
    return Call(schemas.Items[access_schemas.AuditEntry], "GET", "/v1/audit", parameters)


def create_link() -> Call[access_schemas.OneTimeLink]:
    """A link that signs a browser in, once."""
    return Call(access_schemas.OneTimeLink, "POST", "/v1/links")


def me() -> Call[access_schemas.Me]:
    """Who the caller is, and what its key permits."""
    return Call(access_schemas.Me, "GET", "/v1/me")


def end_session() -> Call[access_schemas.Me]:
    """Sign a browser out."""
    return Call(access_schemas.Me, "DELETE", "/v1/session")


def ready() -> Call[schemas.Health]:
    """Whether the service can run jobs; an ApiError `not_ready` says why not."""
    return Call(schemas.Health, "GET", "/readyz")


def follow_events(job_id: str, after: str | None = None, **wanted: Unpack[EventOptions]) -> Call[schemas.Event]:
    """All events of a job as a stream, or those after the event with id `after`."""
    return Call(schemas.Event, "GET", _job(job_id, "/events"), {"follow": "true", **wanted}, headers=_resume(after))


def follow_all_events(
    job_id: str | None = None, type: str | None = None, after: str | None = None
) -> Call[schemas.JobEvent]:
    """The events of all jobs as a stream that never ends, or those after the event with id `after`."""
    parameters = {"follow": "true", "job": job_id, "type": type}
    return Call(schemas.JobEvent, "GET", "/v1/events", parameters, headers=_resume(after))


def follow_logs(
    job_id: str, rank: int | None = None, after: str | None = None, **wanted: Unpack[LogOptions]
) -> Call[schemas.LogLine]:
    """All log lines of a job as a stream, or those after stream position `after`."""
    parameters = {"follow": "true", "rank": rank, **wanted}
    return Call(schemas.LogLine, "GET", _job(job_id, "/logs"), parameters, headers=_resume(after))


def resumed(call: Call[T], after: str) -> Call[T]:
    """The call of a stream, continued after the item with that id."""
    return replace(call, headers=_resume(after))


def _resume(after: str | None) -> dict[str, str]:
    return {"Accept": "text/event-stream", **({} if after is None else {"Last-Event-ID": after})}


def lookup(name: str) -> Call[schemas.Items[schemas.Job]]:
    """The newest jobs with exactly that name, without their specs. Raises ApiError for text that cannot be a name."""
    parameters = {"name": checked_job(name), "limit": MAX_LISTED, "spec": "false"}
    return Call(schemas.Items[schemas.Job], "GET", "/v1/jobs", parameters)


def name_in(call: Call[Any]) -> str | None:
    """The name of the job that a call is about; None if it is about no job, or has the id."""
    return None if call.job is None or is_job_id(call.job) else call.job


def only_one(name: str, called: schemas.Items[schemas.Job]) -> str:
    """The id of the job with that name, of which `called` are the newest. Raises ApiError if there is none, and if
    there are several, with what distinguishes them."""
    if not called.items:
        raise no_such_job(f"no job has the id or the name {name!r}")
    if len(called.items) == 1:
        return called.items[0].id
    lines = [f"  {job.id}  {job.state:<10}  {job.created_at.astimezone():%Y-%m-%d %H:%M:%S}" for job in called.items]
    if called.next_cursor is not None:
        lines.append(f"  and older ones: `manta ps --name '{name}'` lists them")
    several = f"several jobs are called {name!r}: say the id of one, such as {called.items[0].id}"
    problem = schemas.Problem(
        code="ambiguous_name", title="Ambiguous name", status=HTTPStatus.CONFLICT, detail="\n".join([several, *lines])
    )
    raise ApiError(problem)
