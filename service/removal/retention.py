"""Deletes jobs that ended long ago, if the service is configured to keep them only for a limited time.

No clock, no backup and no file system may cause the deletion of something that is not old. So a job is deleted only
when every check during an hour of the monotonic clock has found it expired (the wall clock may be set), and when
nothing in its folder was written later than that (a restored database may not know what the job has done since); what
cannot be read does not count as old.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from manta.service.cluster.errors import ClusterUnavailable
from manta.service.file_work import FILE_SECONDS, FileWork, NotFinished
from manta.service.removal.deletion import FilesNotRemoved, StillRemoving, delete_rest_in_time
from manta.service.store import Store, deletion
from manta.service.store.errors import JobNotFound
from manta.workers.paths import Paths
from manta.workers.storage.files import files_of

log = logging.getLogger(__name__)

POLL_SECONDS = 600.0
CONFIRMED_SECONDS = 3600.0
"""How long a job must have been found expired, by a clock that cannot be set."""
JOBS_PER_CHECK = 200
"""How many jobs one check deletes, those that ended first; a job that cannot be deleted is tried again an hour
later."""
MAX_UNRESPONSIVE = 2
"""After so many jobs whose files do not answer, the others wait for the next check: each may keep a thread."""
DAY_SECONDS = 86400.0


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
        """Raises NotFinished."""
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
