"""A user's pauses: what is written at their beginning and end."""

from __future__ import annotations

from sqlalchemy.orm import Session

from service.states import JobState, after_action
from service.store import generations, jobs
from service.store.errors import IllegalTransition
from service.store.tables import Job

RESUMED = "resumed"
"""Key in the data of a generation after which the user has resumed the job."""


def request_pause(session: Session, job_id: str) -> Job:
    """The immediate effect of a user's pause: a QUEUED job becomes PAUSED, one that may hold places PAUSING, and one
    that is either stays so.

    Raises JobNotFound, and IllegalTransition if the job's state does not allow it.
    """
    job, target = _asked(session, job_id, "pause")
    if target == job.state:
        return job
    message = "paused by the user"
    if target == JobState.PAUSING:
        message += f": its state is being saved, for which `manta cancel {job_id}` does not wait"
    return jobs.transition(session, job_id, target, "paused_by_user", message)


def request_resume(session: Session, job_id: str) -> Job:
    """Resume a PAUSED job from its newest state: it is QUEUED again.

    Raises JobNotFound, and IllegalTransition if the job's state does not allow it.
    """
    job, target = _asked(session, job_id, "resume")
    # It was about to be PAUSED. Clocks may differ, so they cannot say whether what follows is the resumption.
    generations.forget_outcome(session, job_id, job.generation, **{RESUMED: True})
    return jobs.transition(session, job_id, target, "resumed_by_user", "resumed by the user")


def _asked(session: Session, job_id: str, action: str) -> tuple[Job, JobState]:
    job = jobs.get(session, job_id, lock=True)
    state = JobState(job.state)
    target = after_action(action, state)
    if target is None:
        raise IllegalTransition(job_id, state, action=action)
    return job, target
