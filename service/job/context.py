"""What all parts of one running job's supervision share."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from manta.service.cluster.cluster import Cluster
from manta.service.cluster.sizes import in_use
from manta.service.job.gang import Gang
from manta.service.job.inbox import Inbox
from manta.service.job.record import JobRecord
from manta.service.job.report_writer import FirstStep
from manta.service.log_archive.spool import Spool
from manta.service.recovery.decisions import FailureHistory
from manta.service.store import Store
from manta.service.store.tables import Job
from manta.service.stored_specs import stored_spec
from manta.workers.checkpoint.catalog import Listing, list_checkpoints
from manta.workers.config import JobSpec
from manta.workers.storage.locations import Location
from manta.workers.system.daemon_threads import in_daemon_thread

LISTING_SECONDS = 20.0
"""Seconds after which a file system that is listing a job's checkpoints counts as not answering."""
DEFAULT_MEMORY_SECONDS = 24 * 3600.0


class FolderReader:
    """Lists a folder on a thread of its own: a file system that does not answer keeps only that thread, and neither the
    event loop nor the end of the process waits for it."""

    def __init__(self) -> None:
        self._under_way: Future[Listing] | None = None
        self._began = 0.0

    async def list(self, folder: Location, seconds: float = LISTING_SECONDS, job: str | None = None) -> Listing:
        """The listing of `folder`, begun after this call; without an answer in `seconds` it has that as its `problem`.
        While an earlier listing, which may lack what was saved since, has not ended, calls wait for it only until
        `seconds` after its beginning: a job that recovers again and again does not wait that long each time. `job`: as
        for `list_checkpoints`."""
        while True:
            reading = self._under_way
            if is_new := reading is None or reading.done():
                self._began = time.monotonic()
                reading = self._under_way = in_daemon_thread("checkpoint folder", lambda: list_checkpoints(folder, job))
            try:
                async with asyncio.timeout(self._began + seconds - time.monotonic()):
                    listing = await asyncio.wrap_future(reading)
            except TimeoutError:
                return Listing(folder, problem=f"the folder {folder} cannot be listed: no answer in {seconds:g} s")
            if is_new:
                return listing


@dataclass(frozen=True)
class JobContext:
    """One running job: what is fixed about it, and where its changing parts are."""

    cluster: Cluster
    submitted: JobSpec
    record: JobRecord
    """The rows of the job."""
    gang: Gang
    """The agents of the job."""
    history: FailureHistory
    """The failures of the job."""
    inbox: Inbox = field(default_factory=Inbox)
    """What it is asked for."""
    memory_seconds: float = DEFAULT_MEMORY_SECONDS
    """Seconds that its snapshots are kept for a retry when it fails."""
    logs: Spool | None = None
    """Takes its output, if that is also kept elsewhere."""
    first_step: FirstStep | None = None
    """Called with the first step of each generation."""
    folder_reader: FolderReader = field(default_factory=FolderReader)
    """Reads the folder of its checkpoints."""

    @classmethod
    def of(
        cls,
        store: Store,
        cluster: Cluster,
        job: Job,
        memory_seconds: float = DEFAULT_MEMORY_SECONDS,
        logs: Spool | None = None,
        first_step: FirstStep | None = None,
    ) -> JobContext:
        """The context of `job`. Raises SpecNotUnderstood."""
        submitted = stored_spec(job).spec
        return cls(
            cluster,
            submitted,
            JobRecord(store, job.id),
            Gang(cluster, job.id, in_use(submitted, job)),
            FailureHistory(job.retried_at or 0.0),
            memory_seconds=memory_seconds,
            logs=logs,
            first_step=first_step,
        )

    @property
    def id(self) -> str:
        """The job's id."""
        return self.record.id

    @property
    def checkpoint_folder(self) -> Location:
        """The folder of its durable checkpoints."""
        return self.cluster.paths.checkpoint_folder(self.id)

    @property
    def has_snapshots(self) -> bool:
        """Whether its state is kept in memory, beside the processes of its ranks."""
        return self.submitted.checkpoint.snapshots != "off"

    async def wanted_replicas(self) -> int:
        """The number of replicas that the user wants."""
        return (await self.record.job()).wanted_replicas or self.submitted.layout.data
