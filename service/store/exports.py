"""All queries about exports of checkpoints' weights."""

from __future__ import annotations

import secrets

from sqlalchemy import select
from sqlalchemy.orm import Session

from manta.service.store import jobs, leases
from manta.service.store.errors import ExportNotFound, JobBeingDeleted
from manta.service.store.tables import Export

RUNNING, DONE, FAILED = "running", "done", "failed"
ABANDONED_SECONDS = 30.0
"""A running export is updated more often than this; one without updates has ended with its service."""


def begin(session: Session, job_id: str, checkpoint_id: str, path: str, format: str, dtype: str | None) -> Export:
    """Record the beginning of an export, in a new row. Raises JobNotFound, JobBeingDeleted."""
    if jobs.get(session, job_id, lock=True).deletion_began_at is not None:
        raise JobBeingDeleted(job_id)
    now = leases.now(session)
    row = Export(
        id=f"export_{secrets.token_hex(6)}",
        job_id=job_id,
        checkpoint_id=checkpoint_id,
        path=path,
        format=format,
        dtype=dtype,
        state=RUNNING,
        done_bytes=0,
        created_at=now,
        updated_at=now,
    )
    session.add(row)
    session.flush()
    return row


def note(session: Session, export_id: str, done: int, total: int | None) -> None:
    """Record its progress, in bytes."""
    row = session.get(Export, export_id)
    if row is not None and row.state == RUNNING:
        row.done_bytes, row.total_bytes, row.updated_at = done, total, leases.now(session)


def end(session: Session, export_id: str, problem: str | None) -> None:
    """Record that it is done, or with `problem` why it failed."""
    row = session.get(Export, export_id)
    if row is not None:
        row.state, row.message = DONE if problem is None else FAILED, problem
        row.updated_at = leases.now(session)
        row.done_bytes = row.total_bytes or row.done_bytes if problem is None else row.done_bytes


def get(session: Session, job_id: str, export_id: str) -> Export:
    """One of a job's exports. Raises ExportNotFound."""
    row = session.get(Export, export_id)
    if row is None or row.job_id != job_id:
        raise ExportNotFound(job_id, export_id)
    return row


def of_job(session: Session, job_id: str, limit: int = 100) -> list[Export]:
    """The newest exports of a job, newest first."""
    query = select(Export).where(Export.job_id == job_id).order_by(Export.created_at.desc(), Export.id).limit(limit)
    return list(session.scalars(query))


def is_running(row: Export, now: float) -> bool:
    """Whether it is being written at `now`, by the database's clock, since the caller may be on another machine."""
    return row.state == RUNNING and now - row.updated_at < ABANDONED_SECONDS


def any_runs(session: Session, job_id: str, now: float, checkpoint_id: str | None = None) -> bool:
    """Whether an export of a job, or of one of its checkpoints, is being written at `now`, by the database's clock."""
    rows = session.scalars(select(Export).where(Export.job_id == job_id, Export.state == RUNNING))
    return any(is_running(row, now) for row in rows if checkpoint_id in (None, row.checkpoint_id))
