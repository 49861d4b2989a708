"""A job's ledger, from its rows: the work grows with its generations, never with its steps."""

from __future__ import annotations

from sqlalchemy.orm import Session

from service.ledger import STEP_CLASSES, Ledger, StateEntry, Training, ledger
from service.recovery.timeline import RecoveryTimeline
from service.store import generations, jobs, recoveries, state_changes
from service.store.tables import Generation


def of_job(session: Session, job_id: str, now: float) -> Ledger:
    """The ledger of a job, at Unix time `now` where it is not over. Raises JobNotFound."""
    job = jobs.get(session, job_id)
    changes = [StateEntry(row.time, row.state) for row in state_changes.of_job(session, job_id)]
    known = {row.generation: recoveries.timeline(row) for row in recoveries.of_job(session, job_id)}
    trainings = [_training(row, known.get(row.generation)) for row in generations.of_job(session, job_id)]
    return ledger(changes or [StateEntry(job.created_at, job.state)], trainings, now)


def _training(row: Generation, recovery: RecoveryTimeline | None) -> Training:
    return Training(
        began_at=row.started_at,
        ended_at=row.ended_at,
        trained_from=row.trained_from,
        trained_until=row.trained_until,
        steps=row.committed_steps + row.redone_steps,
        seconds={name: getattr(row, f"{name}_seconds") for name in STEP_CLASSES},
        recovery=recovery,
        outcome=((row.data or {}).get("outcome") or {}).get("state"),
    )
