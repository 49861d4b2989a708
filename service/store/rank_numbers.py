"""All queries about the numbers of ranks: the newest of each job, and earlier ones while there is room."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session, defer

from service.store import jobs
from service.store.tables import RankNumbers
from workers.liveness.rank_samples import EVERY_SECONDS, RankSample, unpacked

SLOTS = 300
"""Stored samples of a job: at least ten minutes."""
MAX_NUMBERS = 250_000
"""Most numbers in a history, over all ranks: some 2 MB of JSON."""


@dataclass(frozen=True)
class History:
    """Own times of all ranks over the last samples, oldest first; samples with another numbering of ranks, and of
    repeated steps, are left out."""

    steps: list[int]
    """The last step of each sample."""
    times: list[float]
    """Unix seconds of each sample."""
    own_seconds: list[list[float]]
    """For each sample, by rank."""


def store(session: Session, job_id: str, generation: int, sample: RankSample, at: float) -> None:
    """Store a sample of Unix time `at`, replacing the one SLOTS before it."""
    slot = int(at / EVERY_SECONDS) % SLOTS
    row = session.get(RankNumbers, (job_id, slot)) or RankNumbers(job_id=job_id, slot=slot)
    row.generation, row.step, row.time, row.seconds = generation, sample.step, at, sample.seconds
    row.own_seconds, row.memory_bytes, row.stragglers = sample.own_seconds, sample.memory_bytes, [*sample.stragglers]
    session.add(row)


def newest(session: Session, job_id: str) -> RankNumbers | None:
    """The numbers of the present ranks; None before there are any in the job's generation. Raises JobNotFound."""
    generation = jobs.get(session, job_id).generation
    query = select(RankNumbers).where(RankNumbers.job_id == job_id).order_by(RankNumbers.time.desc()).limit(1)
    row = session.scalars(query).one_or_none()
    return row if row is not None and row.generation == generation else None


def history(session: Session, job_id: str, after_step: int = 0, max_points: int = SLOTS) -> History:
    """The newest samples above `after_step`, at most `max_points`, and at most MAX_NUMBERS numbers."""
    query = select(RankNumbers).where(RankNumbers.job_id == job_id, RankNumbers.step > after_step)
    query = query.options(defer(RankNumbers.memory_bytes)).order_by(RankNumbers.time.desc()).limit(max_points)
    newest_first = History([], [], [])
    for row in session.scalars(query):
        own = [] if row.own_seconds is None else unpacked(row.own_seconds)
        ranks = len(newest_first.own_seconds[0]) if newest_first.own_seconds else len(own)
        if not own or len(own) != ranks or (len(newest_first.steps) + 1) * ranks > MAX_NUMBERS:
            break
        if not newest_first.steps or row.step < newest_first.steps[-1]:
            newest_first.steps.append(row.step)
            newest_first.times.append(row.time)
            newest_first.own_seconds.append(own)
    return History(newest_first.steps[::-1], newest_first.times[::-1], newest_first.own_seconds[::-1])
