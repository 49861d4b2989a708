"""All queries about jobs as a whole, and about their states over time. Every function takes a Session first; those that
write run in `Store.write`."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import JSON, Row, bindparam, delete, func, insert, select, type_coerce
from sqlalchemy.orm import Session, load_only, make_transient_to_detached

from manta.service.cluster.sizes import SizeOutOfBounds, sizes_of
from manta.service.identity import DEFAULT_PROJECT, digest_of
from manta.service.ids import is_job_id, next_job_id
from manta.service.states import HELD, UNFINISHED, JobState, after_action, can, is_final
from manta.service.store import events, step_traces
from manta.service.store.errors import IdempotencyConflict, IllegalTransition, JobChanged, JobNotFound, TooManyLabels
from manta.service.store.tables import Job, JobLabel, StateChange
from manta.service.store.types import Reader
from manta.service.stored_specs import as_written, not_default, stored_spec
from manta.workers.config import MAX_LABELS, Accelerator, JobSpec, ParallelConfig
from manta.workers.system.threads import stored_threads

# Built once: building these takes longer than running them.
_INSERT_STATE = insert(StateChange)
_COLUMNS = Job.__table__.columns
_INSERT = insert(Job)
_NEWEST = select(func.max(_COLUMNS.id))
_NOTHING_YET: dict[str, Any] = {
    **dict.fromkeys(column.key for column in _COLUMNS),
    **dict.fromkeys(("step", "generation", "restarts", "binned_until", "binned_generation"), 0),
    "state": JobState.QUEUED.value,
}
_QUEUED = select(func.count()).select_from(Job.__table__).where(_COLUMNS.state == JobState.QUEUED.value)
# Two counts, each of one range of an index: with OR, all jobs in the queue would be read one by one.
_AHEAD = select(
    _QUEUED.where(_COLUMNS.priority > bindparam("priority")).scalar_subquery()
    + _QUEUED.where(_COLUMNS.priority == bindparam("priority"), _COLUMNS.id < bindparam("id")).scalar_subquery()
)
_BATCH_JOBS = 1000
_ACCELERATORS = select(_COLUMNS.id, type_coerce(_COLUMNS.spec, JSON())["resources"]["accelerator"].as_string()).where(
    _COLUMNS.id.in_(bindparam("ids", expanding=True))
)


def record_state(session: Session, job_id: str, state: JobState, at: float) -> None:
    """Record that a job entered `state` at Unix time `at`."""
    session.connection().execute(_INSERT_STATE, {"job_id": job_id, "time": at, "state": state.value})


def states_over_time(session: Session, job_id: str) -> list[StateChange]:
    """A job's states, oldest first; the first is its submission."""
    return list(session.scalars(select(StateChange).where(StateChange.job_id == job_id).order_by(StateChange.id)))


def create(
    session: Session,
    spec: JobSpec,
    idempotency_key: str | None = None,
    digest: str | None = None,
    project: str = DEFAULT_PROJECT,
    owner: str | None = None,
    notes: Sequence[str] = (),
    written: Mapping[str, Any] | None = None,
) -> tuple[Job, bool]:
    """Store a new QUEUED job of `project`, or find the one that the same request created before. Returns the job and
    whether it is new. `digest` is the SHA-256 of the request's body in hexadecimal; `owner`: who submits it;
    `notes`: what was decided at submission; `written`: what the user wrote of the spec, if the spec does not show it.
    Raises IdempotencyConflict if `idempotency_key` was used in the project with another digest."""
    events.in_order(session)  # before the lookup: no other transaction takes the key or the id until this one ends
    earlier = made_before(session, idempotency_key, digest, project)
    if earlier is not None:
        return earlier, False
    bound = bound_key(project, idempotency_key)
    row = {**_new_job(session, spec, bound, digest, project), "owner": owner}
    job = _inserted(session, row if written is None else {**row, "submitted": written})
    if spec.labels:
        set_labels(session, job.id, spec.labels)
    record_state(session, job.id, JobState.QUEUED, job.created_at)
    decided = "".join(f"; {note}" for note in notes)
    events.append(session, job.id, "submitted", f"job {job.name!r} was submitted{decided}")
    return job, True


def made_before(session: Session, idempotency_key: str | None, digest: str | None, project: str) -> Job | None:
    """The job of `project` that the same request created before, None if there is none; see `create`. Raises
    IdempotencyConflict."""
    bound = bound_key(project, idempotency_key)
    if bound is None:
        return None
    earlier = session.scalars(select(Job).where(Job.idempotency_key == bound)).one_or_none()
    if earlier is not None and earlier.body_digest != digest:
        raise IdempotencyConflict(idempotency_key or "", earlier.id)
    return earlier


def set_labels(session: Session, job_id: str, labels: Mapping[str, str]) -> None:
    """Replace a job's labels as known to lists; those in its spec stay as they are."""
    session.execute(delete(JobLabel).where(JobLabel.job_id == job_id))
    session.add_all(JobLabel(job_id=job_id, key=key, value=value) for key, value in labels.items())


def get(session: Session, job_id: str, *, lock: bool = False) -> Job:
    """The job. Raises JobNotFound. With `lock`, no other transaction changes it until this one ends."""
    # With a lock it is read again: this session may know an older version.
    locking: dict[str, Any] = {"with_for_update": {"key_share": True}, "populate_existing": True} if lock else {}
    job = session.get(Job, job_id, **locking) if is_job_id(job_id) else None
    if job is None:
        raise JobNotFound(job_id)
    return job


def states(session: Session, job_ids: Collection[str]) -> dict[str, JobState]:
    """The states of those of these jobs that exist."""
    rows = session.execute(select(Job.id, Job.state).where(Job.id.in_(job_ids)))
    return {job_id: JobState(state) for job_id, state in rows}


def project_of(session: Session, job_id: str) -> str:
    """The project that the job belongs to. Raises JobNotFound."""
    project = session.scalar(select(Job.project).where(Job.id == job_id)) if is_job_id(job_id) else None
    if project is None:
        raise JobNotFound(job_id)
    return project


def of_project(session: Session, job_ids: Collection[str], project: str) -> set[str]:
    """Which of these jobs belong to `project`."""
    return set(session.scalars(select(Job.id).where(Job.id.in_(job_ids), Job.project == project)))


def unfinished(session: Session) -> list[Job]:
    """All unfinished jobs in the order of their turn: by priority, then by age."""
    return list(session.scalars(select(Job).where(Job.state.in_(UNFINISHED)).order_by(Job.priority.desc(), Job.id)))


@dataclass(frozen=True)
class QueuedJob:
    """A job in the queue, in brief: queues and specs may be long."""

    id: str
    accelerator: Accelerator
    """`resources.accelerator` of its spec."""
    updated_at: float
    """When anything about it last changed."""


def queued(session: Session, before: Iterable[QueuedJob] = ()) -> list[QueuedJob]:
    """All QUEUED jobs in the order of their turn. Only this part of a spec is read, since another release may have
    stored the spec in a form that this one does not understand; and it is not read for jobs that have not changed since
    `before`, since for thousands of jobs PostgreSQL would take longer for that than for all the rest."""
    query = select(_COLUMNS.id, _COLUMNS.updated_at).where(_COLUMNS.state == JobState.QUEUED.value)
    rows = session.execute(query.order_by(_COLUMNS.priority.desc(), _COLUMNS.id)).all()
    known = {(each.id, each.updated_at): each for each in before}
    new = [job_id for job_id, updated_at in rows if (job_id, updated_at) not in known]
    said: dict[str, Accelerator] = {}
    for first in range(0, len(new), _BATCH_JOBS):
        some = session.execute(_ACCELERATORS, {"ids": new[first : first + _BATCH_JOBS]})
        said |= {row[0]: row[1] for row in some}
    return [known.get((job, at)) or QueuedJob(job, said.get(job) or "auto", at) for job, at in rows]


def unfinished_summaries(session: Session) -> list[Job]:
    """All unfinished jobs in the order of their turn, with only id, name, state, step and steps, which the databases of
    all releases have."""
    brief = load_only(Job.id, Job.name, Job.state, Job.step, Job.steps, raiseload=True)
    query = select(Job).options(brief).where(Job.state.in_(UNFINISHED)).order_by(Job.priority.desc(), Job.id)
    return list(session.scalars(query))


def count_by_state(session: Session, bound: str | None = None) -> dict[JobState, int]:
    """Number of jobs, or of those of the project `bound`, in each state, zeros included."""
    query = select(Job.state, func.count()).group_by(Job.state)
    rows = session.execute(query if bound is None else query.where(Job.project == bound))
    counted: dict[str, int] = {row[0]: row[1] for row in rows}
    return {state: counted.get(state.value, 0) for state in JobState}


def transition(
    session: Session, job_id: str, to: JobState, reason: str | None = None, message: str | None = None
) -> Job:
    """Move a job to state `to`, with its reason code and message, and append a `state_changed` event. Raises
    JobNotFound, and IllegalTransition if the state machine has no such edge."""
    job = get(session, job_id, lock=True)
    state = JobState(job.state)
    if not can(state, to):
        raise IllegalTransition(job_id, state, target=to)
    now = time.time()
    job.state, job.reason, job.message, job.updated_at = to.value, reason, message, now
    job.waiting_for = None
    if to is JobState.STARTING and job.started_at is None:
        job.started_at = now
    if is_final(to):
        job.finished_at = now
    record_state(session, job_id, to, now)
    text = f"{state} -> {to}" + (f": {message}" if message else "")
    data = {"from": state.value, "to": to.value, "reason": reason}
    events.append(session, job_id, "state_changed", text, generation=job.generation, step=job.step, data=data, at=now)
    why = f"the job is {to}, at step {job.step}"
    if is_final(to):
        step_traces.end_all(session, job_id, why)
    elif to in (JobState.PAUSED, JobState.QUEUED):
        step_traces.interrupt(session, job_id, why)
    return job


def asked(session: Session, job_id: str, action: str) -> tuple[Job, JobState]:
    """The job, locked, and the state that a user's `action` leads to. Raises JobNotFound, IllegalTransition."""
    job = get(session, job_id, lock=True)
    state = JobState(job.state)
    target = after_action(action, state)
    if target is None:
        raise IllegalTransition(job_id, state, action=action)
    return job, target


def request_cancel(session: Session, job_id: str) -> Job:
    """The immediate effect of a user's cancel: a QUEUED job becomes CANCELLED, one with processes CANCELLING, and one
    that is CANCELLING stays so. Raises JobNotFound, and IllegalTransition if the job's state does not allow it."""
    job, target = asked(session, job_id, "cancel")
    if target == job.state:
        return job
    return transition(session, job_id, target, "cancelled_by_user", "cancelled by the user")


def request_resize(session: Session, job_id: str, replicas: int) -> Job:
    """Record that the job should run with `replicas`; its supervisor does the rest when there is room. Raises
    JobNotFound, IllegalTransition if the job's state does not allow it, SizeOutOfBounds, SpecNotUnderstood."""
    job, _ = asked(session, job_id, "resize")
    sizes = sizes_of(stored_spec(job).spec)
    if replicas not in sizes:
        raise SizeOutOfBounds(job_id, replicas, sizes)
    job.wanted_replicas, job.updated_at = replicas, time.time()
    sentence = f"the user asked for {replicas} replica{'s' if replicas != 1 else ''}"
    events.append(session, job_id, "resize_requested", sentence, generation=job.generation, data={"data": replicas})
    return job


def set_waiting(
    session: Session,
    job_id: str,
    waiting_for: dict[str, Any] | None,
    reason: str | None = None,
    message: str | None = None,
) -> Job:
    """Record what a QUEUED job lacks, such as `{"needed": 8, "available": 4, "free": 5}` with reason
    `insufficient_slots`. A job that is no longer QUEUED is not changed. Raises JobNotFound."""
    job = get(session, job_id, lock=True)
    stored = (job.waiting_for, job.reason, job.message)
    if job.state == JobState.QUEUED and stored != (waiting_for, reason, message):
        job.waiting_for, job.reason, job.message, job.updated_at = waiting_for, reason, message, time.time()
    return job


def set_hold_reason(session: Session, job_id: str, why: str | None) -> Job:
    """Say why the next generation of a job is not begun, until its state changes; None: it is begun. A job that has
    another reason to be in its state keeps that. Raises JobNotFound."""
    job = get(session, job_id, lock=True)
    may_say = job.reason == HELD or (job.reason is None and why is not None)
    if may_say and job.message != why:
        job.reason, job.message, job.updated_at = HELD if why else None, why, time.time()
    return job


def set_layout(session: Session, job_id: str, layout: ParallelConfig) -> None:
    """Record the sizes that the job runs with from its next generation on. Raises JobNotFound."""
    job = get(session, job_id, lock=True)
    job.tensor, job.pipeline, job.context, job.replicas = layout.tensor, layout.pipeline, layout.context, layout.data
    job.expert = layout.expert_size
    job.updated_at = time.time()


def accelerator_of(job: Job | Row[Any]) -> Accelerator:
    """`resources.accelerator` of a job. Only this part of its spec is read, which another release may have stored in a
    form that this one does not understand."""
    resources = job.spec.get("resources")
    said: Accelerator = resources.get("accelerator", "auto") if isinstance(resources, dict) else "auto"
    return said


def decide_accelerator(session: Session, job_id: str, accelerator: str) -> None:
    """Record in the spec of a job with `resources.accelerator: auto` what it got when it was first placed, gpu or cpu:
    later nodes do not change that. Raises JobNotFound."""
    job = get(session, job_id, lock=True)
    if accelerator_of(job) == "auto":
        resources = job.spec.get("resources") or {}
        job.spec = {**job.spec, "resources": {**resources, "accelerator": accelerator}}


def decide_threads(session: Session, job_id: str, threads: int) -> int:
    """Record the number of threads per rank in the spec of a job with `resources.threads: auto`, unless it is already
    decided; returns the valid number. Raises JobNotFound."""
    job = get(session, job_id, lock=True)
    resources = job.spec.get("resources") or {}
    if resources.get("threads") != "auto":
        return stored_threads(job.spec)
    job.spec = {**job.spec, "resources": {**resources, "threads": threads}}
    return threads


def queue_positions(reader: Reader, some: Collection[Job | Row[Any]]) -> dict[str, int]:
    """Places in the queue, which all projects share, of those of these jobs that are QUEUED; from 1."""
    queued = [job for job in some if job.state == JobState.QUEUED]
    if not queued:
        return {}
    if len(queued) == 1:  # counting is quicker than numbering all
        (job,) = queued
        return {job.id: (reader.scalar(_AHEAD, {"priority": job.priority, "id": job.id}) or 0) + 1}
    place = func.row_number().over(order_by=(Job.priority.desc(), Job.id))
    places = select(Job.id, place.label("place")).where(Job.state == JobState.QUEUED.value).subquery()
    rows = reader.execute(select(places.c.id, places.c.place).where(places.c.id.in_([job.id for job in queued])))
    by_job: dict[str, int] = {row[0]: row[1] for row in rows}
    return by_job


def accept_report(session: Session, job_id: str, generation: int, rank: int, sequence: int) -> bool:
    """Whether a report is new: of the job's generation (fencing), and with a sequence number that was not stored
    before. Marks it as stored; the effects of the report belong into the same transaction, so that they happen exactly
    once. Raises JobNotFound."""
    job = get(session, job_id, lock=True)
    if generation < job.generation or sequence <= job.report_cursor.get(str(rank), 0):
        return False
    job.report_cursor = {**job.report_cursor, str(rank): sequence}
    return True


def bound_key(project: str, idempotency_key: str | None) -> str | None:
    """The stored form of an idempotency key, which makes keys of different projects unique in one column. Those of the
    default project are stored unchanged, like in earlier releases. A header contains no line break, so the two forms
    cannot collide."""
    if idempotency_key is None or project == DEFAULT_PROJECT:
        return idempotency_key
    return f"{project}\n{digest_of(idempotency_key)}"


def _new_job(
    session: Session, spec: JobSpec, idempotency_key: str | None, digest: str | None, project: str
) -> dict[str, Any]:
    """The values of all columns."""
    now = time.time()
    newest = session.connection().scalar(_NEWEST)
    return {
        **_NOTHING_YET,
        "id": next_job_id(now, secrets.randbits(32), newest),
        "project": project,
        "name": spec.name,
        "spec": spec.model_dump(mode="json"),
        "submitted": as_written(spec),
        "not_default": not_default(spec),
        "steps": spec.train.steps,
        "priority": spec.priority,
        "idempotency_key": idempotency_key,
        "body_digest": digest,
        "metrics": {},
        "report_cursor": {},
        "created_at": now,
        "updated_at": now,
    }


def _inserted(session: Session, values: dict[str, Any]) -> Job:
    """A job, stored by a prepared statement and added to the session as if it had been read: inserting it through the
    session takes twice as long."""
    session.connection().execute(_INSERT, values)
    job = Job(**values)
    make_transient_to_detached(job)
    session.add(job)
    return job


def labels_of(job: Job | Row[Any]) -> dict[str, str]:
    """The labels of a job; none in a spec of a release without labels."""
    return dict(job.spec.get("labels") or {})


def version_of(job: Job | Row[Any]) -> str:
    """Changes whenever something changes that `edit` can change; the progress of a job does not count."""
    return hashlib.sha256(json.dumps([job.id, *_editable(job).values()], sort_keys=True).encode()).hexdigest()[:16]


def edit(
    session: Session,
    job_id: str,
    name: str | None = None,
    priority: int | None = None,
    labels: Mapping[str, str | None] | None = None,
    expected: Collection[str] | None = None,
) -> Job:
    """Change a job's name, priority or labels, in its spec too. None leaves a value as it is; labels that are not in
    `labels` stay, and those with None are removed. `expected`: only if the job has one of these versions. Raises
    JobNotFound, JobChanged, TooManyLabels."""
    job = get(session, job_id, lock=True)
    if expected is not None and version_of(job) not in expected:
        raise JobChanged(job_id, version_of(job))
    before = _editable(job)
    wanted: dict[str, Any] = {"name": name, "priority": priority, "labels": _merged(before["labels"], labels or {})}
    new = {key: value for key, value in wanted.items() if value is not None and value != before[key]}
    if not new:
        return job
    job.name, job.priority = new.get("name", job.name), new.get("priority", job.priority)
    if "labels" in new:
        set_labels(session, job_id, new["labels"])
    job.spec, job.updated_at = {**job.spec, **new}, time.time()
    job.submitted = None if job.submitted is None else {**job.submitted, **new}
    job.not_default = None if job.not_default is None else {**job.not_default, **new}
    sentence = " and ".join(f"{key} from {before[key]!r} to {value!r}" for key, value in new.items())
    data = {key: {"from": before[key], "to": value} for key, value in new.items()}
    about: dict[str, Any] = {"generation": job.generation, "step": job.step}
    events.append(session, job_id, "edited", f"the user changed {sentence}", data=data, **about)
    return job


def _editable(job: Job | Row[Any]) -> dict[str, Any]:
    return {"name": job.name, "priority": job.priority, "labels": labels_of(job)}


def _merged(labels: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """`labels` with `changes` (RFC 7396)."""
    merged = {key: value for key, value in {**labels, **changes}.items() if value is not None}
    if len(merged) > MAX_LABELS:
        raise TooManyLabels(len(merged), MAX_LABELS)
    return merged
