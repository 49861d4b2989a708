"""Deletes a job for good: what it holds on the cluster, its files and its rows, in that order.

It is marked first. Whatever fails or is killed in between, the job is still listed, shows that it is being deleted, and
can be deleted again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy.orm import Session

from service.file_work import REMOVAL_SECONDS, FileWork, NotFinished
from service.store import JobNotFound, Store, deletion
from workers.errors import MantaError
from workers.node.folders import shares
from workers.paths import Paths
from workers.storage.files import bytes_in, files_of
from workers.storage.places import Place


class StillRemoving(MantaError):
    """The files of a job are not removed in time."""

    def __init__(self, job_id: str, why: NotFinished):
        super().__init__(
            f"the files of {job_id} are not all removed yet ({why}), so the job is still there; {why.state}: "
            f"{why.advice}, and delete {job_id} again"
        )


class FilesNotRemoved(MantaError):
    """Something in a job's folder cannot be removed."""

    def __init__(self, job_id: str, folder: Place, error: OSError):
        self.job_id = job_id
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


def delete_job(store: Store, paths: Paths, job_id: str, let_go: Callable[[], None], work: FileWork) -> Deletion:
    """Delete a final job. `let_go` returns when nothing of it is left on the cluster, including its snapshots in
    memory; `work`: what its files are removed by.

    Raises JobNotFound, JobNotFinal, JobBeingExported, FilesNotRemoved, StillRemoving, and whatever `let_go` raises.
    """
    store.write(lambda session: deletion.begin(session, job_id))
    let_go()
    return delete_rest_in_time(store, paths, job_id, work)


def delete_rest_in_time(store: Store, paths: Paths, job_id: str, work: FileWork) -> Deletion:
    """`delete_rest`, which goes on without its caller if the file system or store does not answer.

    Raises JobNotFound, FilesNotRemoved, StillRemoving.
    """
    try:
        return work.run(("job", job_id), REMOVAL_SECONDS, lambda: delete_rest(store, paths, job_id))
    except NotFinished as error:
        late = StillRemoving(job_id, error)
        with contextlib.suppress(JobNotFound):  # it is done after all
            store.write(lambda session: deletion.note_obstacle(session, job_id, str(late)))
        raise late from error


def delete_rest(store: Store, paths: Paths, job_id: str) -> Deletion:
    """Delete the files and rows of a job that is marked and has nothing left on the cluster.

    Raises JobNotFound, FilesNotRemoved.
    """
    try:
        files = remove_files(paths, job_id)
    except FilesNotRemoved as error:
        why = str(error)
        store.write(lambda session: deletion.note_obstacle(session, job_id, why))
        raise
    some = {
        "metrics": _all(store, lambda session: deletion.delete_some_metrics(session, job_id)),
        "metric_bins": _all(store, lambda session: deletion.delete_some_bins(session, job_id)),
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
    checkpoints, kept_logs = paths.checkpoint_folder(job_id), paths.kept_log_folder(job_id)
    elsewhere = _remove_elsewhere(paths, job_id, folder, checkpoints, kept_logs)
    if not os.path.lexists(folder):
        return elsewhere
    try:
        removed = RemovedFiles(
            checkpoints=elsewhere.checkpoints + _entries(folder / checkpoints.name),
            logs=elsewhere.logs + _entries(paths.log_folder(job_id)),
            bytes=elsewhere.bytes + bytes_in(folder),
        )
        shutil.rmtree(folder)
    except OSError as error:
        raise FilesNotRemoved(job_id, folder, error) from error
    return removed


def _remove_elsewhere(paths: Paths, job_id: str, folder: Path, checkpoints: Place, logs: Place | None) -> RemovedFiles:
    """Remove the job's folders that are not in its own, which contain nothing but its checkpoints and logs."""
    root = paths.checkpoint_root
    if isinstance(root, Path) and checkpoints.parent != folder and not shares(root, paths.installation):
        raise FilesNotRemoved(job_id, checkpoints, OSError(f"{root} is not mounted here, or cannot be written"))
    removed = RemovedFiles(
        checkpoints=_count(job_id, checkpoints) if checkpoints.parent != folder else 0,
        logs=0 if logs is None else _count(job_id, logs),
    )
    others = {checkpoints.parent, *(() if logs is None else (logs.parent,))} - {folder}
    return replace(removed, bytes=sum(_remove(job_id, each) for each in others))


def _count(job_id: str, folder: Place) -> int:
    try:
        return _entries(folder)
    except OSError as error:
        raise FilesNotRemoved(job_id, folder, error) from error


def _remove(job_id: str, folder: Place) -> int:
    """Remove `folder`; returns how many bytes it contained. Raises FilesNotRemoved."""
    files = files_of(folder)
    try:
        count = files.bytes_in(folder)
        files.remove_folder(folder)
        if files.is_there(folder):
            raise OSError("something in it stays")
    except OSError as error:
        raise FilesNotRemoved(job_id, folder, error) from error
    return count


def _entries(folder: Place) -> int:
    try:
        return len(files_of(folder).names(folder))
    except (FileNotFoundError, NotADirectoryError):
        return 0
