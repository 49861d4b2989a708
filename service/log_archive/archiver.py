"""Stores the logs of one control plane's jobs beyond its disk, and reads those of all jobs (decision 0016).

What a job prints is first appended to files here, and every few seconds the job's owner writes what is new to the job's
parts. A place that does not answer delays nothing: the files grow in the meantime, and agents remember the lines that
are not stored yet for the job's next owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy.orm import Session

from manta.service.leases.held import HeldLease, Leases
from manta.service.log_archive.archived_log import ArchivedLog, Blocks
from manta.service.log_archive.parts import PART_BYTES, SMALL_PARTS, PartWriter
from manta.service.log_archive.spool import Spool, SpooledLog
from manta.service.logs.pages import LogFiles, LogSource, log_folder, ranks_in, sizes_in
from manta.service.states import SUPERVISED, JobState, is_final
from manta.service.store import Store, deletion, jobs
from manta.service.tasks import backoff_after
from manta.workers.paths import Paths
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import Location
from manta.workers.system.daemon_threads import in_daemon_thread

log = logging.getLogger(__name__)

SHIP_SECONDS = 3.0
"""Seconds between writing what is new."""
MAX_BACKOFF_SECONDS = 30.0
"""Seconds between two attempts if the place does not answer."""
FINISH_SECONDS = 5.0
"""How long the end of a job waits for the place; what is not stored by then is stored later."""
LEAVE_SECONDS = 3.0
MAX_UPLOADS = 4
STREAM_SECONDS = 1.0
"""How old the view that streams have of other control planes' jobs may be."""
VERSION_SECONDS = 2.0
LOGS_REMEMBERED = 256
MARK = ".kept-elsewhere"
"""Marker file in the folder of each job whose files may contain something that is not stored yet."""


@dataclass(eq=False)
class _Job:
    """A job with files here."""

    id: str
    spool: Spool
    writer: PartWriter
    lease: HeldLease | None
    """The lease under which it is owned here; None: it no longer is."""
    shipping: Future[None] | None = None
    failures: int = 0
    retry_at: float = 0.0


@dataclass
class _ArchivedLogs:
    """The recently read logs of all jobs. Safe for use by several threads."""

    folder: Callable[[str], Location]
    _blocks: Blocks = field(default_factory=Blocks)
    _logs: OrderedDict[str, ArchivedLog] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, job_id: str) -> ArchivedLog:
        with self._lock:
            known = self._logs.pop(job_id, None) or ArchivedLog(self.folder(job_id), self._blocks)
            self._logs[job_id] = known
            while len(self._logs) > LOGS_REMEMBERED:
                self._logs.popitem(last=False)
            return known


class LogArchiver:
    """`manta.service.logs.pages.JobLogs` if logs are also stored elsewhere. Everything beyond that interface is for the
    control plane's loop."""

    def __init__(self, store: Store, leases: Leases, paths: Paths):
        """`paths`: of this control plane, which say where logs are stored."""
        self._store, self._leases, self._paths, self._home = store, leases, paths, paths.home
        self._jobs: dict[str, _Job] = {}
        """Jobs whose own files this control plane reads."""
        self._left: set[str] = set()
        """Jobs that have files here and are not owned here."""
        self._archived = _ArchivedLogs(self._folder)
        self._upload_slots = asyncio.Semaphore(MAX_UPLOADS)
        self._wake = asyncio.Event()

    def _folder(self, job_id: str) -> Location:
        folder = self._paths.stored_log_folder(job_id)
        assert folder is not None
        return folder

    def source(self, job_id: str, fresh: bool = True) -> LogSource:
        """See `JobLogs`."""
        job, archived = self._jobs.get(job_id), self._archived.of(job_id)
        if job is not None and job.spool.has_started:
            return SpooledLog(job.spool, archived)
        archived.refresh(0.0 if fresh else STREAM_SECONDS)
        return LogFiles(log_folder(self._home, job_id)) if archived.is_empty else archived

    def version(self, job_id: str) -> object:
        """See `JobLogs`."""
        job = self._jobs.get(job_id)
        if job is None:
            return int(time.monotonic() / VERSION_SECONDS)
        return job.spool.has_started, sizes_in(job.spool.folder)

    def is_complete(self, job_id: str) -> bool:
        """See `JobLogs`."""
        if job_id in self._jobs:
            return True
        archived = self._archived.of(job_id).refresh(STREAM_SECONDS)
        return bool(ranks_in(log_folder(self._home, job_id))) if archived.is_empty else archived.is_closed

    def open(self, job_id: str, lease: HeldLease) -> Spool:
        """From now on what the job prints is collected here, while it is owned here under this `lease`."""
        self._release_job(job_id)
        job = self._jobs[job_id] = self._job(job_id, lease)
        self._left.discard(job_id)
        with contextlib.suppress(OSError):  # without it, what a crash leaves is not looked for
            job.spool.folder.mkdir(parents=True, exist_ok=True)
            (job.spool.folder / MARK).touch()
        self._wake.set()
        return job.spool

    def _job(self, job_id: str, lease: HeldLease | None) -> _Job:
        return _Job(job_id, Spool(log_folder(self._home, job_id)), PartWriter(self._folder(job_id)), lease)

    def lose(self, job_id: str, spool: Spool) -> None:
        """The result of `open` is not used any more. If the job has not finished, another control plane owns it, or
        will."""
        job = self._jobs.get(job_id)
        if job is not None and job.spool is spool and job.lease is not None:
            self._release_job(job_id)
            self._left.add(job_id)

    def _release_job(self, job_id: str) -> None:
        job = self._jobs.pop(job_id, None)
        if job is not None:
            job.spool.retire()

    async def finish(self, job_id: str, spool: Spool) -> None:
        """The job for which `open` returned `spool` has given its places back, and is about to give up its lease."""
        job = self._jobs.get(job_id)
        if job is None or job.spool is not spool:
            return
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                state, _ = await self._state_of(job_id)
                await self._ship(job, closes=state is not None and is_final(state))
        except Exception as error:  # noqa: BLE001 - whatever it is, the job's end does not wait for it
            log.warning("the last output of %s is archived later: %s", job_id, str(error) or "no answer in time")
        else:
            self.forget(job_id)
            return
        job.lease = None
        self._left.add(job_id)

    def forget(self, job_id: str) -> None:
        """Remove the job's log from this machine: all of it is stored, or the job is deleted."""
        self._release_job(job_id)
        self._left.discard(job_id)
        folder = log_folder(self._home, job_id)
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # there is something else in it
            folder.parent.rmdir()

    async def leave(self) -> None:
        """Store what can be stored in a moment, before this control plane ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                looked_after = [job for job in self._jobs.values() if job.lease is not None]
                await asyncio.gather(*map(self._ship, looked_after), return_exceptions=True)

    async def run(self) -> None:
        """Run until cancelled."""
        self._left |= await asyncio.to_thread(self._marked_jobs) - self._jobs.keys()
        while True:
            try:
                now = time.monotonic()
                due = [job for job in self._jobs.values() if job.lease is not None and job.retry_at <= now]
                await asyncio.gather(*map(self._archive, due), *map(self._settle, list(self._left)))
            except Exception:  # nothing is lost: try again
                log.exception("logs could not be kept")
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SHIP_SECONDS):
                    await self._wake.wait()

    def _marked_jobs(self) -> set[str]:
        return {mark.parent.parent.name for mark in (self._home / "jobs").glob(f"*/logs/{MARK}")}

    async def _archive(self, job: _Job) -> None:
        try:
            async with asyncio.timeout(SHIP_SECONDS):  # the thread continues, and delays no other job
                await self._ship(job)
        except OSError as error:
            if not job.failures:
                log.warning("the output of %s is archived later: %s", job.id, str(error) or "no answer yet")
            job.failures += 1
            job.retry_at = time.monotonic() + backoff_after(job.failures, SHIP_SECONDS, MAX_BACKOFF_SECONDS)
        else:
            if job.failures:
                log.info("the output of %s is archived again", job.id)
            job.failures = 0

    async def _ship(self, job: _Job, closes: bool = False) -> None:
        """Write what is new, and with `closes` that nothing follows."""
        if job.shipping is not None and not job.shipping.done():
            await asyncio.wait({asyncio.wrap_future(job.shipping)})
        await self._upload_slots.acquire()
        loop = asyncio.get_running_loop()
        job.shipping = in_daemon_thread("job logs", partial(self._write, job, closes))
        job.shipping.add_done_callback(lambda _: loop.call_soon_threadsafe(self._upload_slots.release))
        await asyncio.wrap_future(job.shipping)

    def _write(self, job: _Job, closes: bool) -> None:
        spool, writer, lease = job.spool, job.writer, job.lease
        if lease is None:
            return
        if not spool.has_started:
            writer.begin(lease.epoch)
            spool.begin(writer.segments)
        while chunks := spool.next_chunks(PART_BYTES):
            self._refuse_if_lost(job, lease)
            writer.write(chunks)
            spool.kept(chunks)
        self._refuse_if_lost(job, lease)
        if closes and not writer.is_closed:
            writer.write({}, closes=True)
        writer.merge(2 if closes else SMALL_PARTS)

    def _refuse_if_lost(self, job: _Job, lease: HeldLease) -> None:
        if self._leases.of(job.id) is not lease or not self._leases.certain:
            raise OSError(f"this control plane may no longer own {job.id}")

    async def _settle(self, job_id: str) -> None:
        """Handle a job that has files here and is not owned here."""
        try:
            state, is_deleted = await self._state_of(job_id)
            if job_id not in self._left:  # it is owned here again
                return
            if is_deleted:
                self.forget(job_id)
            elif state in SUPERVISED:
                self._release_job(job_id)
            elif state is not None:
                await self._archive_rest(job_id, is_final(state))
        except OSError:  # it stays, and is tried again
            log.debug("the rest of %s is not kept yet", job_id, exc_info=True)

    async def _archive_rest(self, job_id: str, closes: bool) -> None:
        """Store what is left of a job that no control plane owns; others wait for its lease, so first check whether the
        place answers."""
        folder = self._folder(job_id)
        async with asyncio.timeout(SHIP_SECONDS):
            await asyncio.wrap_future(in_daemon_thread("job logs", partial(_answers, folder)))
        async with self._leases.borrowed(job_id) as lease:
            if lease is None:
                return
            self._release_job(job_id)
            job = self._jobs[job_id] = self._job(job_id, lease)
            try:
                async with asyncio.timeout(FINISH_SECONDS):
                    await self._ship(job, closes)
            finally:
                job.lease = None
        self.forget(job_id)

    async def _state_of(self, job_id: str) -> tuple[JobState | None, bool]:
        """The job's state, and whether it was deleted; None and False if the database does not know it."""

        def read_state(session: Session) -> tuple[JobState | None, bool]:
            state = jobs.states(session, [job_id]).get(job_id)
            return state, state is None and bool(deletion.deleted_ones(session, [job_id]))

        return await self._store.read_async(read_state)


def _answers(folder: Location) -> None:
    with contextlib.suppress(FileNotFoundError):
        files_of(folder).names(folder)
