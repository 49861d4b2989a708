"""The owners of the jobs that this control plane owns: each job that may hold places has one, on the control plane that
has the job's lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from manta.service.cluster.agent_client import AgentClient
from manta.service.cluster.cluster import Cluster
from manta.service.control.housekeeping import Housekeeping
from manta.service.job.inbox import Cancel, Pause, Resize, Trace
from manta.service.job.owner import JobOwner
from manta.service.job.report_writer import FirstStep
from manta.service.leases.decisions import JobSummary, LeaseLost
from manta.service.leases.held import HeldLease, Leases
from manta.service.log_archive.archiver import LogArchiver
from manta.service.log_archive.spool import Spool
from manta.service.states import SUPERVISED, JobState
from manta.service.store import Store, step_traces
from manta.service.store.database import in_a_line, may_pass
from manta.service.store.tables import Job
from manta.service.tasks import Lag, log_failure

log = logging.getLogger(__name__)

# Time between two checks that every job that may hold places has an owner.
CLAIM_SECONDS = 1.0


class JobOwners:
    """All owners. Called on the control plane's own thread, except for `has`."""

    def __init__(
        self,
        store: Store,
        leases: Leases,
        memory_seconds: float,
        archiver: LogArchiver | None = None,
        first_step: FirstStep | None = None,
    ):
        """`memory_seconds`: how long the snapshots of a failed job are kept for a retry; `archiver`: stores what ranks
        print, if that is also stored elsewhere; `first_step`: called with the first step of each generation of a
        job."""
        self._store, self.leases, self._memory_seconds, self._archiver = store, leases, memory_seconds, archiver
        self._first_step = first_step
        self.by_job: dict[str, tuple[JobOwner, asyncio.Task[None]]] = {}
        """Each owner, and the task in which it works."""
        self.lag = Lag(CLAIM_SECONDS)
        """How far this is behind in supervising all jobs."""
        self._seen: dict[str, JobSummary] = {}
        self._cluster: Cluster | None = None
        self._housekeeping: Housekeeping | None = None

    def begin(self, cluster: Cluster, housekeeping: Housekeeping) -> None:
        """From now on jobs can be owned. `housekeeping`: has the scheduler, which places them."""
        self._cluster, self._housekeeping = cluster, housekeeping

    def has(self, job_id: str) -> bool:
        """Whether the job is owned here."""
        return job_id in self.by_job

    def all(self) -> list[JobOwner]:
        """Every owner."""
        return [owner for owner, _ in self.by_job.values()]

    def of(self, job_id: str) -> JobOwner | None:
        """The job's owner; None if it is owned elsewhere or not at all."""
        owner, _ = self.by_job.get(job_id, (None, None))
        return owner

    def agents_of(self, job_id: str) -> list[AgentClient | None]:
        """By rank, the agents of a job that is owned here; none of any other."""
        owner = self.of(job_id)
        return [] if owner is None else owner.agents

    def placed(self, job: Job, generation: int) -> None:
        """The scheduler has placed this generation of a job, which needs an owner now."""
        self._own(job.id, generation)

    async def run(self) -> None:
        """Supervise all owners until cancelled: regularly, and whenever another control plane announces a change."""
        said = ""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLAIM_SECONDS):
                    await self.leases.changed.wait()
            self.leases.changed.clear()
            self.lag.begin()
            try:
                await self.refresh()
                self.lag.done()
                said = ""
            except Exception as error:  # a job without an owner gets one in the next round
                why = in_a_line(error)
                if why != said:
                    log.error("cannot list the jobs: %s", why, exc_info=not may_pass(error))
                said = why

    async def refresh(self) -> None:
        """Give up jobs that another control plane owns by now; own every job that may hold places and has no owner,
        whatever happened to its previous one; pass on requests to a job that others have written."""
        assert self._housekeeping is not None
        unfinished, too_many = await self.leases.refresh(self._is_busy)
        for job_id, (_, task) in list(self.by_job.items()):
            if self.leases.of(job_id) is None:
                task.cancel()
        self._housekeeping.stop_if_lost()
        before, self._seen = self._seen, {job.id: job for job in unfinished}
        for job in unfinished:
            if job.id in self.by_job:
                self._pass_on(job, before.get(job.id))
            elif job.state in SUPERVISED and self.leases.of(job.id) is not None and not self._is_busy(job.id):
                log.warning("%s had no owner", job.id)
                self._own(job.id, None)
        if _queue(before.values()) != _queue(unfinished):
            self._housekeeping.wake()
        for job_id, to in too_many.items():
            await self._hand_over(job_id, to)
        for job_id in await self._store.read_async(step_traces.jobs_with_waiting_traces):
            if owner := self.of(job_id):
                owner.tell(Trace())

    def _is_busy(self, job_id: str) -> bool:
        """Whether the job is being placed, or what it has is being removed."""
        placing = self._housekeeping is not None and self._housekeeping.is_placing(job_id)
        return placing or self.leases.is_borrowed(job_id)

    def _pass_on(self, job: JobSummary, before: JobSummary | None) -> None:
        owner, _ = self.by_job[job.id]
        if before is None or before.state != job.state:
            if job.state == JobState.CANCELLING:
                owner.tell(Cancel())
            elif job.state == JobState.PAUSING:
                owner.tell(Pause())
        if job.wanted_replicas is not None and (before is None or before.wanted_replicas != job.wanted_replicas):
            owner.tell(Resize())

    async def _hand_over(self, job_id: str, to: str) -> None:
        """Make the control plane `to` own a job, which does not notice."""
        lease, (_, task) = self.leases.of(job_id), self.by_job.get(job_id, (None, None))
        if lease is None or task is None:
            return
        task.cancel()
        await asyncio.wait({task})
        with contextlib.suppress(LeaseLost):
            await self.leases.hand_over(job_id, lease.epoch, to)

    def _own(self, job_id: str, scheduled_generation: int | None) -> None:
        lease = self.leases.of(job_id)
        assert lease is not None and self._cluster is not None
        logs = None if self._archiver is None else self._archiver.open(job_id, lease)
        owner = JobOwner(self._store.fenced(lease), self._cluster, job_id, self._memory_seconds, logs, self._first_step)
        task = asyncio.create_task(self._run(owner, scheduled_generation, logs, lease), name=f"owner of {job_id}")
        self.by_job[job_id] = (owner, task)
        task.add_done_callback(log_failure)

    async def _run(
        self, owner: JobOwner, scheduled_generation: int | None, logs: Spool | None, lease: HeldLease
    ) -> None:
        assert self._housekeeping is not None
        try:
            await owner.run(scheduled_generation)
            if self._archiver is not None and logs is not None:
                await self._archiver.finish(owner.id, logs)
        except LeaseLost as error:
            log.warning("%s", error)
        else:
            await self.leases.release(owner.id)
        finally:
            if self._archiver is not None and logs is not None:
                self._archiver.lose(owner.id, logs)
            self.leases.drop(lease)
            if self.of(owner.id) is owner:
                del self.by_job[owner.id]
            self._housekeeping.wake()


def _queue(unfinished: Iterable[JobSummary]) -> set[tuple[str, int]]:
    return {(job.id, job.priority) for job in unfinished if job.state == JobState.QUEUED}
