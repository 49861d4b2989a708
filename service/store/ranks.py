"""All queries about ranks: where each part of a job's current gang runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from service.states import UNFINISHED
from service.store import jobs
from service.store.tables import Job, Rank
from service.store.types import Reader

STARTING, RUNNING, EXITED = "starting", "running", "exited"
"""States of a rank; one that has exited has no process."""


def replace(session: Session, job_id: str, rows: Iterable[dict[str, Any]]) -> None:
    """Replace all of the job's ranks with `rows`.

    Each row holds `rank, tensor, pipeline, data, generation, state` and optionally `context, node, device, pid, actor`.
    Raises TypeError for an unknown column.
    """
    session.execute(delete(Rank).where(Rank.job_id == job_id))
    session.add_all(Rank(job_id=job_id, **row) for row in rows)
    session.flush()


def set_state(session: Session, job_id: str, generation: int, rank: int, state: str, *, pid: int | None = None) -> bool:
    """Record what a rank is doing, and its trainer's process id if `pid` is given; one that has exited has none.

    Returns False, without any change, if the job is in a higher generation or has no such rank. Raises JobNotFound.
    """
    row = session.get(Rank, (job_id, rank))
    if row is None or generation < max(row.generation, jobs.get(session, job_id).generation):
        return False
    row.state, row.generation = state, generation
    if state == EXITED:  # another process may have the number by now
        row.pid = None
    elif pid is not None:
        row.pid = pid
    return True


def end_all(session: Session, job_id: str) -> None:
    """All ranks of a job have exited; their processes are gone."""
    session.execute(update(Rank).where(Rank.job_id == job_id).values(state=EXITED, pid=None))


def end(session: Session, job_id: str, lost: Iterable[int]) -> None:
    """Record that these ranks of a job have lost their agents, and their processes with them."""
    of_lost = Rank.job_id == job_id, Rank.rank.in_(lost)
    session.execute(update(Rank).where(*of_lost).values(state=EXITED, pid=None))


def of_job(session: Session, job_id: str) -> list[Rank]:
    """All ranks of a job, by number."""
    return list(session.scalars(select(Rank).where(Rank.job_id == job_id).order_by(Rank.rank)))


def running(reader: Reader) -> list[tuple[str, int, str]]:
    """Job, number and node of all ranks of unfinished jobs that have a process, in the jobs' order."""
    query = (
        select(Rank.job_id, Rank.rank, Rank.node)
        .join(Job, Job.id == Rank.job_id)
        .where(Job.state.in_(UNFINISHED), Rank.pid.is_not(None), Rank.node.is_not(None))
        .order_by(Job.priority.desc(), Job.id, Rank.rank)
    )
    return [(job, rank, node or "") for job, rank, node in reader.execute(query)]
