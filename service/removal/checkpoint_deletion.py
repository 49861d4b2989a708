"""Deletes one durable checkpoint of a job if nothing needs it: first its files, then its entry in the database."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from service.file_work import REMOVAL_SECONDS, FileWork, NotFinished
from service.states import JobState, after_action, is_final
from service.store import Store, checkpoints, events, exports, generations, jobs, leases
from service.store.tables import Checkpoint, Job
from workers.checkpoint.catalog import checkpoint_path
from workers.checkpoint.pruning import remove
from workers.errors import MantaError
from workers.paths import Paths
from workers.storage.places import Place

_BEFORE_FIRST_STEP = (JobState.STARTING, JobState.RECOVERING, JobState.RESIZING)


class CheckpointNeeded(MantaError):
    """The checkpoint is in use, or the job would resume from it; the message says what to do."""


class CheckpointNotRemoved(MantaError):
    """Part of the checkpoint cannot be removed."""

    def __init__(self, path: str):
        super().__init__(
            f"{path} cannot be removed, or not all of it, so it is still listed; see to it that the service may, and "
            "delete it again"
        )


class CheckpointStillRemoving(MantaError):
    """The checkpoint is not removed in time."""

    def __init__(self, checkpoint_id: str, why: NotFinished):
        super().__init__(
            f"{checkpoint_id} is not removed yet ({why}); {why.state}: {why.advice}, and delete {checkpoint_id} again"
        )


def delete_checkpoint_in_time(
    store: Store, paths: Paths, job_id: str, checkpoint_id: str, force: bool, work: FileWork
) -> Checkpoint:
    """`delete_checkpoint`, which goes on without its caller if the file system or store does not answer.

    Raises JobNotFound, CheckpointNotFound, CheckpointNeeded, CheckpointNotRemoved, CheckpointStillRemoving.
    """
    about = ("checkpoint", job_id, checkpoint_id, force)
    try:
        return work.run(about, REMOVAL_SECONDS, lambda: delete_checkpoint(store, paths, job_id, checkpoint_id, force))
    except NotFinished as error:
        raise CheckpointStillRemoving(checkpoint_id, error) from error


def delete_checkpoint(store: Store, paths: Paths, job_id: str, checkpoint_id: str, force: bool = False) -> Checkpoint:
    """Remove a checkpoint's files and record that it is deleted; returns it. A deleted checkpoint stays deleted. The
    newest readable one of a job that may continue, which would resume from it, is deleted only with `force`.

    Raises JobNotFound, CheckpointNotFound, CheckpointNeeded, CheckpointNotRemoved.
    """
    with store.read() as session:
        row = checkpoints.get(session, job_id, checkpoint_id)
        if row.state == checkpoints.DELETED:
            return row
        _refuse_needed(session, jobs.get(session, job_id), row, force)
    if not remove(_place(paths, row)):
        raise CheckpointNotRemoved(row.path)
    return store.write(lambda session: _note(session, job_id, checkpoint_id, force))


def _place(paths: Paths, row: Checkpoint) -> Place:
    """Where the checkpoint is stored, which a trainer's report does not determine. Raises CheckpointNeeded."""
    place = checkpoint_path(paths.checkpoint_folder(row.job_id), row.step, row.generation)
    if str(place) != row.path:
        raise CheckpointNeeded(
            f"{row.path} is not where this service keeps checkpoints ({place}), so it removes nothing there: remove "
            "the folder yourself"
        )
    return place


def _refuse_needed(session: Session, job: Job, row: Checkpoint, force: bool) -> None:
    """Raises CheckpointNeeded."""
    state = JobState(job.state)
    if row.state == checkpoints.SAVING and not is_final(state) and row.generation == job.generation:
        raise CheckpointNeeded(f"{row.id} is being saved; wait until it is complete, or cancel the job")
    if exports.any_runs(session, job.id, leases.now(session), row.id):
        raise CheckpointNeeded(f"{row.id} is being exported; wait until that is done")
    lives = generations.of_job(session, job.id)
    restoring = bool(lives) and lives[-1].first_step_at is None and state in _BEFORE_FIRST_STEP
    if restoring and lives[-1].resume_source == "checkpoint" and lives[-1].resume_step == row.step:
        raise CheckpointNeeded(f"{job.id} is being restored from {row.id}; wait until it is RUNNING")
    may_go_on = not is_final(state) or after_action("retry", state) is not None
    if may_go_on and not force and row is checkpoints.newest(session, job.id):
        raise CheckpointNeeded(
            f"{row.id} is the newest whole checkpoint of {job.id}, which is {state} and would continue from it; "
            "with force=true it is deleted all the same"
        )


def _note(session: Session, job_id: str, checkpoint_id: str, force: bool) -> Checkpoint:
    row = checkpoints.get(session, job_id, checkpoint_id)
    if row.state != checkpoints.DELETED:
        row.state = checkpoints.DELETED
        data: dict[str, Any] = {"checkpoint": row.id, "path": row.path, "bytes": row.bytes, "forced": force}
        message = f"the user deleted the checkpoint of step {row.step} by generation {row.generation}"
        events.append(session, job_id, "checkpoint_deleted", message, step=row.step, data=data)
    return row
