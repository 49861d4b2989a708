"""All queries about generations: the starts of a job's gang."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from manta.service.store import jobs
from manta.service.store.tables import Generation
from manta.workers.timing.step_clock import WAITS, Wait


@dataclass(frozen=True)
class TrainedStep:
    """Where the time of one committed step went, according to the reporting rank."""

    at: float
    """When it was committed, Unix seconds."""
    wall: float
    """Seconds since the last commit, or since its generation began to train; waits included."""
    waits: dict[Wait, float]
    """Seconds of each wait; together they are at most `wall`."""
    redone: bool = False
    """Whether the step had already been committed before."""
    counts: bool = True
    """Whether it is a step, not the time after the last one."""

    @classmethod
    def of(cls, seconds: dict[str, Any], at: float, redone: bool = False, counts: bool = True) -> TrainedStep:
        """The step of which a report has these `seconds`, from `manta.workers.timing.step_clock`."""
        wall = left = max(0.0, float(seconds.get("wall", 0.0)))
        waits: dict[Wait, float] = {}
        for name in WAITS:
            waits[name] = min(max(0.0, float(seconds.get(name, 0.0))), left)
            left -= waits[name]
        return cls(at, wall, waits, redone, counts)


def begin(
    session: Session,
    job_id: str,
    cause: str,
    counts_as_restart: bool,
    resume_source: str = "start",
    resume_step: int = 0,
    data: dict[str, Any] | None = None,
) -> int:
    """Open the job's next generation and return its number; from now on, reports of lower ones are refused. Ends the
    last generation, if that is still open. The sequence numbers of reports start again from zero, since earlier reports
    are fenced now and new agents number theirs from 1. The generation begins after the user's last retry, even if that
    was recorded by another clock. Raises JobNotFound."""
    job = jobs.get(session, job_id, lock=True)
    now = time.time()
    end(session, job_id, job.generation)
    job.generation += 1
    job.restarts += int(counts_as_restart)
    job.report_cursor = {}
    job.updated_at = now
    row = Generation(
        job_id=job_id,
        generation=job.generation,
        cause=cause,
        resume_source=resume_source,
        resume_step=resume_step,
        started_at=max(now, math.nextafter(job.retried_at or 0.0, math.inf)),
        data=data or {},
    )
    session.add(row)
    session.flush()
    return job.generation


def mark_first_step(session: Session, job_id: str, generation: int, at: float | None = None) -> bool:
    """Record when a generation committed its first step (Unix seconds, default: now); only the first call counts.
    Returns whether this was the first."""
    row = session.get(Generation, (job_id, generation))
    if row is None or row.first_step_at is not None:
        return False
    row.first_step_at = time.time() if at is None else at
    return True


def end(
    session: Session, job_id: str, generation: int, at: float | None = None, outcome: dict[str, Any] | None = None
) -> None:
    """Record when a generation ended (Unix seconds, default: now), and the job's `outcome` if it was the last one; only
    the first call counts."""
    row = session.get(Generation, (job_id, generation))
    if row is not None and row.ended_at is None:
        row.ended_at = time.time() if at is None else at
        if outcome is not None:
            row.data = {**row.data, "outcome": outcome}


def began_at(session: Session, job_id: str, generation: int) -> float:
    """When a generation began, in Unix seconds; 0 if there is none."""
    row = session.get(Generation, (job_id, generation))
    return 0.0 if row is None else row.started_at


def clear_outcome(session: Session, job_id: str, generation: int, **noted: Any) -> None:
    """The job does not end with its outcome in `generation`, since it is retried. `noted`: added to the generation's
    data."""
    row = session.get(Generation, (job_id, generation))
    if row is not None:
        row.data = {**{key: value for key, value in row.data.items() if key != "outcome"}, **noted}


def add_training(session: Session, job_id: str, generation: int, step: TrainedStep) -> None:
    """Add a committed step, or the end of the loop, to the running sums of the generation that made it."""
    row = session.get(Generation, (job_id, generation))
    if row is None:
        return
    if row.trained_from is None:
        row.trained_from = step.at - step.wall
    row.trained_until = max(step.at, row.trained_until or step.at)
    if step.redone:
        row.redo_seconds += step.wall
        row.redone_steps += int(step.counts)
        return
    row.committed_steps += int(step.counts)
    row.compute_seconds += step.wall - sum(step.waits.values())
    row.data_wait_seconds += step.waits["data_wait"]
    row.snapshot_stall_seconds += step.waits["snapshot_stall"]
    row.checkpoint_stall_seconds += step.waits["checkpoint_stall"]


def of_job(session: Session, job_id: str) -> list[Generation]:
    """All generations of a job, oldest first."""
    return list(session.scalars(select(Generation).where(Generation.job_id == job_id).order_by(Generation.generation)))
