"""Deletes a job for good: what it holds on the cluster, its files and its rows, in that order; or one durable
checkpoint of a job if nothing needs it. Jobs that ended long ago are deleted without being asked if the service is
configured to keep them only for a limited time.

A job is marked first. Whatever fails or is killed in between, the job is still listed, shows that it is being deleted,
and can be deleted again.

No clock, no backup and no file system may cause the deletion of something that is not old. So an expired job is deleted
only when every check during an hour of the monotonic clock has found it expired (the wall clock may be set), and when
nothing in its folder was written later than that (a restored database may not know what the job has done since); what
cannot be read does not count as old.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from manta.service.cluster.errors import ClusterUnavailable
from manta.service.control.file_work import FILE_SECONDS, REMOVAL_SECONDS, FileWork, NotFinished
from manta.service.errors import ErrorKind, ServiceError
from manta.service.states import JobState, after_action, is_final
from manta.service.store import Store, checkpoints, deletion, events, exports, generations, jobs, leases
from manta.service.store.errors import JobNotFound
from manta.service.store.tables import Checkpoint, Job
from manta.workers.checkpoint.catalog import checkpoint_path, is_frozen_folder, list_checkpoints
from manta.workers.checkpoint.pruning import remove, remove_unused_frozen
from manta.workers.node.folders import shares
from manta.workers.paths import Paths
from manta.workers.storage.files import bytes_in, files_of
from manta.workers.storage.locations import Location

log = logging.getLogger(__name__)

_BEFORE_FIRST_STEP = (JobState.STARTING, JobState.RECOVERING, JobState.RESIZING)
POLL_SECONDS = 600.0
CONFIRMED_SECONDS = 3600.0
"""How long a job must have been found expired, by a clock that cannot be set."""
JOBS_PER_CHECK = 200
"""How many jobs one check deletes, those that ended first; a job that cannot be deleted is tried again an hour
later."""
MAX_UNRESPONSIVE = 2
"""After so many jobs whose files do not answer, the others wait for the next check: each may keep a thread."""
DAY_SECONDS = 86400.0


class NotRemoved(ServiceError):
    """A file cannot be removed, so what it belongs to is still there."""

    kind = ErrorKind("files_not_removed", 409, "a file cannot be removed, so what it belongs to is still there")


class StillRemoving(NotRemoved):
    """The files of a job are not removed in time."""

    def __init__(self, job_id: str, why: NotFinished):
        super().__init__(
            f"the files of {job_id} are not all removed yet ({why}), so the job is still there; {why.state}: "
            f"{why.advice}, and delete {job_id} again"
        )


class FilesNotRemoved(NotRemoved):
    """Something in a job's folder cannot be removed."""

    def __init__(self, job_id: str, folder: Location, error: OSError):
        why = error.strerror or str(error) or type(error).__name__
        super().__init__(
            f"{error.filename or folder} cannot be removed ({why}), so the job and what is left of it are still there; "
            f"see to it that it can, and delete {job_id} again"
        )


@dataclass(frozen=True)
class RemovedFiles:
    """What was in a job's folder."""

    checkpoints: int = 0
    """Folders of durable checkpoints, complete or not."""
    logs: int = 0
    """Log files of ranks, and the parts of logs that are stored elsewhere."""
    bytes: int = 0
    """Size of all files."""


@dataclass(frozen=True)
class Deletion:
    """What was deleted."""

    rows: dict[str, int]
    """Number of rows of the database, by table."""
    files: RemovedFiles
    """Files."""


def delete_job(store: Store, paths: Paths, job_id: str, release_job: Callable[[], None], work: FileWork) -> Deletion:
    """Delete a final job. `release_job` returns when nothing of it is left on the cluster, including its snapshots in
    memory; `work`: what its files are removed by. Raises JobNotFound, JobNotFinal, JobBeingExported, FilesNotRemoved,
    StillRemoving, and whatever `release_job` raises."""
    store.write(lambda session: deletion.begin(session, job_id))
    release_job()
    return delete_rest_in_time(store, paths, job_id, work)


def delete_rest_in_time(store: Store, paths: Paths, job_id: str, work: FileWork) -> Deletion:
    """`delete_rest`, which goes on without its caller if the file system or store does not answer. Raises JobNotFound,
    FilesNotRemoved, StillRemoving."""
    try:
        return work.run(("job", job_id), REMOVAL_SECONDS, lambda: delete_rest(store, paths, job_id))
    except NotFinished as error:
        late = StillRemoving(job_id, error)
        with contextlib.suppress(JobNotFound):  # it is done after all
            store.write(lambda session: deletion.record_obstacle(session, job_id, str(late)))
        raise late from error


def delete_rest(store: Store, paths: Paths, job_id: str) -> Deletion:
    """Delete the files and rows of a job that is marked and has nothing left on the cluster. Raises JobNotFound,
    FilesNotRemoved."""
    try:
        files = remove_files(paths, job_id)
    except FilesNotRemoved as error:
        why = str(error)
        store.write(lambda session: deletion.record_obstacle(session, job_id, why))
        raise
    some = {
        "metrics": _all(store, lambda session: deletion.delete_metrics_batch(session, job_id)),
        "metric_bins": _all(store, lambda session: deletion.delete_bins_batch(session, job_id)),
    }
    rows = store.write(lambda session: deletion.end(session, job_id))
    return Deletion({name: count + some.get(name, 0) for name, count in rows.items()}, files)


def _all(store: Store, delete_some: Callable[[Session], int]) -> int:
    """Repeat `delete_some` until it finds nothing; returns how many rows it has deleted."""
    count = 0
    while some := store.write(delete_some):
        count += some
    return count


def remove_files(paths: Paths, job_id: str) -> RemovedFiles:
    """Remove the folders of a job: checkpoints, logs and everything else. Raises FilesNotRemoved."""
    folder = paths.job_folder(job_id)
    checkpoints, log_archive = paths.checkpoint_folder(job_id), paths.stored_log_folder(job_id)
    elsewhere = _remove_external_folders(paths, job_id, folder, checkpoints, log_archive)
    if not os.path.lexists(folder):
        return elsewhere
    try:
        removed = RemovedFiles(
            checkpoints=elsewhere.checkpoints + _checkpoints_in(folder / checkpoints.name),
            logs=elsewhere.logs + _entries(paths.log_folder(job_id)),
            bytes=elsewhere.bytes + bytes_in(folder),
        )
        shutil.rmtree(folder)
    except OSError as error:
        raise FilesNotRemoved(job_id, folder, error) from error
    return removed


def _remove_external_folders(
    paths: Paths, job_id: str, folder: Path, checkpoints: Location, logs: Location | None
) -> RemovedFiles:
    """Remove the job's folders that are not in its own, which contain nothing but its checkpoints and logs."""
    root = paths.checkpoint_root
    if isinstance(root, Path) and checkpoints.parent != folder and not shares(root, paths.installation):
        raise FilesNotRemoved(job_id, checkpoints, OSError(f"{root} is not mounted here, or cannot be written"))
    removed = RemovedFiles(
        checkpoints=_count(job_id, checkpoints, _checkpoints_in) if checkpoints.parent != folder else 0,
        logs=0 if logs is None else _count(job_id, logs, _entries),
    )
    others = {checkpoints.parent, *(() if logs is None else (logs.parent,))} - {folder}
    return replace(removed, bytes=sum(_remove(job_id, other) for other in others))


def _count(job_id: str, folder: Location, count: Callable[[Location], int]) -> int:
    try:
        return count(folder)
    except OSError as error:
        raise FilesNotRemoved(job_id, folder, error) from error


def _remove(job_id: str, folder: Location) -> int:
    """Remove `folder`; returns how many bytes it contained."""
    files = files_of(folder)
    try:
        count = files.bytes_in(folder)
        files.remove_folder(folder)
        if files.is_there(folder):
            raise OSError("some files could not be removed")
    except OSError as error:
        raise FilesNotRemoved(job_id, folder, error) from error
    return count


def _entries(folder: Location) -> int:
    return len(_names(folder))


def _checkpoints_in(folder: Location) -> int:
    return sum(not is_frozen_folder(name) for name in _names(folder))


def _names(folder: Location) -> list[str]:
    try:
        return files_of(folder).names(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


class CheckpointNeeded(ServiceError):
    """The checkpoint is in use, or the job would resume from it; the message says what to do."""

    kind = ErrorKind("checkpoint_needed", 409, "the checkpoint is in use, or the job would resume from it")


class CheckpointNotRemoved(NotRemoved):
    """Part of the checkpoint cannot be removed."""

    def __init__(self, path: str):
        super().__init__(
            f"{path} cannot be removed, or not all of it, so it is still listed; see to it that the service may, and "
            "delete it again"
        )


class CheckpointStillRemoving(NotRemoved):
    """The checkpoint is not removed in time."""

    def __init__(self, checkpoint_id: str, why: NotFinished):
        super().__init__(
            f"{checkpoint_id} is not removed yet ({why}); {why.state}: {why.advice}, and delete {checkpoint_id} again"
        )


def delete_checkpoint_in_time(
    store: Store, paths: Paths, job_id: str, checkpoint_id: str, force: bool, work: FileWork
) -> Checkpoint:
    """`delete_checkpoint`, which goes on without its caller if the file system or store does not answer. Raises
    JobNotFound, CheckpointNotFound, CheckpointNeeded, CheckpointNotRemoved, CheckpointStillRemoving."""
    about = ("checkpoint", job_id, checkpoint_id, force)
    try:
        return work.run(about, REMOVAL_SECONDS, lambda: delete_checkpoint(store, paths, job_id, checkpoint_id, force))
    except NotFinished as error:
        raise CheckpointStillRemoving(checkpoint_id, error) from error


def delete_checkpoint(store: Store, paths: Paths, job_id: str, checkpoint_id: str, force: bool = False) -> Checkpoint:
    """Remove a checkpoint's files and record that it is deleted; returns it. A deleted checkpoint stays deleted. The
    newest readable one of a job that may continue, which would resume from it, is deleted only with `force`. Frozen
    weights are removed with the last checkpoint that refers to them: here, or by the job while it runs. Raises
    JobNotFound, CheckpointNotFound, CheckpointNeeded, CheckpointNotRemoved."""
    with store.read() as session:
        row, job = checkpoints.get(session, job_id, checkpoint_id), jobs.get(session, job_id)
        if row.state == checkpoints.DELETED:
            return row
        _refuse_needed(session, job, row, force)
        is_over = is_final(JobState(job.state))
    if not remove(_place(paths, row)):
        raise CheckpointNotRemoved(row.path)
    listing = list_checkpoints(paths.checkpoint_folder(job_id))
    if is_over and listing.problem is None:
        remove_unused_frozen(listing.folder, listing.checkpoints)
    return store.write(lambda session: _note(session, job_id, checkpoint_id, force))


def _place(paths: Paths, row: Checkpoint) -> Location:
    """Where the checkpoint is stored, which a trainer's report does not determine."""
    place = checkpoint_path(paths.checkpoint_folder(row.job_id), row.step, row.generation)
    if str(place) != row.path:
        raise CheckpointNeeded(
            f"{row.path} is not where this service keeps checkpoints ({place}), so it removes nothing there: remove "
            "the folder yourself"
        )
    return place


def _refuse_needed(session: Session, job: Job, row: Checkpoint, force: bool) -> None:
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


@dataclass
class ConfirmedExpiry:
    """Which jobs every check has found expired, and since when."""

    seconds: float
    """How long they must have been expired."""
    _since: dict[str, float] = field(default_factory=dict)

    def confirmed(self, expired: Collection[str], now: float, most: int | None = None) -> list[str]:
        """The first `most` of the jobs that are expired now and have been so in every check for `seconds`; each is
        returned once in that time. `now`: seconds of a monotonic clock."""
        self._since = {job: self._since.get(job, now) for job in expired}
        long_enough = [job for job, since in self._since.items() if now - since >= self.seconds][:most]
        for job in long_enough:
            del self._since[job]
        return long_enough

    def put_back(self, jobs: Iterable[str], now: float) -> None:
        """Take back jobs that were returned, but not tried: the next check returns them if it finds them expired."""
        self._since.update((job, now - self.seconds) for job in jobs)


class Retention:
    """Deletes expired jobs, on the control plane that does the housekeeping."""

    def __init__(
        self, paths: Paths, retention_days: float, work: FileWork, monotonic: Callable[[], float] = time.monotonic
    ):
        """`retention_days`: how long a job is kept after its end; `work`: what its files are looked at and removed
        by."""
        self._paths, self._retention_days, self._work, self._monotonic = paths, retention_days, work, monotonic
        self._seen = ConfirmedExpiry(CONFIRMED_SECONDS)

    async def run(self, store: Store, release_job: Callable[[str], Awaitable[None]]) -> None:
        """Run until cancelled. `release_job` returns when nothing of a job is left on the cluster."""
        while True:
            try:
                await self.check(store, release_job)
            except Exception:  # the jobs are still there: check again
                log.exception("cannot check for jobs past their retention time")
            await asyncio.sleep(POLL_SECONDS)

    async def check(self, store: Store, release_job: Callable[[str], Awaitable[None]]) -> None:
        """Delete the jobs that are certain to be expired."""
        before = time.time() - self._retention_days * DAY_SECONDS
        expired = await store.read_async(partial(deletion.expired, before=before))
        now, silent = self._monotonic(), 0
        confirmed = self._seen.confirmed(expired, now, JOBS_PER_CHECK)
        for tried, job_id in enumerate(confirmed, 1):
            try:
                if expired[job_id] and await self._has_newer_files(job_id, before):
                    log.warning(
                        "%s is past its retention time, but its files are newer, or unreadable: it is retained", job_id
                    )
                    continue
                await self._delete(store, job_id, before, release_job)
            except (ClusterUnavailable, FilesNotRemoved, JobNotFound) as error:
                log.warning("%s is past its retention time, but is not deleted yet: %s", job_id, error)
            except (NotFinished, StillRemoving) as error:
                log.warning("%s is past its retention time, but its files are not removed: %s", job_id, error)
                silent += 1
                if silent == MAX_UNRESPONSIVE:
                    self._seen.put_back(confirmed[tried:], now)
                    return

    async def _has_newer_files(self, job_id: str, before: float) -> bool:
        look = partial(has_newer_files, self._paths, job_id, before)
        return await asyncio.to_thread(self._work.run, ("age", job_id), FILE_SECONDS, look)

    async def _delete(
        self, store: Store, job_id: str, before: float, release_job: Callable[[str], Awaitable[None]]
    ) -> None:
        why = f"it ended more than {self._retention_days:g} days ago (MANTA_JOBS_KEPT_DAYS)"
        begin = partial(deletion.begin_if_expired, job_id=job_id, before=before, why=why)
        if await store.write_async(begin):
            await release_job(job_id)
            deleted = await asyncio.to_thread(delete_rest_in_time, store, self._paths, job_id, self._work)
            log.info("deleted %s: %s; %s", job_id, why, deleted)


def has_newer_files(paths: Paths, job_id: str, moment: float) -> bool:
    """Whether anything that belongs to a job, wherever it is, was written after `moment`, or cannot be read."""
    folder, checkpoints, logs = (
        paths.job_folder(job_id),
        paths.checkpoint_folder(job_id),
        paths.stored_log_folder(job_id),
    )
    elsewhere = [place for place in (checkpoints, logs) if place is not None and place.parent != folder]
    try:
        if any(isinstance(place, Path) and _is_parent_missing(place.parent) for place in elsewhere):
            return True
        times = [newest for place in elsewhere if (newest := files_of(place).newest(place)) is not None]
    except OSError:
        return True
    if any(newest > moment for newest in times):
        return True
    return modified_since(folder, moment) if os.path.lexists(folder) or not times else False


def modified_since(folder: Path, moment: float) -> bool:
    """Whether something in `folder` was written after `moment`, or cannot be read. A folder that does not exist counts
    as unchanged only if its siblings exist: the folder of all of them may be unmounted."""
    try:
        if not os.path.lexists(folder):
            return _is_parent_missing(folder)
        if folder.lstat().st_mtime > moment:
            return True
        for place, folders, files in os.walk(folder, onerror=_raise):
            if any(Path(place, name).lstat().st_mtime > moment for name in [*folders, *files]):
                return True
    except OSError:
        return True
    return False


def _is_parent_missing(folder: Path) -> bool:
    """Whether neither `folder` nor any of its siblings is there. Raises OSError, also if the folder of all of them is
    missing."""
    return not os.path.lexists(folder) and not any(folder.parent.iterdir())


def _raise(error: OSError) -> None:
    raise error
