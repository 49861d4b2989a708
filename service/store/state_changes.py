"""All queries about the states of jobs over time."""

from __future__ import annotations

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from service.states import JobState
from service.store.tables import StateChange

_INSERT = insert(StateChange)


def append(session: Session, job_id: str, state: JobState, at: float) -> None:
    """Record that a job entered `state` at Unix time `at`."""
    session.connection().execute(_INSERT, {"job_id": job_id, "time": at, "state": state.value})


def of_job(session: Session, job_id: str) -> list[StateChange]:
    """A job's states, oldest first; the first is its submission."""
    return list(session.scalars(select(StateChange).where(StateChange.job_id == job_id).order_by(StateChange.id)))
