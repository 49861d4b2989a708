"""All queries about a database that is older than what has happened: it was restored from a backup."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from manta.service.cluster.sizes import in_use
from manta.service.states import PAUSABLE, JobState
from manta.service.store import events, generations, jobs, pauses_and_retries, ranks
from manta.service.store.tables import Event, Generation
from manta.service.stored_specs import stored_spec
from manta.workers.comm.grid import RankGrid

RESTORED = "restored"
"""Type of the event that each unfinished job gets when its database is restored."""
_SETTLED = ("generation_started", "adopted", "database_older")
"""Types of events after which it is known what is running of a job."""


@dataclass(frozen=True)
class NewerGang:
    """Agents of a job's generation that the database does not know."""

    generation: int
    """Number of the generation."""
    tensor: int
    """Tensor-parallel size of the gang."""
    pipeline: int
    """Number of pipeline stages of the gang."""
    data: int
    """Number of replicas of the gang."""
    context: int
    """Context-parallel size of the gang."""
    expert: int
    """Expert-parallel size of the gang."""
    agents: Mapping[int, Mapping[str, Any]]
    """By rank what is known about its agent: `actor`, `node`, `device`, `pid`."""


def take_over(session: Session, job_id: str, gang: NewerGang) -> bool:
    """Record `gang` as the job's, so that it can be adopted; False if the job's state does not allow that. Nothing is
    invented about the time in between. Raises JobNotFound, SpecNotUnderstood."""
    job = jobs.get(session, job_id, lock=True)
    before, state = job.generation, JobState(job.state)
    if state in (JobState.SUCCEEDED, JobState.CANCELLED) or before >= gang.generation:
        return False
    if state is JobState.PAUSING:  # it was paused and resumed since
        jobs.transition(session, job_id, JobState.PAUSED)
        state = JobState.PAUSED
    if state is JobState.PAUSED:
        pauses_and_retries.request_resume(session, job_id)
    elif state is JobState.FAILED:
        pauses_and_retries.request_retry(session, job_id)
    elif state is JobState.RESIZING:
        jobs.transition(session, job_id, JobState.RECOVERING)
    if job.state == JobState.QUEUED:
        jobs.transition(session, job_id, JobState.STARTING)
    generations.end(session, job_id, before)
    _begin(session, job_id, gang)
    sentence = (
        f"generation {gang.generation} runs, and the database knows {before}: it is older than what runs, such as one "
        "that was restored from a backup. What runs is taken over; what happened in between is not known any more"
    )
    data = {"known": before, "running": gang.generation}
    events.append(session, job_id, "database_older", sentence, generation=gang.generation, data=data)
    return True


def _begin(session: Session, job_id: str, gang: NewerGang) -> None:
    job, now = jobs.get(session, job_id), time.time()
    job.generation, job.report_cursor, job.updated_at = gang.generation, {}, now
    job.tensor, job.pipeline, job.context, job.replicas = gang.tensor, gang.pipeline, gang.context, gang.data
    job.expert = gang.expert
    about = {"cause": "found running", "resume_source": "unknown", "resume_step": job.step, "started_at": now}
    session.add(Generation(job_id=job_id, generation=gang.generation, data={}, **about))
    layout = in_use(stored_spec(job).spec, job).layout
    grid = RankGrid(layout)
    rows = []
    for rank in range(layout.world_size):
        at, known = grid.coordinates(rank), gang.agents.get(rank)
        place = {"tensor": at.tensor, "pipeline": at.pipeline, "data": at.data, "context": at.context}
        state = "exited" if known is None else "running"
        rows.append({"rank": rank, "generation": gang.generation, "state": state, **place, **(known or {})})
    ranks.replace(session, job_id, rows)


def unsettled(session: Session, job_id: str) -> bool:
    """Whether the job's database was restored, and nothing of the job was seen running since."""
    newest = select(func.max(Event.id)).where(Event.job_id == job_id)
    restored = session.scalar(newest.where(Event.type == RESTORED))
    return restored is not None and restored > (session.scalar(newest.where(Event.type.in_(_SETTLED))) or 0)


def pause(session: Session, job_id: str) -> bool:
    """Pause a job that was running at the time of the backup, and of which nothing is running now: it may be over, so
    its user decides. False if its state does not allow that."""
    job = jobs.get(session, job_id, lock=True)
    if job.state in PAUSABLE:
        jobs.transition(session, job_id, JobState.PAUSING)
    if job.state != JobState.PAUSING:
        return False
    message = (
        f"it ran when the backup was made, and nothing of it runs now: `manta resume {job_id}` continues it from its "
        "newest state, where it is not over"
    )
    ranks.end_all(session, job_id)
    jobs.transition(session, job_id, JobState.PAUSED, RESTORED, message)
    return True


def know_generation(session: Session, job_id: str, generation: int) -> None:
    """The number of the job's next generation must be above `generation`, which has left a checkpoint. Raises
    JobNotFound."""
    job = jobs.get(session, job_id, lock=True)
    job.generation = max(job.generation, generation)
