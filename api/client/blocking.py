"""The Python client (docs/python.md): `Client` for programs and the command line, `AsyncClient` for event
loops (`api/client/async_client.py`).

Both send the calls of `api/client/calls.py`. They raise ApiError when the service refuses (its `problem` says why) and
ServiceUnreachable when there is no answer.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx

from manta.api import schemas
from manta.api.client import calls
from manta.api.client.calls import EventOptions, JobFilterOptions, JobListOptions, LogOptions
from manta.api.client.rest_call import (
    STREAM_TIMEOUT,
    ApiError,
    Call,
    ServiceUnreachable,
    client_options,
    explaining_proxy_errors,
    raise_for_problem,
)
from manta.api.client.retries import EventParser, FollowedStream, RetryPolicy, ServerEvent
from manta.api.requests import FaultRequest, NewKey, TraceRequest
from manta.api.schemas import access as access_schemas
from manta.api.schemas import traces as trace_schemas
from manta.api.serving.local_service import find_key, find_url
from manta.service.identity import Scope
from manta.service.ids import is_job_id
from manta.service.settings import Settings
from manta.service.states import is_final
from manta.workers.protocol.messages import FaultKind
from manta.workers.spec.changes import with_changes

T = TypeVar("T")
MAX_WAIT_SECONDS = 60.0
"""Maximum `wait` that the service accepts."""
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol)
"""Errors after which the service has certainly received nothing."""


class Client:
    """Talks to a Manta service; blocks until it answers. Can be shared between threads; a context manager. A name that
    no other job has can be used instead of a job's id."""

    def __init__(self, url: str | None = None, transport: httpx.BaseTransport | None = None, key: str | None = None):
        """`url`: of the service, such as `http://127.0.0.1:8400`, by default the one that `find_url` returns. `key`: by
        default the one that `find_key` returns. `transport`: for tests. Raises KeyFileUnsafe."""
        settings = Settings.from_environment()
        self.url = (url or find_url(settings)).rstrip("/")
        with explaining_proxy_errors(self.url):
            options = client_options(settings, self.url, key, transport is not None)
            self._http = httpx.Client(transport=transport, **options)

    @classmethod
    def of_home(cls, home: Path) -> Self:
        """A client of the service that runs in `home`."""
        settings = Settings(home)
        url = find_url(settings)
        return cls(url, key=find_key(settings, url))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def id_of(self, job: str) -> str:
        """The id of a job, given by its id or by a name that no other job has. Raises ApiError, ServiceUnreachable."""
        return job if is_job_id(job) else calls.only_one(job, self.send(calls.lookup(job)))

    def _by_id(self, call: Call[T]) -> Call[T]:
        name = calls.name_in(call)
        return call if name is None else call.about(self.id_of(name))

    def send(self, call: Call[T]) -> T:
        """Send a call and read its answer. Raises ApiError, ServiceUnreachable."""
        return call.read(self._answered(call))

    def download(self, call: Call[bytes]) -> bytes:
        """Send a call whose answer is a file. Raises ApiError, ServiceUnreachable."""
        response = self._answered(call)
        raise_for_problem(response)
        return response.content

    def _answered(self, call: Call[Any]) -> httpx.Response:
        request = self._by_id(call).request(self._http)
        try:
            return self._http.send(request)
        except httpx.TransportError as error:
            raise ServiceUnreachable(self.url, error) from error

    def stream(self, call: Call[T]) -> Iterator[T]:
        """Send a call that answers with a stream, and yield its items until the job is final. An interrupted stream is
        continued from where it broke off. Raises ApiError, ServiceUnreachable."""
        followed = FollowedStream(self._by_id(call))
        while not followed.ended:
            try:
                with contextlib.closing(self._events(followed)) as events:
                    for event in events:
                        yield from followed.take(event)
            except (ApiError, ServiceUnreachable) as error:
                time.sleep(followed.pause_after(error))

    def _events(self, followed: FollowedStream[Any]) -> Generator[ServerEvent]:
        request = followed.call.request(self._http)
        request.extensions["timeout"] = STREAM_TIMEOUT.as_dict()
        try:
            response = self._http.send(request, stream=True)
            try:
                if response.is_error:
                    response.read()
                raise_for_problem(response)
                followed.begins()
                parser = EventParser()
                for line in response.iter_lines():
                    event = parser.feed(line)
                    if event is not None:
                        yield event
                followed.breaks_off(self.url)
            finally:
                response.close()
        except httpx.TransportError as error:
            raise ServiceUnreachable(self.url, error) from error

    def submit(
        self, document: Any, idempotency_key: str | None = None, changes: Mapping[str, Any] | None = None
    ) -> schemas.SubmittedJob:
        """Submit a JobSpec document, with `changes` such as `{"train.steps": 100}`. Submitting the same document with
        the same key again returns the same job. If the answer is lost, the call is repeated, which does not create
        another job. Raises SpecError for changes beyond the end of a list in the document, ApiError,
        ServiceUnreachable."""
        call = calls.submit(with_changes(document, changes or {}), idempotency_key or uuid.uuid4().hex)
        try:
            return self.send(call)
        except ServiceUnreachable as error:
            if isinstance(error.cause, _NOT_SENT):
                raise
        return RetryPolicy().call(lambda: self.send(call))

    def dry_run(self, document: Any, changes: Mapping[str, Any] | None = None) -> schemas.DryRun:
        """Check a JobSpec document, with `changes` as in `submit`, and show its layout."""
        return self.send(calls.dry_run(with_changes(document, changes or {})))

    def jobs(
        self,
        state: str | Sequence[str] | None = None,
        name: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        **more: Unpack[JobListOptions],
    ) -> schemas.Items[schemas.Job]:
        """A page of jobs; see `calls.jobs` for filters and order."""
        return self.send(calls.jobs(state, name, limit, cursor, **more))

    def count_jobs(
        self, state: str | Sequence[str] | None = None, name: str | None = None, **more: Unpack[JobFilterOptions]
    ) -> schemas.JobCounts:
        """How many jobs there are in each state, with the filters of `jobs`."""
        return self.send(calls.count_jobs(state, name, **more))

    def job(self, job_id: str, wait: float | None = None, state: str | None = None) -> schemas.Job:
        """One job. With `wait`: as soon as its state differs from `state` (default: from its present one) or is final,
        and after `wait` seconds (at most 60) in any case."""
        return self.send(calls.job(job_id, wait, state))

    def wait(self, job_id: str) -> schemas.Job:
        """Returns the job when it is final."""
        job, retries = self.job(job_id), RetryPolicy()
        while not is_final(job.state):
            known = job.state
            job = retries.call(lambda: self.job(job.id, MAX_WAIT_SECONDS, known))  # noqa: B023 - called at once
        return job

    def resize(self, job_id: str, replicas: int) -> schemas.Job:
        """Continue with `replicas` data-parallel replicas as soon as there is room for them."""
        return self.send(calls.resize(job_id, replicas))

    def pause(self, job_id: str) -> schemas.Job:
        """Have a job save its state and release its slots until it is resumed."""
        return self.send(calls.pause(job_id))

    def resume(self, job_id: str) -> schemas.Job:
        """Resume a PAUSED job."""
        return self.send(calls.resume(job_id))

    def retry(self, job_id: str) -> schemas.Job:
        """Retry a failed job from where it failed. Raises ApiError."""
        return self.send(calls.retry(job_id))

    def cancel(self, job_id: str) -> schemas.Job:
        """Stop a job for good."""
        return self.send(calls.cancel(job_id))

    def edit(
        self,
        job_id: str,
        name: str | None = None,
        priority: int | None = None,
        etag: str | None = None,
        labels: Mapping[str, str | None] | None = None,
    ) -> schemas.Job:
        """Change a job's name, priority or labels; a label with None is removed. With `etag`, only if the job has not
        been changed since it was read with that etag."""
        return self.send(calls.edit(job_id, name, priority, etag, labels))

    def delete(self, job_id: str) -> schemas.DeletedJob:
        """Delete a job in a final state, and everything that belongs to it: rows, checkpoints, logs."""
        return self.send(calls.delete(job_id))

    def metrics(
        self, job_id: str, names: Sequence[str] | None = None, after_step: int = 0, max_points: int = 1000
    ) -> schemas.MetricSeries:
        """Metrics over steps, at most `max_points` of them; `names` None means all."""
        return self.send(calls.metrics(job_id, names, after_step, max_points))

    def events(
        self,
        job_id: str,
        cursor: str | None = None,
        limit: int = 100,
        order: schemas.Direction | None = None,
        **wanted: Unpack[EventOptions],
    ) -> schemas.Stream[schemas.Event]:
        """A page of events, oldest first by default."""
        return self.send(calls.events(job_id, cursor, limit, order, **wanted))

    def all_events(
        self, job_id: str | None = None, type: str | None = None, cursor: str | None = None, limit: int = 100
    ) -> schemas.Stream[schemas.JobEvent]:
        """A page of the events of all jobs, oldest first, optionally only those of one job, or of one type."""
        return self.send(calls.all_events(job_id and self.id_of(job_id), type, cursor, limit))

    def logs(
        self,
        job_id: str,
        rank: int | None = None,
        cursor: str | None = None,
        limit: int = 500,
        **wanted: Unpack[LogOptions],
    ) -> schemas.LogLines:
        """A page of log lines of one rank, or of all merged by time."""
        return self.send(calls.logs(job_id, rank, cursor, limit, **wanted))

    def follow_events(
        self, job_id: str, after: str | None = None, **wanted: Unpack[EventOptions]
    ) -> Iterator[schemas.Event]:
        """Events as they come, until the job is final."""
        return self.stream(calls.follow_events(job_id, after, **wanted))

    def follow_all_events(
        self, job_id: str | None = None, type: str | None = None, after: str | None = None
    ) -> Iterator[schemas.JobEvent]:
        """Events of all jobs as they come, without end."""
        return self.stream(calls.follow_all_events(job_id and self.id_of(job_id), type, after))

    def follow_logs(
        self, job_id: str, rank: int | None = None, **wanted: Unpack[LogOptions]
    ) -> Iterator[schemas.LogLine]:
        """Log lines as they come, until the job is final."""
        return self.stream(calls.follow_logs(job_id, rank, **wanted))

    def ranks(self, job_id: str) -> schemas.Items[schemas.Rank]:
        """Where a job's ranks run."""
        return self.send(calls.ranks(job_id))

    def checkpoints(
        self, job_id: str, limit: int = 100, cursor: str | None = None
    ) -> schemas.Items[schemas.Checkpoint]:
        """A page of durable checkpoints, those of the highest step first."""
        return self.send(calls.checkpoints(job_id, limit, cursor))

    def ledger(self, job_id: str) -> schemas.Ledger:
        """Where every second of a job went."""
        return self.send(calls.ledger(job_id))

    def job_spec(self, job_id: str) -> schemas.WrittenSpec:
        """A job's spec as it is in force, and as it was written."""
        return self.send(calls.job_spec(job_id))

    def job_plan(self, job_id: str) -> schemas.JobPlan:
        """A job's plan, compared with its measured steps."""
        return self.send(calls.job_plan(job_id))

    def machines(self) -> schemas.Items[schemas.Machine]:
        """Types of nodes that were calibrated."""
        return self.send(calls.machines())

    def recoveries(self, job_id: str, limit: int = 100, cursor: str | None = None) -> schemas.Items[schemas.Recovery]:
        """A page of a job's recoveries, oldest first."""
        return self.send(calls.recoveries(job_id, limit, cursor))

    def request_trace(
        self, job_id: str, steps: int = 1, step: int = 0, profiler_ranks: Sequence[int] = ()
    ) -> trace_schemas.Trace:
        """Have all ranks of a job record `steps` steps, none before `step`; those of `profiler_ranks` with torch's
        profiler too."""
        wanted = TraceRequest(steps=steps, step=step, profiler_ranks=list(profiler_ranks))
        return self.send(calls.request_trace(job_id, wanted))

    def traces(self, job_id: str) -> schemas.Items[trace_schemas.Trace]:
        """A job's traces, newest first, without what each rank did."""
        return self.send(calls.traces(job_id))

    def trace(self, job_id: str, trace_id: str) -> trace_schemas.TraceDocument:
        """One trace in full."""
        return self.send(calls.trace(job_id, trace_id))

    def budget(self, job_id: str, source: str | None = None) -> trace_schemas.StepBudget:
        """Where the time of a job's step goes; `source`: measured from a `trace`, or from `phases`."""
        return self.send(calls.budget(job_id, source))

    def inject(self, job_id: str, kind: FaultKind, rank: int, at_step: int = 0, **more: Any) -> schemas.Fault:
        """Inject a fault into a job, if the service allows that; `more`: the other fields of FaultRequest."""
        return self.send(calls.inject(job_id, FaultRequest(kind=kind, rank=rank, at_step=at_step, **more)))

    def drain(self, node: str, seconds: float = 120.0) -> schemas.Node:
        """Have all jobs leave a node, given by its id or the beginning of it, within `seconds`."""
        return self.send(calls.drain(node, seconds))

    def undrain(self, node: str) -> schemas.Node:
        """Use a node again that is being drained, given as in `drain`. Jobs that have left do not come back by
        themselves."""
        return self.send(calls.undrain(node))

    def plans(self, document: Any) -> schemas.Plans:
        """Predicted time and memory of a layout, or with `parallel: auto` the best layouts."""
        return self.send(calls.plans(document))

    def cluster(self) -> schemas.Cluster:
        """The nodes, and what runs on them."""
        return self.send(calls.cluster())

    def check_cluster(self) -> schemas.ClusterCheck:
        """Have the nodes test each other's ports."""
        return self.send(calls.check_cluster())

    def create_project(self, name: str) -> access_schemas.Project:
        """Create a project."""
        return self.send(calls.create_project(name))

    def projects(self, limit: int = 50, cursor: str | None = None) -> schemas.Items[access_schemas.Project]:
        """A page of the projects that the key is valid for, by name."""
        return self.send(calls.projects(limit, cursor))

    def create_key(self, name: str, scope: str, **more: Any) -> access_schemas.NewApiKey:
        """Create an API key; only this answer contains it. `more`: the other fields of NewKey."""
        return self.send(calls.create_key(NewKey(name=name, scope=Scope(scope), **more)))

    def keys(self, limit: int = 50, cursor: str | None = None) -> schemas.Items[access_schemas.ApiKey]:
        """A page of API keys, newest first."""
        return self.send(calls.keys(limit, cursor))

    def revoke_key(self, key_id: str) -> access_schemas.ApiKey:
        """Revoke a key."""
        return self.send(calls.revoke_key(key_id))

    def audit(
        self, key: str | None = None, target: str | None = None, limit: int = 50, cursor: str | None = None
    ) -> schemas.Items[access_schemas.AuditEntry]:
        """A page of who changed what, newest first, optionally only of one key, or about one job, key, node or
        project."""
        return self.send(calls.audit(key, target, limit, cursor))

    def link(self) -> access_schemas.OneTimeLink:
        """A link that signs in a browser, once, with the rights of this client's key."""
        return self.send(calls.create_link())

    def me(self) -> access_schemas.Me:
        """Who this client's key belongs to, and what it permits."""
        return self.send(calls.me())

    def ready(self) -> schemas.Health:
        """Returns if the service can run jobs; otherwise the ApiError `not_ready` says why it cannot."""
        return self.send(calls.ready())
