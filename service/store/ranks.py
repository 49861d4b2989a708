"""All queries about ranks: where each part of a job's current gang runs, and the numbers of its ranks, the newest and
earlier ones while there is room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session, defer

from manta.service.states import UNFINISHED
from manta.service.store import jobs
from manta.service.store.tables import Job, Rank, RankNumbers
from manta.service.store.types import Reader
from manta.workers.liveness.rank_samples import EVERY_SECONDS, RankSample, unpacked

STARTING, RUNNING, EXITED = "starting", "running", "exited"
"""States of a rank; one that has exited has no process."""
SLOTS = 300
"""Stored samples of a job: at least ten minutes."""
MAX_NUMBERS = 250_000
"""Most numbers in a history, over all ranks: some 2 MB of JSON."""


def replace(session: Session, job_id: str, rows: Iterable[dict[str, Any]]) -> None:
    """Replace all of the job's ranks with `rows`. Each row holds `rank, tensor, pipeline, data, generation, state` and
    optionally `context, node, device, pid, actor`. Raises TypeError for an unknown column."""
    session.execute(delete(Rank).where(Rank.job_id == job_id))
    session.add_all(Rank(job_id=job_id, **row) for row in rows)
    session.flush()


def set_state(session: Session, job_id: str, generation: int, rank: int, state: str, *, pid: int | None = None) -> bool:
    """Record what a rank is doing, and its trainer's process id if `pid` is given; one that has exited has none.
    Returns False, without any change, if the job is in a higher generation or has no such rank. Raises JobNotFound."""
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


def store_numbers(session: Session, job_id: str, generation: int, sample: RankSample, at: float) -> None:
    """Store a sample of Unix time `at`, replacing the one SLOTS before it."""
    slot = int(at / EVERY_SECONDS) % SLOTS
    row = session.get(RankNumbers, (job_id, slot)) or RankNumbers(job_id=job_id, slot=slot)
    row.generation, row.step, row.time, row.seconds = generation, sample.step, at, sample.seconds
    row.own_seconds, row.memory_bytes, row.stragglers = sample.own_seconds, sample.memory_bytes, [*sample.stragglers]
    if sample.expert_tokens is not None:  # large: only the newest are kept
        of_job = RankNumbers.job_id == job_id, RankNumbers.expert_tokens.is_not(None)
        session.execute(update(RankNumbers).where(*of_job).values(expert_tokens=None))
    row.expert_tokens = sample.expert_tokens
    session.add(row)


def newest_numbers(session: Session, job_id: str) -> RankNumbers | None:
    """The numbers of the present ranks; None before there are any in the job's generation. Raises JobNotFound."""
    generation = jobs.get(session, job_id).generation
    query = select(RankNumbers).where(RankNumbers.job_id == job_id).order_by(RankNumbers.time.desc()).limit(1)
    query = query.options(defer(RankNumbers.expert_tokens))
    row = session.scalars(query).one_or_none()
    return row if row is not None and row.generation == generation else None


def expert_tokens(session: Session, job_id: str) -> tuple[int, list[float]] | None:
    """The step and the tokens that chose each expert in it, layer by layer, in the newest sample that has them, of
    whatever generation; None if there is none."""
    query = select(RankNumbers.step, RankNumbers.expert_tokens)
    query = query.where(RankNumbers.job_id == job_id, RankNumbers.expert_tokens.is_not(None))
    found = session.execute(query.order_by(RankNumbers.time.desc()).limit(1)).one_or_none()
    return None if found is None else (found.step, unpacked(found.expert_tokens))


def history(session: Session, job_id: str, after_step: int = 0, max_points: int = SLOTS) -> History:
    """The newest samples above `after_step`, at most `max_points`, and at most MAX_NUMBERS numbers."""
    query = select(RankNumbers).where(RankNumbers.job_id == job_id, RankNumbers.step > after_step)
    query = (
        query.options(defer(RankNumbers.memory_bytes), defer(RankNumbers.expert_tokens))
        .order_by(RankNumbers.time.desc())
        .limit(max_points)
    )
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
