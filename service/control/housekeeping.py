"""What one control plane does for all jobs, whichever control plane owns them: the queue, leftovers of finished jobs,
and jobs and snapshots whose retention has ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from functools import partial

from sqlalchemy.orm import Session

from manta.service.cluster.cluster import Cluster
from manta.service.cluster.errors import ClusterUnavailable, needs_traceback
from manta.service.cluster.node_maintenance import IdleNodes, NodeMaintenance
from manta.service.control.removal import ConfirmedExpiry, Retention
from manta.service.control.scheduler import OnPlaced, Scheduler
from manta.service.job.owner import catch_up
from manta.service.job.record import JobRecord
from manta.service.leases.decisions import HOUSEKEEPING
from manta.service.leases.held import HeldLease, Leases
from manta.service.states import SUPERVISED, JobState, is_final
from manta.service.store import Store, checkpoints, deletion, jobs, pauses_and_retries
from manta.service.store.database import in_a_line, may_pass
from manta.service.stored_specs import SpecNotUnderstood
from manta.service.tasks import backoff
from manta.workers.data.roots import ANYWHERE, DataRoots
from manta.workers.protocol.messages import ProtocolMismatch

log = logging.getLogger(__name__)

# Between two attempts to release what jobs have left.
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0
# Time between two searches for failed jobs whose snapshots were kept for long enough.
MEMORY_SECONDS = 30.0
# How long a clock that cannot be set must have confirmed that, whatever the wall clock, which can be set, says.
MEMORY_CONFIRMED_SECONDS = 600.0
# How long the owner of a finished job may take to leave it.
RELEASE_SECONDS = 30.0
# Time between two checks whether housekeeping falls to this control plane.
CLAIM_SECONDS = 1.0
UNKNOWN_JOB = (
    "agents or places of %s are there, but the database does not know that job (is it restored from an older backup?): "
    "it is left running"
)

FOREIGN_JOB = (
    "agents of %s are in the Ray of this home, under another database: that of another service which uses this Ray, or "
    "one that was lost; they are left running, and `manta down` ends them"
)


class Housekeeping:
    """Housekeeping, done in this process whenever it holds the lease."""

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        leases: Leases,
        placed: OnPlaced,
        data_roots: DataRoots = ANYWHERE,
        retention: Retention | None = None,
    ):
        """`placed` and `data_roots`: see `Scheduler`; `retention`: deletes jobs that ended long ago; None if jobs are
        kept until a user deletes them."""
        self._store, self._cluster, self._leases = store, cluster, leases
        self._placed, self._data_roots, self._retention = placed, data_roots, retention
        self._work: asyncio.Task[None] | None = None
        self.scheduler: Scheduler | None = None
        """None until housekeeping was first done here."""

    def wake(self) -> None:
        """Something in the queue has changed, or there is more room."""
        if self.scheduler is not None:
            self.scheduler.wake()

    def is_placing(self, job_id: str) -> bool:
        """Whether the job will have an owner in a moment."""
        return self.scheduler is not None and job_id in self.scheduler.placing

    @property
    def is_active(self) -> bool:
        """Whether it falls to this control plane."""
        return self._leases.of(HOUSEKEEPING) is not None

    @property
    def lag_seconds(self) -> dict[str, float]:
        """By loop, how far it is behind."""
        return {} if self.scheduler is None else {"queue": self.scheduler.lag.seconds}

    def stop_if_lost(self) -> None:
        """Leave housekeeping to the control plane that does it now."""
        if self._work is not None and not self.is_active:
            self._work.cancel()

    async def run(self, maintenance: NodeMaintenance) -> None:
        """Run until cancelled. `maintenance`: of the nodes, on which jobs are placed only once they had time
        to answer."""
        try:
            while True:
                try:
                    if (lease := await self._leases.claim(HOUSEKEEPING)) is not None:
                        self._work = asyncio.create_task(self._keep(lease, maintenance), name="housekeeping")
                        await asyncio.wait({self._work})
                        self._leases.drop(lease)
                        if not self._work.cancelled():
                            self._work.result()
                except Exception as error:  # jobs wait in the queue: try again
                    log.error("the housekeeping for all jobs has failed: %s", error, exc_info=needs_traceback(error))
                await asyncio.sleep(CLAIM_SECONDS)
        finally:
            if self._work is not None:
                self._work.cancel()
                await asyncio.gather(self._work, return_exceptions=True)

    async def _keep(self, lease: HeldLease, maintenance: NodeMaintenance) -> None:
        store = self._store.fenced(lease)
        self.scheduler = scheduler = Scheduler(store, self._cluster, self._placed, self._data_roots, self._leases)
        await self._have_nodes_swept()
        async with asyncio.TaskGroup() as group:
            listed = asyncio.Event()
            group.create_task(self._release_leftovers(scheduler, listed))
            group.create_task(self._admit(scheduler, maintenance, listed))
            group.create_task(self._remove_expired_snapshots())
            group.create_task(IdleNodes(self._cluster, self.needing_memory).run())
            if self._retention is not None:
                group.create_task(self._retention.run(store, self.release_job))

    async def _have_nodes_swept(self) -> None:
        """Have all nodes remove leftovers again: the last control plane may have died before they had done so."""
        if not self._leases.alone:
            try:
                self._cluster.nodes.unswept.update(await self._cluster.nodes.living())
            except ClusterUnavailable as error:
                log.warning("cannot sweep the nodes: %s", error)

    async def _admit(self, scheduler: Scheduler, maintenance: NodeMaintenance, listed: asyncio.Event) -> None:
        """Place queued jobs, once the leftovers of jobs are known and the nodes have had time to answer."""
        await listed.wait()
        await maintenance.first_answers()
        await scheduler.run()

    async def _release_leftovers(self, scheduler: Scheduler, listed: asyncio.Event) -> None:
        """Release what finished, paused and queued jobs still hold. `listed`: set once Ray has listed it. Jobs whose
        resources cannot be released are retried; only these jobs wait."""
        remaining: Collection[str] | None = None
        pauses = backoff(RETRY_SECONDS, MAX_RETRY_SECONDS)
        while remaining is None or remaining:
            try:
                remaining = scheduler.not_released = await self._release_unowned_jobs(remaining)
                listed.set()
                scheduler.wake()
            except Exception as error:  # Ray may not answer for a while
                what = "leftovers of jobs could not be released and are tried again"
                log.error("%s: %s", what, error, exc_info=needs_traceback(error))
            if remaining is None:
                await asyncio.sleep(RETRY_SECONDS)
            elif remaining:
                await asyncio.sleep(next(pauses))

    async def _release_unowned_jobs(self, only: Collection[str] | None) -> set[str]:
        """Returns the jobs whose resources cannot be released. `only`: consider only these jobs; None: all."""
        there = await self._cluster.jobs()
        if only is None and not self._cluster.is_remote:
            for job in await self._cluster.agents.jobs_of_other_installations():
                log.warning(FOREIGN_JOB, job)
        held = there if only is None else [job for job in there if job in only]
        states, deleted = await self._states_and_deletions(held)
        keeping = await self._store.read_async(partial(pauses_and_retries.holding_memory, job_ids=held))
        remaining = set()
        for job in held:
            if job not in states and job not in deleted:
                log.error(UNKNOWN_JOB, job)
            elif job in deleted or states[job] not in SUPERVISED:
                try:
                    await self._release_unowned_job(job, job in deleted, job in keeping)
                except Exception as error:  # most likely of this job's agents or rows: the others do not wait for it
                    what = f"what is left of {job} could not be released and is tried again"
                    log.error("%s: %s", what, error, exc_info=needs_traceback(error))
                    remaining.add(job)
        return remaining

    async def _release_unowned_job(self, job_id: str, is_deleted: bool, keeps: bool) -> None:
        async with self._leases.borrowed(job_id) as lease:
            if lease is not None and (is_deleted or not await self._still_runs(job_id, lease)):
                # A job that waits, is paused, or may be retried continues from its snapshots.
                await self._cluster.release(job_id, keep_snapshots=keeps)
                log.warning("released the remaining resources of %s", job_id)

    async def _still_runs(self, job_id: str, lease: HeldLease) -> bool:
        """Whether a job that holds nothing according to the database runs nevertheless, and is taken over now: the
        database is an older backup."""
        job = await self._store.read_async(lambda session: jobs.get(session, job_id))
        try:
            return await catch_up(JobRecord(self._store.fenced(lease), job_id), self._cluster, job)
        except (ProtocolMismatch, SpecNotUnderstood):
            return False

    async def over(self, job_ids: Collection[str]) -> set[str]:
        """Which of these jobs are finished and no longer need their snapshots, if it falls to this control plane to
        remove the snapshots. Jobs that the database does not know do not count as finished: it may be a backup that is
        older than the job."""
        if not (self.is_active or self._leases.alone):
            return set()
        states, deleted = await self._states_and_deletions(job_ids)
        keeping = await self._store.read_async(partial(pauses_and_retries.holding_memory, job_ids=job_ids))
        for job in set(job_ids) - states.keys() - deleted:
            log.warning("there are snapshots of %s, which the database does not know; they are left in place", job)
        return {job for job, state in states.items() if is_final(state) and job not in keeping} | deleted

    async def needing_memory(self, job_ids: Collection[str]) -> set[str]:
        """Which of these jobs need what they have in the memory of nodes without their ranks: failed ones that may
        be retried, those between two gangs, and those that wait or are paused with a state that is in no checkpoint."""
        return await self._store.read_async(partial(_needing_memory, job_ids=job_ids))

    async def release_job(self, job_id: str) -> None:
        """Return once nothing of a final job is left on the cluster and no control plane owns it. Raises
        ClusterUnavailable."""
        async with self._leases.borrowed(job_id, RELEASE_SECONDS) as lease:  # its owner is about to leave
            if lease is None:
                busy = TimeoutError(f"another control plane has not released {job_id} yet; try again")
                raise ClusterUnavailable(busy)
            await self._cluster.end_job(job_id)

    async def _remove_expired_snapshots(self) -> None:
        """Remove the snapshots of failed jobs that were kept for long enough."""
        seen = ConfirmedExpiry(MEMORY_CONFIRMED_SECONDS)
        while True:
            try:
                expired = await self._store.read_async(partial(pauses_and_retries.memory_expired, now=time.time()))
                for job_id in seen.confirmed(expired, time.monotonic()):
                    async with self._leases.borrowed(job_id) as lease:
                        if lease is not None:
                            await self._remove_snapshots_of(job_id, self._store.fenced(lease))
            except Exception as error:  # the rest is found by the next search
                what = "cannot remove expired snapshots"
                log.error("%s: %s", what, in_a_line(error), exc_info=not may_pass(error))
            await asyncio.sleep(MEMORY_SECONDS)

    async def _remove_snapshots_of(self, job_id: str, store: Store) -> None:
        # The row is written first: from then on a retry, which may come at any moment, resumes from a checkpoint.
        if await store.write_async(partial(pauses_and_retries.release_snapshots, job_id=job_id, now=time.time())):
            await self._cluster.end_job(job_id)

    async def _states_and_deletions(self, job_ids: Collection[str]) -> tuple[dict[str, JobState], set[str]]:
        """The states of those of these jobs that the database knows, and which of them were deleted."""
        return await self._store.read_async(
            lambda session: (jobs.states(session, job_ids), deletion.deleted_ones(session, job_ids))
        )


def _needing_memory(session: Session, job_ids: Collection[str]) -> set[str]:
    """Jobs that the database does not know are included: it may be a backup that is older than the job."""
    states, keeping = jobs.states(session, job_ids), pauses_and_retries.holding_memory(session, job_ids)
    deleted = deletion.deleted_ones(session, job_ids)

    def needs(job_id: str) -> bool:
        match states.get(job_id):
            case None:
                return job_id not in deleted
            case JobState.PAUSED | JobState.QUEUED:
                saved = max((each.step for each in checkpoints.complete_ones(session, job_id)), default=0)
                return saved < (jobs.get(session, job_id).step or 0)
            case JobState.RUNNING:  # its ranks have everything they need
                return False
        return job_id in keeping

    return {job_id for job_id in job_ids if needs(job_id)}
