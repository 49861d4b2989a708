"""The control plane: one thread with an event loop of its own, on which the scheduler and the owners of all jobs live.

It owns nothing that cannot be lost: jobs are in the database, agents are named actors. Started again after a crash it
finds both and goes on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy.orm import Session

from service.cluster.cluster import Cluster
from service.cluster.errors import ClusterUnavailable, NodeNotFound, NodeUnreachable
from service.cluster.node_care import NodeCare
from service.cluster.node_watch import NodeWatch
from service.cluster.placement import unit_of
from service.cluster.ray_head import ExistingRay, RayHead
from service.data_roots import ANYWHERE, DataRoots
from service.deletion import Deletion, delete_job
from service.faults import FaultNotPossible, FaultsNotAllowed
from service.job.context import DEFAULT_MEMORY_SECONDS
from service.job.older_database import catch_up
from service.job.owner import JobOwner
from service.job.record import JobRecord
from service.scheduler import Scheduler
from service.states import SUPERVISED, JobState, is_final
from service.store import Store, deletion, failed_jobs, installation, jobs, ranks
from service.store.location import url_in
from service.store.tables import Job
from service.stored_specs import SpecNotUnderstood
from service.takeover import refuse_what_cannot_be_taken_over
from workers.paths import Paths
from workers.protocol.messages import Fault, ProtocolMismatch
from workers.system.process_end import ended

log = logging.getLogger(__name__)
T = TypeVar("T")

CALL_SECONDS = 30.0
RETRY_SECONDS = 1.0
RAY_WATCH = "watch over Ray"
# How often it is made sure that every job that may hold places has an owner.
CLAIM_SECONDS = 2.0
# How often it is looked for failed jobs whose snapshots were kept for long enough.
MEMORY_SECONDS = 30.0
UNKNOWN_JOB = (
    "agents or places of %s are there, but the database does not know that job (is it restored from an older backup?): "
    "it is left running"
)


class ControlPlane:
    """What the API talks to. `start` before anything else; `stop` leaves the jobs running."""

    def __init__(
        self,
        home: Path,
        head: RayHead | ExistingRay,
        start_over: Callable[[], None] | None = None,
        allow_faults: bool = False,
        memory_seconds: float = DEFAULT_MEMORY_SECONDS,
        data_roots: DataRoots = ANYWHERE,
        database_url: str | None = None,
    ):
        """`home`: folder of the embedded state; `head`: where Ray comes from; `start_over`: called when our own Ray
        has died, and replaces this process: Ray cannot be left and joined anew in the one that used it;
        `allow_faults`: make faults in jobs on request; `memory_seconds`: how long the snapshots of a failed job are
        kept for a retry; `data_roots`: below which folders jobs may read; `database_url`: where the job database is, by
        default in the home. Raises BadDatabaseUrl, StoreUnusable."""
        self.data_roots = data_roots
        self._home, self._head, self._start_over = home, head, start_over
        self._allow_faults, self._memory_seconds = allow_faults, memory_seconds
        self._store = Store(url_in(home, database_url))
        self._owners: dict[str, tuple[JobOwner, asyncio.Task[None]]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="control", daemon=True)
        self._cluster: Cluster | None = None
        self._scheduler: Scheduler | None = None
        self._ray_process: int | None = None
        """First process of our own Ray."""
        self._tasks: list[asyncio.Task[None]] = []
        self._background_tasks: set[asyncio.Task[None]] = set()

    @property
    def store(self) -> Store:
        """The job database."""
        return self._store

    @property
    def home(self) -> Path:
        """Folder of the embedded state."""
        return self._home

    def start(self) -> None:
        """Bring up the database and a Ray that answers; take over running jobs. Raises RayUnavailable, StoreUnusable,
        CannotTakeOver.

        Nothing waits for the nodes: each is looked after on its own from then on.
        """
        # What was released uses the database as it is, so that it can go on if this release cannot.
        asks_first = self._store.shuts_out_release_before
        if not asks_first:
            self._store.migrate()
        ray_is_new = isinstance(self._head, RayHead) and self._ensure_ray(self._head)
        namespace = self._store.write(lambda session: installation.ray_namespace(session, ray_is_new))
        log.info("the namespace of this installation in Ray is %s", namespace)
        cluster = self._connect(namespace)
        self._thread.start()
        if asks_first:
            if not ray_is_new:
                self._call(refuse_what_cannot_be_taken_over(cluster, self._states))
            self._store.migrate()
        self._call(self._begin(cluster))

    def _connect(self, namespace: str) -> Cluster:
        return Cluster.connected(self._head.connect(namespace), self._home)

    def _ensure_ray(self, head: RayHead) -> bool:
        """Whether our Ray was started just now."""
        before = head.record()
        record = head.ensure()
        self._ray_process = record.pid
        return record != before

    async def _begin(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._scheduler = Scheduler(self._store, cluster, self._placed, self.data_roots)
        unfinished = await asyncio.to_thread(self._unfinished)
        for job in unfinished:
            if job.state in SUPERVISED:
                self._own(job.id, None)
        care = NodeCare(cluster, self._over, self._scheduler.wake)
        self._tasks = [
            asyncio.create_task(self._admit(self._scheduler, care), name="scheduler"),
            asyncio.create_task(self._claim(self._scheduler), name="claims"),
            asyncio.create_task(self._let_go_of_memory(cluster), name="memory"),
            asyncio.create_task(care.run(), name="care for nodes"),
            asyncio.create_task(NodeWatch(cluster, self._node_lost, self._node_draining).run(), name="nodes"),
        ]
        if isinstance(self._head, RayHead):
            self._tasks.append(asyncio.create_task(self._watch_ray(), name=RAY_WATCH))
        for task in self._tasks:
            task.add_done_callback(_log_failure)

    async def _admit(self, scheduler: Scheduler, care: NodeCare) -> None:
        """Place queued jobs, once nothing is left of jobs that are over, and the nodes have had time to answer."""
        await self._release_leftovers()
        await care.first_answers()
        await scheduler.run()

    async def _release_leftovers(self) -> None:
        """Release what jobs hold that are over, paused or in the queue. Until Ray has said what there is."""
        while True:
            try:
                await self._release_those_without_owner()
                return
            except Exception:  # Ray may not answer for a while
                log.exception("what is left of jobs could not be released; it is tried again")
                await asyncio.sleep(RETRY_SECONDS)

    async def _release_those_without_owner(self) -> None:
        assert self._cluster is not None
        held = await self._cluster.jobs()
        states, deleted = await asyncio.to_thread(self._fates, held)
        keeping = await asyncio.to_thread(self._read, failed_jobs.holding_memory)
        for job in held:
            if job not in states and job not in deleted:
                log.error(UNKNOWN_JOB, job)
            elif job not in deleted and states[job] not in SUPERVISED and await self._runs_in_spite_of_that(job):
                self._own(job, None)
            elif job in deleted or states[job] not in SUPERVISED:
                # One that waits, is paused, or may be tried again, goes on from its snapshots.
                await self._cluster.release(job, keep_snapshots=job in keeping)
                log.warning("released what was left of %s", job)

    async def _runs_in_spite_of_that(self, job_id: str) -> bool:
        """Whether a job that holds nothing according to the database runs all the same, and is taken over: the database
        is a backup."""
        assert self._cluster is not None
        job = await asyncio.to_thread(self._job, job_id)
        try:
            return await catch_up(JobRecord(self._store, job_id), self._cluster, job)
        except (ProtocolMismatch, SpecNotUnderstood):
            return False

    def _states(self, job_ids: Collection[str]) -> dict[str, JobState]:
        return self._read(lambda session: jobs.states(session, job_ids))

    def _fates(self, job_ids: Collection[str]) -> tuple[dict[str, JobState], set[str]]:
        """The states of those of these jobs that the database knows, and those that were deleted."""
        return self._read(lambda session: (jobs.states(session, job_ids), deletion.deleted_ones(session, job_ids)))

    async def _over(self, job_ids: Collection[str]) -> set[str]:
        """Those of these jobs that are over, and whose snapshots nobody needs any more. What the database does not know
        is not over: it may be a backup, older than the job."""
        states, deleted = await asyncio.to_thread(self._fates, job_ids)
        keeping = await asyncio.to_thread(self._read, failed_jobs.holding_memory)
        for job in set(job_ids) - states.keys() - deleted:
            log.warning("there are snapshots of %s, which the database does not know; they are left alone", job)
        return {job for job, state in states.items() if is_final(state) and job not in keeping} | deleted

    async def _watch_ray(self) -> None:
        """Notice the death of our Ray. All trainers died with it; their jobs go on from their snapshots."""
        if self._ray_process is not None:
            await ended(self._ray_process)
        log.error("Ray has died (log: %s)", Paths.of(self._home).ray_log)
        if self._start_over is not None:
            self._start_over()

    def _node_lost(self, node: str, why: str) -> None:
        for owner, _ in list(self._owners.values()):
            owner.node_lost(node, why)

    def _node_draining(self, node: str, seconds: float) -> None:
        assert self._cluster is not None
        if node not in self._cluster.nodes.draining:
            self._cluster.nodes.draining.add(node)
            for owner, _ in list(self._owners.values()):
                owner.node_draining(node, seconds)

    def drain(self, node: str, seconds: float) -> dict[str, Any]:
        """Have all jobs leave `node`, an id or the start of one, within `seconds`; the node as in `cluster`. Raises
        NodeNotFound, NodeUnreachable, ClusterUnavailable."""
        return self._call(self._drain(node, seconds))

    async def _drain(self, node: str, seconds: float) -> dict[str, Any]:
        assert self._cluster is not None
        matching = [each for each in (await self._describe_cluster())["nodes"] if each["id"].startswith(node)]
        if len(matching) != 1:
            raise NodeNotFound(node, len(matching))
        if not await self._cluster.daemons.drain(matching[0]["id"], seconds):
            raise NodeUnreachable(matching[0]["id"])
        self._node_draining(matching[0]["id"], seconds)
        return {**matching[0], "draining": True}

    def _unfinished(self) -> list[Job]:
        with self._store.read() as session:
            return list(jobs.unfinished(session))

    def _placed(self, job: Job, generation: int) -> None:
        self._own(job.id, generation)

    async def _claim(self, scheduler: Scheduler) -> None:
        """Own every job that may hold places and has no owner: whatever happened to the one it had."""
        while True:
            await asyncio.sleep(CLAIM_SECONDS)
            try:
                unfinished = await asyncio.to_thread(self._unfinished)
            except Exception:  # whoever is without an owner still is in a moment
                log.exception("could not look for jobs without an owner")
                continue
            for job in unfinished:
                if job.state in SUPERVISED and job.id not in self._owners and job.id not in scheduler.placing:
                    log.warning("%s had no owner", job.id)
                    self._own(job.id, None)

    async def _let_go_of_memory(self, cluster: Cluster) -> None:
        """Remove the snapshots of failed jobs that were kept for long enough."""
        while True:
            try:
                for job_id in await asyncio.to_thread(self._read, lambda s: failed_jobs.memory_expired(s, time.time())):
                    # First the row: from then on a retry, which may come at any moment, asks for a checkpoint.
                    if await self._store.write_async(
                        partial(failed_jobs.let_memory_go, job_id=job_id, now=time.time())
                    ):
                        await cluster.end_job(job_id)
            except Exception:  # what is left is looked for again
                log.exception("could not remove snapshots that were kept for long enough")
            await asyncio.sleep(MEMORY_SECONDS)

    def _read(self, query: Callable[[Session], T]) -> T:
        with self._store.read() as session:
            return query(session)

    def _own(self, job_id: str, placed_generation: int | None) -> None:
        assert self._cluster is not None
        owner = JobOwner(self._store, self._cluster, job_id, self._memory_seconds)
        task = asyncio.create_task(self._run(owner, placed_generation), name=f"owner of {job_id}")
        self._owners[job_id] = (owner, task)
        task.add_done_callback(_log_failure)

    async def _run(self, owner: JobOwner, placed_generation: int | None) -> None:
        try:
            await owner.run(placed_generation)
        finally:
            if self._owners.get(owner.id, (None,))[0] is owner:
                del self._owners[owner.id]
            if self._scheduler is not None:
                self._scheduler.wake()

    def submitted(self, job_id: str) -> None:
        """A job was stored, is tried again, was resumed, or has another priority: wake the scheduler."""
        if self._scheduler is not None:
            self._loop.call_soon_threadsafe(self._scheduler.wake)

    def cancel(self, job_id: str) -> None:
        """A job was moved to CANCELLING or CANCELLED: wake its owner."""
        self._loop.call_soon_threadsafe(self._cancel, job_id)

    def pause(self, job_id: str) -> None:
        """A job was moved to PAUSING or PAUSED: wake its owner."""
        self._loop.call_soon_threadsafe(self._pause, job_id)

    def _pause(self, job_id: str) -> None:
        if job_id in self._owners:  # one that is being placed is read again once it is; one in the queue holds nothing
            self._owners[job_id][0].pause()

    def delete(self, job_id: str) -> Deletion:
        """Delete a final job and all that it has. Raises JobNotFound, JobNotFinal, FilesNotRemoved,
        ClusterUnavailable."""
        return delete_job(self._store, Paths.of(self._home), job_id, lambda: self._call(self._let_go(job_id)))

    async def _let_go(self, job_id: str) -> None:
        """Nothing of a final job is left on the cluster, and nobody looks after it."""
        assert self._cluster is not None
        _, task = self._owners.get(job_id, (None, None))
        if task is not None:
            await asyncio.wait({task})  # it is about to leave
        await self._cluster.end_job(job_id)

    def inject(self, job_id: str, fault: Fault) -> None:
        """Make `fault` in a job that runs. Raises JobNotFound, FaultsNotAllowed, FaultNotPossible."""
        if not self._allow_faults:
            raise FaultsNotAllowed()
        state = self._job(job_id).state
        owner, _ = self._owners.get(job_id, (None, None))
        if owner is None:
            raise FaultNotPossible(f"the job is {state}, and only one that runs can have a fault")
        self._call(owner.inject(fault))

    def resize(self, job_id: str) -> None:
        """A job shall have another size: wake its owner."""
        self._loop.call_soon_threadsafe(self._resize, job_id)

    def _resize(self, job_id: str) -> None:
        if job_id in self._owners:
            self._owners[job_id][0].resize()
        elif self._scheduler is not None:
            self._scheduler.wake()

    def _cancel(self, job_id: str) -> None:
        if job_id in self._owners:
            self._owners[job_id][0].cancel()
        if self._cluster is not None:
            self._background(self._forget_if_cancelled(job_id))

    async def _forget_if_cancelled(self, job_id: str) -> None:
        """A job that was cancelled in the queue or in a pause may have run before and have left its snapshots. The one
        who owned it then may not have gone yet."""
        assert self._cluster is not None
        if (await asyncio.to_thread(self._job, job_id)).state == JobState.CANCELLED:
            await self._cluster.end_job(job_id)

    def _job(self, job_id: str) -> Job:
        with self._store.read() as session:
            return jobs.get(session, job_id)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)
        task.add_done_callback(_log_failure)

    def cluster(self) -> dict[str, Any]:
        """Nodes, slots and which ranks run where, in the form of `api.schemas.Cluster`. Raises ClusterUnavailable."""
        return self._call(self._describe_cluster())

    async def _describe_cluster(self) -> dict[str, Any]:
        assert self._cluster is not None
        gpus = await self._cluster.nodes.has_gpus()
        unit = unit_of("auto", gpus)
        capacity = await self._cluster.nodes.capacity(unit, all_living=True)
        known = {node.id: node for node in await self._cluster.nodes.known()}
        placed = await asyncio.to_thread(self._placed_ranks)
        nodes = [
            {
                "id": node,
                "address": known[node].raylet[0],
                "alive": True,
                "draining": node in self._cluster.nodes.draining,
                "accelerator": "gpu" if gpus else "cpu",
                "total": total,
                "free": free,
                "ranks": placed.get(known[node].host, []),
            }
            for node, (total, free) in capacity.nodes.items()
        ]
        return {"nodes": nodes, "totals": {"total": capacity.total, "free": capacity.free}}

    def _placed_ranks(self) -> dict[str, list[dict[str, Any]]]:
        by_host: dict[str, list[dict[str, Any]]] = {}
        with self._store.read() as session:
            for job in jobs.unfinished(session):
                for rank in ranks.of_job(session, job.id):
                    if rank.pid is not None and rank.node is not None:
                        by_host.setdefault(rank.node, []).append({"job": job.id, "rank": rank.rank})
        return by_host

    def ready(self) -> list[str]:
        """Why jobs cannot run right now; empty when they can."""
        if self._cluster is None or not self._thread.is_alive():
            return ["the control plane is starting"]
        if any(task.done() for task in self._tasks if task.get_name() == "scheduler"):
            return ["the scheduler has stopped; see the service's log"]
        try:
            self._call(self._cluster.nodes.has_gpus(), 5.0)
        except ClusterUnavailable as error:
            return [f"Ray does not answer ({error.kind})"]
        return []

    def stop(self) -> None:
        """Leave the control thread; jobs run on and are taken over by the next control plane."""
        if self._thread.is_alive():
            self._call(self._leave())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CALL_SECONDS)
        self._store.close()

    async def _leave(self) -> None:
        tasks = [*self._tasks, *self._background_tasks, *(task for _, task in self._owners.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _call(self, coroutine: Any, seconds: float = CALL_SECONDS) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(seconds)
        except TimeoutError as error:
            future.cancel()  # nobody waits for it any more
            raise ClusterUnavailable(TimeoutError(f"the cluster gave no answer in {seconds:g} s; try again")) from error


def _log_failure(task: asyncio.Task[None]) -> None:
    """No owner loop may end unnoticed."""
    if not task.cancelled() and task.exception() is not None:
        log.error("%s ended: %r", task.get_name(), task.exception(), exc_info=task.exception())
