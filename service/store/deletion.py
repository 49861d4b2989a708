"""All queries that delete jobs. A job is marked first and its rows go last, so that after any failure in between, it is
still there and can be deleted again."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from typing import Any, cast

from sqlalchemy import CursorResult, delete, select, tuple_
from sqlalchemy.orm import Session

from manta.service.states import FINAL, JobState, is_final
from manta.service.store import audit, events, exports, jobs, leases, pauses_and_retries
from manta.service.store.audit import AuditRecord
from manta.service.store.errors import JobBeingExported, JobNotFinal
from manta.service.store.step_traces import StepTrace, StepTracePart
from manta.service.store.tables import (
    Base,
    Checkpoint,
    DeletedJob,
    Event,
    Export,
    Generation,
    Job,
    JobLabel,
    Metric,
    MetricBin,
    Rank,
    RankNumbers,
    Recovery,
    StateChange,
)

METRICS_BATCH_ROWS = 10_000
"""Rows of metrics deleted per transaction, so that reports of other jobs do not wait long."""
_OF_A_JOB: tuple[type[Base], ...] = (
    *(Event, Metric, MetricBin, Rank, Checkpoint, Recovery, Generation, StateChange, StepTracePart, StepTrace),
    JobLabel,
    RankNumbers,
    Export,
)


def begin(session: Session, job_id: str, why: str = "the user deletes the job") -> None:
    """Mark a final job as being deleted: it cannot be retried any more, and its snapshots in memory are not kept for
    that. Raises JobNotFound, JobNotFinal, JobBeingExported."""
    job = jobs.get(session, job_id, lock=True)
    if not is_final(job.state):
        raise JobNotFinal(job_id, JobState(job.state))
    if exports.any_runs(session, job_id, leases.now(session)):
        raise JobBeingExported(job_id)
    pauses_and_retries.release_snapshots(session, job_id, math.inf)
    if job.deletion_began_at is None:
        job.deletion_began_at = job.updated_at = time.time()
        events.append(session, job_id, "deletion_began", why)


def expired(session: Session, before: float) -> dict[str, bool]:
    """Final jobs that ended before this time, in order of their end, and whether each ever started."""
    query = select(Job.id, Job.generation > 0).where(Job.state.in_(FINAL), Job.finished_at < before)
    return {row[0]: row[1] for row in session.execute(query.order_by(Job.finished_at, Job.id))}


def begin_if_expired(session: Session, job_id: str, before: float, why: str) -> bool:
    """`begin`, and an audit entry, if the job still ended before this time, and nothing of it is being exported;
    returns whether it did. Raises JobNotFound."""
    job = jobs.get(session, job_id, lock=True)
    if not is_final(job.state) or job.finished_at is None or job.finished_at >= before:
        return False
    if exports.any_runs(session, job_id, leases.now(session)):
        return False
    if job.deletion_began_at is None:
        audit.append_of_service(session, job.project, AuditRecord("delete_expired_job", job_id, None, 200))
    begin(session, job_id, why)
    return True


def record_obstacle(session: Session, job_id: str, why: str) -> None:
    """Record why a job that is being deleted still exists. Raises JobNotFound."""
    jobs.get(session, job_id, lock=True)
    if not events.has_event_since(session, job_id, "deletion_failed", why, since="deletion_began"):
        events.append(session, job_id, "deletion_failed", why)


def delete_metrics_batch(session: Session, job_id: str) -> int:
    """Delete the first METRICS_BATCH_ROWS rows of a job's metrics; returns how many there were."""
    first = select(Metric.step).where(Metric.job_id == job_id).order_by(Metric.step).limit(METRICS_BATCH_ROWS)
    return _deleted(session, delete(Metric).where(Metric.job_id == job_id, Metric.step.in_(first)))


def delete_bins_batch(session: Session, job_id: str) -> int:
    """Delete at most METRICS_BATCH_ROWS bins of a job's metrics; returns how many there were."""
    key = tuple_(MetricBin.level, MetricBin.bin)
    first = select(MetricBin.level, MetricBin.bin).where(MetricBin.job_id == job_id).limit(METRICS_BATCH_ROWS)
    return _deleted(session, delete(MetricBin).where(MetricBin.job_id == job_id, key.in_(first)))


def end(session: Session, job_id: str) -> dict[str, int]:
    """Delete all rows of a job that is being deleted; returns how many there were, by table. Raises JobNotFound."""
    jobs.get(session, job_id, lock=True)
    counts = {
        table.__tablename__: _deleted(session, delete(table).where(table.job_id == job_id))  # type: ignore[attr-defined]
        for table in _OF_A_JOB
    }
    counts[Job.__tablename__] = _deleted(session, delete(Job).where(Job.id == job_id))
    leases.forget(session, job_id)
    session.add(DeletedJob(id=job_id, deleted_at=time.time()))
    return counts


def deleted_ones(session: Session, job_ids: Collection[str]) -> set[str]:
    """Which of these jobs were deleted."""
    return set(session.scalars(select(DeletedJob.id).where(DeletedJob.id.in_(job_ids))))


def _deleted(session: Session, statement: Any) -> int:
    return cast("CursorResult[Any]", session.execute(statement)).rowcount
