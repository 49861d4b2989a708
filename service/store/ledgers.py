"""A job's ledger, computed from its rows: the work grows with its generations, not with its steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, Select, bindparam, select
from sqlalchemy.orm import Session

from manta.service.ledger import STEP_CLASSES, Ledger, StateEntry, Training, ledger
from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.store import jobs, recoveries
from manta.service.store.tables import Base, Generation, Job, Recovery, StateChange
from manta.service.store.types import Reader


def _of_jobs(table: type[Base], order: str) -> Select[Any]:
    """Rows of some jobs in a table, in `order`; as plain rows, which are cheap. Built once: building a statement takes
    longer than running it."""
    columns = table.__table__.columns
    return select(*columns).where(columns.job_id.in_(bindparam("ids", expanding=True))).order_by(columns[order])


_ENTERED, _RECOVERED = _of_jobs(StateChange, "id"), _of_jobs(Recovery, "generation")
_STARTED = _of_jobs(Generation, "generation")


def of_job(session: Session, job_id: str, now: float) -> Ledger:
    """The ledger of a job, at Unix time `now` if it is not over. Raises JobNotFound."""
    return of_jobs(session, [jobs.get(session, job_id)], now)[job_id]


def of_jobs(reader: Reader, some: Sequence[Job | Row[Any]], now: float) -> dict[str, Ledger]:
    """The ledgers of some jobs, by id, with as many queries as for one."""
    entered, recovered, begun = (_by_job(reader, rows, some) for rows in (_ENTERED, _RECOVERED, _STARTED))
    books = {}
    for job in some:
        changes = [StateEntry(row.time, row.state) for row in entered[job.id]]
        known = {row.generation: recoveries.timeline(row) for row in recovered[job.id]}
        trainings = [_training(row, known.get(row.generation)) for row in begun[job.id]]
        books[job.id] = ledger(changes or [StateEntry(job.created_at, job.state)], trainings, now)
    return books


def _by_job(reader: Reader, query: Select[Any], some: Sequence[Job | Row[Any]]) -> defaultdict[str, list[Any]]:
    rows: defaultdict[str, list[Any]] = defaultdict(list)
    for row in reader.execute(query, {"ids": [job.id for job in some]}):
        rows[row.job_id].append(row)
    return rows


def _training(row: Any, recovery: RecoveryTimeline | None) -> Training:
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
