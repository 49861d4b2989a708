"""The control plane: one thread with its own event loop, on which the scheduler and the owners of all jobs run.

It owns nothing that cannot be lost: jobs are in the database, and agents are named actors. Restarted after a crash, it
finds both and continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from manta.service.cluster.cluster import Cluster
from manta.service.cluster.errors import ClusterUnavailable, NodeLeaving, NodeNotFound, NodeUnreachable
from manta.service.cluster.existing_ray import ExistingRay
from manta.service.cluster.node_maintenance import NodeMaintenance
from manta.service.cluster.node_watch import NodeWatch
from manta.service.cluster.port_check import check_ports
from manta.service.cluster.ray_head import RayHead, RayUnavailable
from manta.service.control.cluster_view import Measurements, cluster_view, measured
from manta.service.control.exports import Exports
from manta.service.control.faults import FaultInjector, FaultsNotAllowed
from manta.service.control.file_work import FileWork
from manta.service.control.home_of_jobs import HomeOfJobs
from manta.service.control.housekeeping import Housekeeping
from manta.service.control.options import DEFAULTS, ControlPlaneOptions
from manta.service.control.owners import JobOwners
from manta.service.control.removal import Deletion, Retention, delete_checkpoint_in_time, delete_job
from manta.service.control.running_ranks import ObservedWaits, RankStack, RunningRanks
from manta.service.control.takeover import refuse_incompatible_agents
from manta.service.job.inbox import Cancel, JobRequest, NodeDraining, NodeLost, Resize
from manta.service.leases.decisions import LEASE_SECONDS, RayMismatch
from manta.service.leases.held import Leases, new_id
from manta.service.log_archive.archiver import LogArchiver
from manta.service.logs.pages import JobLogs, LogsInHome
from manta.service.states import JobState
from manta.service.store import Store, installation_tables, jobs
from manta.service.store.leases import connection_name
from manta.service.store.location import url_in
from manta.service.store.tables import Checkpoint
from manta.service.tasks import BackgroundTasks, log_failure
from manta.service.traces.traces import Traces
from manta.workers.config import JobSpec
from manta.workers.paths import Paths
from manta.workers.protocol.requests import Arm, RankRequest

log = logging.getLogger(__name__)
T = TypeVar("T")

CALL_SECONDS = 30.0
# Time limit for trying the ports between the nodes: less than clients wait.
CHECK_SECONDS = 25.0
RETRY_SECONDS = 1.0
# How long our own Ray, which ran before, may take to let this process in. Ray itself gives up after about a minute.
JOIN_RAY_SECONDS = 90.0
MEASURING_SECONDS = 5.0
# The most that a clean end spends on informing other control planes, which otherwise find out a little later.
LEAVE_SECONDS = 5.0


class ControlPlane:
    """The object that the API talks to. Call `start` first; `stop` leaves the jobs running."""

    def __init__(
        self,
        home: Path,
        head: RayHead | ExistingRay,
        options: ControlPlaneOptions = DEFAULTS,
        start_over: Callable[[], None] | None = None,
    ):
        """`home`: folder of the embedded state; `head`: where Ray comes from; `start_over`: called when our own Ray has
        died, and replaces this process, since a process that has used Ray cannot leave it and join it again. Raises
        InvalidDatabaseUrl, StoreUnusable."""
        self.data_roots, self.model_packages = options.data_roots, options.model_packages
        self._home, self._head, self._options, self._start_over = home, head, options, start_over
        me = new_id()
        self.store = Store(url_in(home, options.database_url), connection_name(me))
        """The job database."""
        self._leases = Leases(self.store, me)
        self._file_work = FileWork()
        self.exports = Exports(self.store, options.export_roots or (home / "exports",), self._file_work)
        self._traces = None if options.traces is None else Traces(self.store, options.traces)
        logs = options.logs
        self._home_of_jobs = HomeOfJobs(home, options.checkpoints, logs)
        self._archiver = None if logs is None else LogArchiver(self.store, self._leases, Paths.of(home, logs=logs))
        first_step = None if self._traces is None else self._traces.first_step
        self._owners = JobOwners(self.store, self._leases, options.memory_seconds, self._archiver, first_step)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="control", daemon=True)
        self._cluster: Cluster | None = None
        self._ranks: RunningRanks | None = None
        self._injector: FaultInjector | None = None
        self._housekeeping: Housekeeping | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._background_tasks = BackgroundTasks()
        self._lags = {"jobs": self._owners.lag}
        self._seen_cluster: dict[str, Any] | None = None
        """By loop, how far it is behind."""

    @property
    def _started_cluster(self) -> Cluster:
        """The cluster; only after `start`."""
        assert self._cluster is not None
        return self._cluster

    @property
    def home(self) -> Path:
        """Folder of the files of all jobs: the embedded state if there is no other control plane."""
        return self._home_of_jobs.folder

    @property
    def logs(self) -> JobLogs:
        """The output of all jobs' ranks."""
        return LogsInHome(self.home) if self._archiver is None else self._archiver

    def start(self) -> None:
        """Start the database and a Ray that answers; take over running jobs that no other control plane owns. Raises
        RayUnavailable, StoreUnusable, CannotTakeOver, RayMismatch, JobsElsewhere. Nothing waits for the nodes: each is
        checked separately from then on."""
        # Where migrating shuts out the earlier release, agents are asked first: it continues if this release cannot.
        asks_first = self.store.shuts_out_release_before
        if not asks_first:
            self.store.migrate()
        ray_is_new = isinstance(self._head, RayHead) and self._ensure_ray(self._head)
        namespace = self.store.write(lambda session: installation_tables.ray_namespace(session, ray_is_new))
        log.info("the namespace of this installation in Ray is %s", namespace)
        if not asks_first and not self._leases.alone:
            self._home_of_jobs.find(self.store)
        with self._replacing_ray_that_rejects_connections(ray_is_new):
            cluster = self._connect(namespace)
        self._thread.start()
        if asks_first:
            if not ray_is_new:
                self._call(refuse_incompatible_agents(cluster, lambda ids: self.store.query(jobs.states, ids)))
            self.store.migrate()
        self._join(cluster.identity)
        self._call(self._begin(cluster))

    @contextlib.contextmanager
    def _replacing_ray_that_rejects_connections(self, is_new: bool) -> Iterator[None]:
        """The block joins Ray. If our own one, which ran before, does not let this process in, it is replaced like a
        dead one: its jobs continue from shared memory. This also interrupts a call into Ray that never returns."""
        if is_new or not isinstance(self._head, RayHead) or self._start_over is None:
            yield
            return
        timer = threading.Timer(JOIN_RAY_SECONDS, self._replace_ray, ("this service could not join it in time",))
        timer.start()
        try:
            yield
        except RayUnavailable as error:
            timer.cancel()
            self._replace_ray(str(error))
            raise
        finally:
            timer.cancel()

    def _replace_ray(self, why: str) -> None:
        assert isinstance(self._head, RayHead) and self._start_over is not None
        log.error("Ray is replaced: %s", why)
        self._head.stop()
        self._start_over()

    def restore_token(self) -> None:
        """Write the token of our own Ray again if it was removed or changed: whatever starts there reads it. Raises
        HomeUnusable."""
        if isinstance(self._head, RayHead):
            self._head.restore_token()

    def _connect(self, namespace: str) -> Cluster:
        self._home_of_jobs.mark(namespace)
        ray, is_remote = self._head.connect(namespace), isinstance(self._head, ExistingRay)
        return Cluster.connected(ray, self._home_of_jobs.paths, self._options.nodes, is_remote=is_remote)

    def _join(self, ray: str) -> None:
        """Become one of the control planes of this database. Raises RayMismatch, but not at once, since the other one
        may be dead without this being known yet."""
        place = f"{socket.gethostname()}:{Paths.of(self._home).home}"
        deadline = time.monotonic() + LEASE_SECONDS + RETRY_SECONDS
        while True:
            try:
                self._leases.join(place, ray)
                return
            except RayMismatch:
                if time.monotonic() > deadline:
                    raise
                threading.Event().wait(RETRY_SECONDS)

    @staticmethod
    def _ensure_ray(head: RayHead) -> bool:
        """Whether our Ray was started just now."""
        before = head.record()
        return head.ensure() != before

    async def _begin(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._ranks = RunningRanks(self.store, cluster)
        self._injector = FaultInjector(self.store, cluster, self._owners.agents_of)
        cluster.fence_with(self._leases.epoch)
        self._leases.begin()
        retention_days = self._options.retention_days
        retention = Retention(cluster.paths, retention_days, self._file_work) if retention_days else None
        placed = self._owners.placed
        self._housekeeping = Housekeeping(self.store, cluster, self._leases, placed, self.data_roots, retention)
        self._owners.begin(cluster, self._housekeeping)
        await self._owners.refresh()
        care = NodeMaintenance(cluster, self._housekeeping.over, self._housekeeping.wake)
        watch = NodeWatch(cluster, self._node_lost, self._node_draining)
        self._lags["nodes"] = watch.lag
        self._tasks = [
            asyncio.create_task(self._housekeeping.run(care), name="scheduler"),
            asyncio.create_task(self._owners.run(), name="claims"),
            asyncio.create_task(care.run(), name="care for nodes"),
            asyncio.create_task(watch.run(), name="nodes"),
            asyncio.create_task(self._watch_ray(), name="watch over Ray"),
        ]
        if self._archiver is not None:
            self._tasks.append(asyncio.create_task(self._archiver.run(), name="logs"))
        for task in self._tasks:
            task.add_done_callback(log_failure)

    async def _watch_ray(self) -> None:
        """Notice when our Ray can place nothing any more. Either all trainers died with it, or will when it is
        replaced, and their jobs continue from their snapshots; or, in an existing Ray, only our own raylet is gone."""
        why = await self._head.until_gone()
        log.error("Ray is gone: %s (log: %s)", why, Paths.of(self._home).ray_log)
        if self._start_over is not None:
            self._start_over()

    def _node_lost(self, node: str, why: str) -> None:
        for owner in self._owners.all():
            owner.tell(NodeLost(node, why))
        if isinstance(self._head, RayHead):
            self._background_tasks.start(self._replace_ray_without_nodes(), "replacement of Ray")

    async def _replace_ray_without_nodes(self) -> None:
        """Our own Ray is of no use without its node, which it never takes back once it has given it up."""
        known = await self._started_cluster.nodes.known()
        if self._start_over is not None and not any(node.alive and node.holds_ranks for node in known):
            self._replace_ray("it has given up its only node")

    def _node_draining(self, node: str, seconds: float | None, reason: str = "") -> None:
        """Repeated with every heartbeat."""
        if self._started_cluster.nodes.drain(node, seconds, reason):
            for owner in self._owners.all():
                owner.tell(NodeDraining(node, seconds, reason))

    def drain(self, node: str, seconds: float) -> dict[str, Any]:
        """Make all jobs leave `node`, an id or its beginning, within `seconds`; returns the node as in `cluster`.
        Raises NodeNotFound, NodeUnreachable, ClusterUnavailable."""
        return self._call(self._drain(node, seconds))

    async def _drain(self, node: str, seconds: float) -> dict[str, Any]:
        about = await self._node(node)
        if not await self._started_cluster.daemons.drain(about["id"], seconds):
            raise NodeUnreachable(about["id"])
        self._node_draining(about["id"], seconds)
        return {**about, "draining": True}

    def undrain(self, node: str) -> dict[str, Any]:
        """Use `node`, an id or its beginning, again; returns the node as in `cluster`. Jobs that have left do not come
        back by themselves. Raises NodeNotFound, NodeUnreachable, NodeLeaving, ClusterUnavailable."""
        return self._call(self._undrain(node))

    async def _undrain(self, node: str) -> dict[str, Any]:
        about = await self._node(node)
        reason = await self._started_cluster.daemons.undrain(about["id"])
        if reason is None:
            raise NodeUnreachable(about["id"])
        if reason:
            raise NodeLeaving(about["id"], reason)
        # Every control plane hears of it by the next heartbeat, which is sent at once. One that is still on its way
        # says otherwise, and would look like another drain if this were noted here.
        return {**about, "draining": False}

    async def _node(self, node: str) -> dict[str, Any]:
        """The node whose id begins with `node`."""
        nodes = (await cluster_view(self._started_cluster, self.store))["nodes"]
        matching = [each for each in nodes if each["id"].startswith(node)]
        if len(matching) != 1:
            raise NodeNotFound(node, len(matching))
        return matching[0]

    def _wake_scheduler(self) -> None:
        if self._housekeeping is not None:
            self._housekeeping.wake()

    def submitted(self, job_id: str) -> None:
        """A job was stored, retried or resumed, or has another priority: wake the scheduler."""
        self._loop.call_soon_threadsafe(self._wake_scheduler)
        if self._housekeeping is None or not self._housekeeping.is_active:
            self._leases.wake_control_planes()

    def delete(self, job_id: str) -> Deletion:
        """Delete a final job and everything that belongs to it. Raises JobNotFound, JobNotFinal, JobBeingExported,
        FilesNotRemoved, StillRemoving, ClusterUnavailable."""
        paths, work = self._home_of_jobs.paths, self._file_work
        return delete_job(self.store, paths, job_id, lambda: self._call(self._release_job(job_id)), work)

    def delete_checkpoint(self, job_id: str, checkpoint_id: str, force: bool) -> Checkpoint:
        """Delete a checkpoint and its files. Raises JobNotFound, CheckpointNotFound, CheckpointNeeded,
        CheckpointNotRemoved, CheckpointStillRemoving."""
        paths, work = self._home_of_jobs.paths, self._file_work
        return delete_checkpoint_in_time(self.store, paths, job_id, checkpoint_id, force, work)

    async def _release_job(self, job_id: str) -> None:
        assert self._housekeeping is not None
        await self._housekeeping.release_job(job_id)
        if self._archiver is not None:
            self._archiver.forget(job_id)

    def waits(self, job_id: str) -> ObservedWaits:
        """Which rank waits for which in a running job. Raises JobNotFound, NoRanks, SpecNotUnderstood,
        ClusterUnavailable."""
        return self._call(self._started(self._ranks).waits(job_id))

    def stack(self, job_id: str, rank: int) -> RankStack:
        """Where a rank's trainer is now. Raises JobNotFound, NoRanks, RankNotFound, RankTimeout,
        ClusterUnavailable."""
        return self._call(self._started(self._ranks).stack(job_id, rank))

    @staticmethod
    def _started(part: T | None) -> T:
        """A part that needs Ray."""
        if part is None:
            raise ClusterUnavailable(RuntimeError("the control plane is starting"))
        return part

    def tell(self, job_id: str, request: JobRequest | RankRequest) -> None:
        """Have a job carry out `request`. One to its owner is in the database already, and wakes the control plane that
        owns the job. One to ranks is passed on to their agents: raises JobNotFound, FaultsNotAllowed, FaultNotPossible,
        FaultNotConfirmed, NoRanks, RankTimeout, SpecNotUnderstood, ClusterUnavailable."""
        match request:
            case Arm(fault):
                if not self._options.allow_faults:
                    raise FaultsNotAllowed()
                self._call(self._started(self._injector).inject(job_id, fault))
            case RankRequest():
                self._call(self._started(self._ranks).tell(job_id, request))
            case _:
                self._loop.call_soon_threadsafe(self._tell_owner, job_id, request)
                if not self._owners.has(job_id):
                    self._leases.wake_control_planes()

    def _tell_owner(self, job_id: str, request: JobRequest) -> None:
        if owner := self._owners.of(job_id):  # else it holds nothing, or is being placed, and read again once it is
            owner.tell(request)
        elif isinstance(request, Resize):
            self._wake_scheduler()
        if isinstance(request, Cancel) and self._cluster is not None:
            self._background_tasks.start(self._clean_up_if_cancelled(job_id), f"end of {job_id}")

    async def _clean_up_if_cancelled(self, job_id: str) -> None:
        """A job that was cancelled in the queue or in a pause may have run before and left its snapshots. Its owner at
        that time may not have left yet."""
        if (await asyncio.to_thread(self.store.query, jobs.get, job_id)).state == JobState.CANCELLED:
            async with self._leases.borrowed(job_id, CALL_SECONDS) as lease:
                if lease is not None:
                    await self._started_cluster.end_job(job_id)

    def cluster(self) -> dict[str, Any]:
        """Nodes, slots and which ranks run where, in the form of `manta.api.schemas.Cluster`. Raises
        ClusterUnavailable."""
        self._seen_cluster = self._call(cluster_view(self._started_cluster, self.store))
        return self._seen_cluster

    def last_seen_cluster(self) -> dict[str, Any]:
        """As `cluster`, or as that last was if it does not answer now. Raises ClusterUnavailable if it never did."""
        try:
            return self.cluster()
        except ClusterUnavailable:
            if self._seen_cluster is None:
                raise
            return self._seen_cluster

    def check_cluster(self) -> dict[str, Any]:
        """Problems between the nodes, and what the end of Ray's head would mean, in the form of
        `manta.api.schemas.ClusterCheck`. Raises ClusterUnavailable."""
        ports = self._call(check_ports(self._started_cluster), CHECK_SECONDS)
        head = self._head.problem_of_head() if isinstance(self._head, ExistingRay) else None
        warnings = [*ports.left_out, *([head] if head is not None else [])]
        return {"problems": list(ports.problems), "warnings": warnings, "nodes": ports.nodes, "tries": ports.tries}

    def problem_of_data(self, spec: JobSpec) -> str | None:
        """Why a job cannot be trained on its data; None if it can, or if no node says. Raises ClusterUnavailable."""
        cluster = self._started_cluster
        if not cluster.is_remote:
            return self.data_roots.problem_of_data(spec)
        return self._call(cluster.daemons.problem_of_data(spec.model_dump(mode="json"), self.data_roots.names))

    def measurements(self) -> Measurements:
        """What is known here about this control plane and the nodes. Raises ClusterUnavailable if the control plane's
        own thread does not answer."""
        lags = {name: lag.seconds for name, lag in self._lags.items()}
        if self._housekeeping is not None and self._housekeeping.is_active:
            lags |= self._housekeeping.lag_seconds
        if not self._thread.is_alive():
            raise ClusterUnavailable(RuntimeError("the control plane is starting"))
        return self._call(measured(self._cluster, time.monotonic(), len(self._owners.by_job), lags), MEASURING_SECONDS)

    def ready(self) -> list[str]:
        """Why jobs cannot run right now; empty if they can."""
        if self._cluster is None or not self._thread.is_alive():
            return ["the control plane is starting"]
        if any(task.done() for task in self._tasks if task.get_name() == "scheduler"):
            return ["the scheduler has stopped; see the service's log"]
        try:
            problem = self._call(self._cluster.nodes.problem_of_all(), 5.0)
        except ClusterUnavailable as error:
            return [f"Ray does not answer ({error.raised})"]
        return [] if problem is None else [problem]

    def stop(self) -> None:
        """End the control thread; jobs continue to run and are taken over by the next control plane."""
        self._file_work.close()
        if self._thread.is_alive():
            self._call(self._leave())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CALL_SECONDS)
        if self._traces is not None:
            self._traces.close()
        self.exports.close()
        self.store.close()

    async def _leave(self) -> None:
        if self._archiver is not None:
            await self._archiver.leave()
        tasks = [*self._tasks, *self._background_tasks.running, *(task for _, task in self._owners.by_job.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._leases.leave()
        except Exception:  # the others find out by themselves
            log.exception("other control planes could not be notified that this one leaves")

    def _call(self, coroutine: Coroutine[Any, Any, T], seconds: float = CALL_SECONDS) -> T:
        """The result of `coroutine` on the control plane's thread. Raises ClusterUnavailable if it takes longer than
        `seconds`."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(seconds)
        except TimeoutError as error:
            future.cancel()  # nothing waits for it any more
            raise ClusterUnavailable(
                TimeoutError(f"the cluster did not answer within {seconds:g} s; try again")
            ) from error
