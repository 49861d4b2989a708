"""The control plane: one thread with an event loop of its own, on which the scheduler and all supervisors live.

It owns nothing that cannot be lost: jobs are in the database, gangs are named actors. Started again after a crash it
finds both and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from service.gangs import Gangs
from service.placement import unit_of
from service.ray_head import ExistingRay, RayHead
from service.scheduler import Scheduler
from service.states import JobState
from service.store import IllegalTransition, Store, jobs, ranks
from service.store.tables import Job
from service.supervisor import Site, Supervisor

log = logging.getLogger(__name__)

CALL_SECONDS = 30.0
RETRY_SECONDS = 1.0


class ControlPlane:
    """What the API talks to. `start` before anything else; `stop` leaves the jobs running."""

    def __init__(self, home: Path, head: RayHead | ExistingRay):
        """`home`: folder of the embedded state; `head`: where Ray comes from."""
        self._home, self._head = home, head
        self._store = Store(f"sqlite:///{home / 'manta.db'}")
        self._supervisors: dict[str, tuple[Supervisor, asyncio.Task[None]]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="control", daemon=True)
        self._site: Site | None = None
        self._scheduler: Scheduler | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def store(self) -> Store:
        """The job database."""
        return self._store

    @property
    def home(self) -> Path:
        """Folder of the embedded state."""
        return self._home

    def start(self) -> None:
        """Bring up database, Ray and the nodes' daemons; take over running jobs. Raises RayUnavailable."""
        self._store.migrate()
        if isinstance(self._head, RayHead):
            self._head.ensure()
        ray = self._head.connect()
        self._thread.start()
        self._call(self._begin(ray))

    async def _begin(self, ray: Any) -> None:
        gangs = Gangs(ray, str(self._home))
        self._site = Site(self._store, gangs, ray, self._home)
        self._scheduler = Scheduler(self._site, self._placed)
        unfinished = await asyncio.to_thread(self._unfinished)
        live = [job.id for job in unfinished if job.state != JobState.QUEUED]
        for orphan in await gangs.sweep(live):
            log.warning("released what was left of %s", orphan)
        daemons = await gangs.ensure_node_daemons()
        for daemon in daemons.values():
            await daemon.sweep.remote(live)
        for job in unfinished:
            if job.state != JobState.QUEUED:
                self._supervise(job, None)
        self._tasks = [
            asyncio.create_task(self._scheduler.run(), name="scheduler"),
            asyncio.create_task(self._learn_peaks(self._site), name="peaks"),
        ]
        for task in self._tasks:
            task.add_done_callback(_complain)

    def _unfinished(self) -> list[Job]:
        with self._store.read() as session:
            return list(jobs.unfinished(session))

    async def _learn_peaks(self, site: Site) -> None:
        """Ask each node for the peak rate of its devices until all have measured it."""
        unknown = True
        while unknown:
            unknown = False
            for daemon in (await site.gangs.ensure_node_daemons()).values():
                about = await daemon.describe.remote()
                if about["peak_flops"] is None:
                    unknown = True
                else:
                    site.peaks[about["node"]] = about["peak_flops"]
            if unknown:
                await asyncio.sleep(RETRY_SECONDS)

    def _placed(self, job: Job, generation: int) -> None:
        self._supervise(job, generation)

    def _supervise(self, job: Job, placed_generation: int | None) -> None:
        assert self._site is not None
        supervisor = Supervisor(self._site, job)
        task = asyncio.create_task(self._run(supervisor, placed_generation), name=f"supervisor of {job.id}")
        self._supervisors[job.id] = (supervisor, task)
        task.add_done_callback(_complain)

    async def _run(self, supervisor: Supervisor, placed_generation: int | None) -> None:
        try:
            await supervisor.run(placed_generation)
        except Exception as error:
            log.exception("supervisor of %s", supervisor.job_id)
            await self._fail(supervisor.job_id, f"internal error: {type(error).__name__}: {error}")
        finally:
            self._supervisors.pop(supervisor.job_id, None)
            if self._scheduler is not None:
                self._scheduler.wake()

    async def _fail(self, job_id: str, message: str) -> None:
        assert self._site is not None
        await self._site.gangs.release(job_id)

        def fail(session: Any) -> None:
            ranks.set_all(session, job_id, "exited")
            with contextlib.suppress(IllegalTransition):
                jobs.transition(session, job_id, JobState.FAILED, reason="internal_error", message=message)

        await self._store.write_async(fail)

    def submitted(self, job_id: str) -> None:
        """A job was stored: wake the scheduler."""
        if self._scheduler is not None:
            self._loop.call_soon_threadsafe(self._scheduler.wake)

    def cancel(self, job_id: str) -> None:
        """A job was moved to CANCELLING or CANCELLED: wake its supervisor."""
        self._loop.call_soon_threadsafe(self._cancel, job_id)

    def _cancel(self, job_id: str) -> None:
        if job_id in self._supervisors:
            self._supervisors[job_id][0].cancel()

    def cluster(self) -> dict[str, Any]:
        """Nodes, slots and which ranks run where, in the form of `api.schemas.Cluster`."""
        return self._call(self._cluster())

    async def _cluster(self) -> dict[str, Any]:
        assert self._site is not None
        gpus = await self._site.gangs.has_gpus()
        unit = unit_of("auto", gpus)
        capacity = await self._site.gangs.capacity(unit)
        hosts = {node["NodeID"]: node for node in await asyncio.to_thread(self._site.ray.nodes)}
        placed = await asyncio.to_thread(self._placed_ranks)
        nodes = [
            {
                "id": node,
                "address": hosts[node]["NodeManagerAddress"],
                "alive": True,
                "accelerator": "gpu" if gpus else "cpu",
                "total": total,
                "free": free,
                "ranks": placed.get(hosts[node]["NodeManagerHostname"], []),
            }
            for node, (total, free) in capacity.nodes.items()
        ]
        return {"nodes": nodes, "totals": {"total": capacity.total, "free": capacity.free}}

    def _placed_ranks(self) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        with self._store.read() as session:
            for job in jobs.unfinished(session):
                for rank in ranks.of_job(session, job.id):
                    if rank.pid is not None and rank.node is not None:
                        found.setdefault(rank.node, []).append({"job": job.id, "rank": rank.rank})
        return found

    def ready(self) -> list[str]:
        """Why jobs cannot run right now; empty when they can."""
        if self._site is None or not self._thread.is_alive():
            return ["the control plane is starting"]
        if any(task.done() for task in self._tasks if task.get_name() == "scheduler"):
            return ["the scheduler has stopped; see the service's log"]
        try:
            self._call(self._site.gangs.has_gpus(), 5.0)
        except (TimeoutError, self._site.ray.exceptions.RayError) as error:
            return [f"Ray does not answer ({type(error).__name__})"]
        return []

    def stop(self) -> None:
        """Leave the control thread; jobs run on and are taken over by the next control plane."""
        if self._thread.is_alive():
            self._call(self._leave())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CALL_SECONDS)
        self._store.close()

    async def _leave(self) -> None:
        tasks = [*self._tasks, *(task for _, task in self._supervisors.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def end_everything(self) -> None:
        """End all trainers, daemons and, if it is ours, Ray. Unfinished jobs go on from their newest durable
        checkpoint when the service is started again."""
        if self._site is not None:
            site = self._site
            self._call(self._leave())
            self._call(site.gangs.sweep([]), 120.0)
            self._call(site.gangs.end_node_daemons(), 120.0)
            site.ray.shutdown()
        self.stop()
        if isinstance(self._head, RayHead):
            self._head.stop()

    def _call(self, coroutine: Any, seconds: float = CALL_SECONDS) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(seconds)


def _complain(task: asyncio.Task[None]) -> None:
    """No owner loop may end unheard."""
    if not task.cancelled() and task.exception() is not None:
        log.error("%s ended: %r", task.get_name(), task.exception(), exc_info=task.exception())
