"""Pauses, their ends, and retries of failed jobs, as users request them; what a failed job has in shared memory is kept
for its retry."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import select
from sqlalchemy.orm import Session

from manta.service.states import FINAL, JobState, is_final
from manta.service.store import generations, jobs
from manta.service.store.errors import JobBeingDeleted
from manta.service.store.tables import Job

RESUMED = "resumed"
"""Key in the data of a generation after which the user has resumed the job."""


def request_pause(session: Session, job_id: str) -> Job:
    """The immediate effect of a user's pause: a QUEUED job becomes PAUSED, one that may hold places PAUSING, and one
    that is either stays so. Raises JobNotFound, and IllegalTransition if the job's state does not allow it."""
    job, target = jobs.asked(session, job_id, "pause")
    if target == job.state:
        return job
    message = "paused by the user"
    if target == JobState.PAUSING:
        message += f"; its state is being saved (manta cancel {job_id} does not wait for that)"
    return jobs.transition(session, job_id, target, "paused_by_user", message)


def request_resume(session: Session, job_id: str) -> Job:
    """Resume a PAUSED job from its newest state: it is QUEUED again. Raises JobNotFound, and IllegalTransition if the
    job's state does not allow it."""
    job, target = jobs.asked(session, job_id, "resume")
    # It was about to be PAUSED. Clocks may differ, so they cannot say whether what follows is the resumption.
    generations.clear_outcome(session, job_id, job.generation, **{RESUMED: True})
    return jobs.transition(session, job_id, target, "resumed_by_user", "resumed by the user")


def request_retry(session: Session, job_id: str) -> Job:
    """Retry a FAILED job from where it failed: it is QUEUED again, and its earlier failures no longer count. Raises
    JobNotFound, JobBeingDeleted, and IllegalTransition if the job's state does not allow it."""
    if jobs.get(session, job_id, lock=True).deletion_began_at is not None:
        raise JobBeingDeleted(job_id)
    job, target = jobs.asked(session, job_id, "retry")
    generations.clear_outcome(session, job_id, job.generation)
    message = f"retried by the user; it had failed: {job.message}"
    jobs.transition(session, job_id, target, "retried_by_user", message)
    # Not before the failed generation began, whose failures would still count: that may be by another clock.
    job.retried_at = max(job.updated_at, generations.began_at(session, job_id, job.generation))
    job.memory_kept_until = job.finished_at = None
    return job


def holding_memory(session: Session, job_ids: Collection[str]) -> set[str]:
    """Which of these jobs have snapshots in shared memory that must stay: jobs that are not final, or have failed and
    may be retried."""
    kept = Job.state.not_in(FINAL) | Job.memory_kept_until.is_not(None)
    return set(session.scalars(select(Job.id).where(Job.id.in_(job_ids), kept)))


def memory_expired(session: Session, now: float) -> list[str]:
    """Ids of the jobs whose snapshots were kept long enough."""
    return list(session.scalars(select(Job.id).where(Job.memory_kept_until < now)))


def release_snapshots(session: Session, job_id: str, now: float) -> bool:
    """Record that the job's snapshots in shared memory are no longer kept; False if they must be, since it is being
    retried, or their time is not over. Raises JobNotFound."""
    job = jobs.get(session, job_id, lock=True)
    if not is_final(job.state) or job.memory_kept_until is None or job.memory_kept_until >= now:
        return False
    job.memory_kept_until = None
    return True
