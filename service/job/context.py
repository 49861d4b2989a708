"""State that all parts of one running job's supervision share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from manta.service.cluster.cluster import Cluster
from manta.service.cluster.sizes import in_use
from manta.service.job.gang import AgentSet, Gang
from manta.service.job.incident import Incident
from manta.service.job.record import JobRecord
from manta.service.job.report_writer import FirstStep
from manta.service.log_archive.spool import Spool
from manta.service.recovery.budgets import PastFailure, past_failures
from manta.service.store import Store
from manta.service.store.tables import Generation, Job
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


@dataclass
class JobContext:
    """One running job: its spec, its rows, its agents, and signals from others."""

    cluster: Cluster
    submitted: JobSpec
    record: JobRecord
    gang: Gang
    has_launched: bool = False
    """Whether a generation was begun here, so that the database cannot be older than the folder."""
    threads: int | None = None
    """Threads of each rank; None: decided when the job first starts."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if the user wants the job to end."""
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if the job is to save its state and give its places back (`leave.py`)."""
    no_room: str = ""
    """Why it will wait in the queue after leaving: its nodes are being drained, and there is no room elsewhere. Empty
    if it leaves for another reason, or does not leave."""
    overdue: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has had long enough to save its state."""
    change_possible: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if its size or place may have to change, or may be able to."""
    trace_wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if a trace of it may have been requested."""
    departing: list[AgentSet] = field(default_factory=list)
    """Agents that left the gang and are to be dismissed; their nodes may hold state that the next generation needs."""
    failed_launches: list[PastFailure] = field(default_factory=list)
    """Failed launches since the last successful one: such failures have no rows."""
    stragglers_replaced: dict[int, float] = field(default_factory=dict)
    """When each rank was last replaced as a straggler, in seconds of the monotonic clock."""
    retried_at: float = 0.0
    """When the user last had it retried, in Unix seconds: earlier failures do not count."""
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
        gang = Gang(cluster, job.id, in_use(submitted, job))
        record = JobRecord(store, job.id)
        retried_at = job.retried_at or 0.0
        threads = submitted.resources.threads
        return cls(
            cluster,
            submitted,
            record,
            gang,
            threads=None if threads == "auto" else threads,
            retried_at=retried_at,
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

    def wait_in_queue(self, why: str) -> None:
        """From now on it is to save its state, give its places back, and wait in the queue, for the reason `why`."""
        self.no_room = why
        self.leaving.set()

    @property
    def has_snapshots(self) -> bool:
        """Whether its state is kept in memory, beside the processes of its ranks."""
        return self.submitted.checkpoint.snapshots != "off"

    async def wanted_replicas(self) -> int:
        """The number of replicas that the user wants."""
        return (await self.record.job()).wanted_replicas or self.submitted.layout.data

    def failures(self, lives: Sequence[Generation], incident: Incident | None = None) -> list[PastFailure]:
        """The failures that the job has survived, oldest first: `lives` are its generations; `incident` caused the
        launch that is to be retried, and has no row yet."""
        known = past_failures([life for life in lives if life.started_at > self.retried_at])
        if incident is not None and incident.failure not in (*known, *self.failed_launches):
            known.append(incident.failure)
        return [*known, *self.failed_launches]
