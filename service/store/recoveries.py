"""All queries about recoveries: the generations that followed failures."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.store.paging import Cursors, Page
from manta.service.store.tables import Recovery


def begin(
    session: Session,
    job_id: str,
    generation: int,
    timeline: RecoveryTimeline,
    *,
    kind: str,
    rank: int,
    cause: str,
    node: str | None = None,
    source: str = "start",
    resume_step: int = 0,
    wait_seconds: float = 0.0,
) -> None:
    """Record that `generation` starts to recover from a failure; within the transaction that starts it. `timeline`: so
    far; the others are columns of the row."""
    culprit = {"kind": kind, "rank": rank, "cause": cause, "node": node}
    state = {"source": source, "resume_step": resume_step, "wait_seconds": wait_seconds}
    session.add(Recovery(job_id=job_id, generation=generation, **culprit, **state, **timeline.to_json()))
    session.flush()


def record_latest(session: Session, job_id: str, generation: int, **times: float | None) -> None:
    """Record when ranks reached a point of the recovery, such as `connected_at`, in Unix seconds: the latest of all
    ranks counts. Has no effect if the generation was not begun by a failure, or has committed a step."""
    row = session.get(Recovery, (job_id, generation))
    if row is None or row.first_step_at is not None:
        return
    for name, at in times.items():
        known = getattr(row, name)
        if at is not None and (known is None or at > known):
            setattr(row, name, at)


def record_replaced(session: Session, job_id: str, generation: int, forked: Sequence[int], kept: int) -> None:
    """Record which ranks got a new process and how many kept theirs, once the agents have answered."""
    row = session.get(Recovery, (job_id, generation))
    if row is not None:
        row.forked, row.kept = list(forked), kept


def end(session: Session, job_id: str, generation: int, at: float, steps_redone: int) -> Recovery | None:
    """Record that the recovery is over: its generation committed a step at Unix time `at`. `steps_redone`: committed
    steps that are repeated. Only the first call counts; returns None otherwise, or if there was no recovery."""
    row = session.get(Recovery, (job_id, generation))
    if row is None or row.first_step_at is not None:
        return None
    row.first_step_at, row.steps_redone = at, steps_redone
    return row


def of_job(session: Session, job_id: str) -> list[Recovery]:
    """All recoveries of a job, oldest first."""
    return list(session.scalars(select(Recovery).where(Recovery.job_id == job_id).order_by(Recovery.generation)))


def page(session: Session, job_id: str, limit: int = 100, cursor: str | None = None) -> Page[Recovery]:
    """A job's recoveries, oldest first. Raises InvalidCursor."""
    cursors = Cursors("recoveries", job=job_id)
    after_generation = 0 if cursor is None else cursors.decode_number(cursor)
    own = select(Recovery).where(Recovery.job_id == job_id, Recovery.generation > after_generation)
    rows = list(session.scalars(own.order_by(Recovery.generation).limit(limit + 1)))
    return Page.of(rows, limit, cursors, lambda row: str(row.generation))


def timeline(row: Recovery) -> RecoveryTimeline:
    """The times of a recovery."""
    return RecoveryTimeline(**{name: getattr(row, name) for name in RecoveryTimeline.__dataclass_fields__})
