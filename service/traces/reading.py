"""Reads the history of a job from the database."""

from __future__ import annotations

from sqlalchemy.orm import Session

from service.cluster.sizes import layout_in_use
from service.ledger import StateEntry
from service.store import generations, jobs, recoveries, state_changes
from service.store.tables import Generation, Job, Recovery
from service.stored_specs import SpecNotUnderstood, stored_spec
from service.traces.history import JobHistory, PastGeneration, PastRecovery
from workers.config import ParallelConfig


def history_of(session: Session, job_id: str) -> JobHistory:
    """The history of a job so far. Raises JobNotFound."""
    job = jobs.get(session, job_id)
    return JobHistory(
        job.id,
        job.name,
        job.project,
        [StateEntry(row.time, row.state) for row in state_changes.of_job(session, job_id)],
        [_generation(row) for row in generations.of_job(session, job_id)],
        [_recovery(row) for row in recoveries.of_job(session, job_id)],
        _layout(job),
    )


def _layout(job: Job) -> ParallelConfig | None:
    try:
        return layout_in_use(stored_spec(job).spec.layout, job)
    except SpecNotUnderstood:
        return None


def _generation(row: Generation) -> PastGeneration:
    return PastGeneration(
        row.generation,
        row.cause,
        row.started_at,
        row.resume_source,
        row.resume_step,
        row.trained_from,
        row.first_step_at,
        row.ended_at,
    )


def _recovery(row: Recovery) -> PastRecovery:
    return PastRecovery(
        row.generation,
        row.kind,
        row.cause,
        row.rank,
        recoveries.timeline(row),
        row.node,
        row.forked,
        row.kept,
        row.source,
        row.resume_step,
        row.steps_redone,
        row.wait_seconds,
    )
