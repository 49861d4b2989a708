"""The owner of a job that may hold places: there always is one, even if its supervision fails.

A supervisor that fails because of an error in this program, in Ray or of a disk says nothing about the job: its ranks
continue to train, and another supervisor continues from the database. If the database is older than what is running,
running jobs are taken over, neither removed nor killed. Facts decide that, not how the database was restored: no agent
or checkpoint has a generation above its job's unless the database has forgotten it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping

from manta.service.cluster.agent_client import AgentClient
from manta.service.cluster.agents import describe_all
from manta.service.cluster.cluster import Cluster
from manta.service.cluster.errors import needs_traceback
from manta.service.cluster.placement import job_of
from manta.service.job.context import DEFAULT_MEMORY_SECONDS, JobContext
from manta.service.job.inbox import Cancel, JobRequest, NodeDraining, Pause, Resize
from manta.service.job.record import JobRecord
from manta.service.job.report_writer import FirstStep
from manta.service.job.supervisor import Supervisor
from manta.service.leases.decisions import LeaseLost, LeaseUncertain
from manta.service.log_archive.spool import Spool
from manta.service.states import PAUSABLE, SUPERVISED, JobState
from manta.service.store import Store, restored
from manta.service.store.restored import NewerGang
from manta.service.store.tables import Job
from manta.service.stored_specs import SpecNotUnderstood, left_out_sentence, stored_spec
from manta.service.tasks import backoff
from manta.workers.protocol.messages import AgentDescription, ProtocolMismatch

log = logging.getLogger(__name__)
INITIAL_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
# A supervisor that fails after living this long has not failed for the same reason as the last one.
STEADY_SECONDS = 60.0


async def catch_up(record: JobRecord, cluster: Cluster, job: Job) -> bool:
    """Update the database with what is running of `job`, which no control plane owns yet; returns whether it knew less.
    A forgotten job that is not running is paused. Raises ClusterUnavailable, ProtocolMismatch."""
    names = [name for name in await cluster.agents.names() if job_of(name) == job.id]
    agents = dict(zip(names, await cluster.agents.find(names), strict=True)) if names else {}
    living = {number: agent for number, agent in enumerate(agents.values()) if agent is not None}
    if not living:
        if job.state in (*PAUSABLE, JobState.PAUSING) and await record.read(lambda s: restored.unsettled(s, job.id)):
            await cluster.end_job(job.id, keep_snapshots=True)
            await record.write(lambda s: restored.pause(s, job.id))
        return False
    described = await describe_all(living)
    await record.store.exceed(max((about.owner_epoch for about in described.values()), default=0))
    gang = newer_gang(job.generation, {names[number]: about for number, about in described.items()})
    if gang is None:
        return False
    log.warning("%s is at generation %d, and the database knows %d", job.id, gang.generation, job.generation)
    return await record.write(lambda s: restored.take_over(s, job.id, gang))


def newer_gang(known: int, about: Mapping[str, AgentDescription]) -> NewerGang | None:
    """The newest gang among agents with these descriptions, by name; None if its generation is not above `known`. It
    does not contain ranks that do not answer."""
    newest = max((each.generation for each in about.values()), default=0)
    members = {name: each for name, each in about.items() if each.generation == newest and each.rank is not None}
    if newest <= known or not members:
        return None
    tensor, pipeline, data, context, expert = (*next(iter(members.values())).sizes, 1, 1)[:5]
    agents = {
        each.rank: {
            "actor": name,
            "node": each.host,
            "device": f"GPU {each.devices[0]}" if each.devices else "cpu",
            "pid": each.trainer_pid,
        }
        for name, each in members.items()
        if each.rank is not None
    }
    return NewerGang(newest, tensor, pipeline, data, context, expert, agents)


class JobOwner:
    """Keeps job `id` supervised until it is final, paused, or back in the queue."""

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        job_id: str,
        memory_seconds: float = DEFAULT_MEMORY_SECONDS,
        logs: Spool | None = None,
        first_step: FirstStep | None = None,
    ):
        """`memory_seconds`: how long the snapshots of a failed job are kept for a retry; `logs`: takes its output, if
        that is also kept elsewhere; `first_step`: called with the first step of each generation."""
        self._memory_seconds, self._logs, self._first_step = memory_seconds, logs, first_step
        self._store, self._cluster, self.id = store, cluster, job_id
        self._record = JobRecord(store, job_id)
        self._supervisor: Supervisor | None = None
        self._wake = asyncio.Event()
        self._resize_wanted = False
        self._reported = ""

    async def run(self, scheduled_generation: int | None) -> None:
        """Own the job until its end. `scheduled_generation`: the number in the names of its placement groups if they
        were just acquired; None: take over what another control plane left. Raises LeaseLost if another one owns it."""
        pauses = backoff(INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)
        while True:
            began = time.monotonic()
            try:
                if await self._supervise(scheduled_generation):
                    return
            except LeaseLost:
                raise
            except LeaseUncertain as error:
                log.warning("the supervisor of %s is restarted: %s", self.id, error)
            except Exception as error:
                log.error("supervisor of %s: %s", self.id, error, exc_info=needs_traceback(error))
                if time.monotonic() - began > STEADY_SECONDS:
                    pauses = backoff(INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)
                await self._report_failure(error)
            scheduled_generation = None
            await self._pause(next(pauses))

    async def _supervise(self, scheduled_generation: int | None) -> bool:
        """Whether the job is final, paused, or back in the queue."""
        await self._store.until_certain()
        job = await self._record.job()
        if job.state not in SUPERVISED:
            return True
        if scheduled_generation is None:
            try:
                await catch_up(self._record, self._cluster, job)
            except ProtocolMismatch as error:
                return await self._leave_alone(JobState(job.state), str(error))
            job = await self._record.job()
            if job.state not in SUPERVISED:
                return True
        try:
            left_out = stored_spec(job).left_out
            context = JobContext.of(self._store, self._cluster, job, self._memory_seconds, self._logs, self._first_step)
        except SpecNotUnderstood as error:
            return await self._leave_alone(JobState(job.state), str(error))
        if left_out:
            await self._report("keys_left_out", left_out_sentence(left_out))
        self._supervisor = supervisor = Supervisor(context)
        if self._resize_wanted:
            self._resize_wanted = False
            supervisor.tell(Resize())
        try:
            await supervisor.run(scheduled_generation)
            await supervisor.settled()
        except ProtocolMismatch as error:  # agents are asked who they are before anything is changed
            return await self._leave_alone(JobState(job.state), str(error))
        finally:
            self._supervisor = None
        return True

    async def _leave_alone(self, state: JobState, problem: str) -> bool:
        """Another release made the job or its agents, and this one does not understand them: its ranks continue as they
        are, until a release that does takes over. Only its end and a pause are handled; returns whether that happened,
        so that the job needs no owner any more."""
        if state == JobState.PAUSING:  # only its state in memory can be kept
            await self._cluster.end_job(self.id, keep_snapshots=True)
            if await self._record.pause():
                return True
            state = JobState.CANCELLING
        if state == JobState.CANCELLING:
            await self._cluster.end_job(self.id)
            await self._record.end(JobState.CANCELLED, None, None)
            return True
        await self._report("not_understood", f"{problem}; the job is left unchanged")
        return False

    async def _report_failure(self, error: Exception) -> None:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        await self._report("supervision_failed", f"the control plane takes the job up again after an error: {what}")

    async def _report(self, kind: str, message: str) -> None:
        """Say it once, not with every attempt."""
        if message != self._reported:
            self._reported = message
            await self._record.event(kind, message)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()  # set already by a cancel that came before the pause
        self._wake.clear()

    @property
    def agents(self) -> list[AgentClient | None]:
        """By rank, the agents that the job has; none while nobody supervises it."""
        return [] if self._supervisor is None else self._supervisor.agents

    def tell(self, request: JobRequest) -> None:
        """Pass `request` on to the supervisor. If there is none at present, the next one reads in the job's row whether
        it is to end, finds out itself which agents are gone, and is asked later about traces."""
        if isinstance(request, Cancel | Pause):
            self._wake.set()
        if self._supervisor is not None:
            self._supervisor.tell(request)
        elif isinstance(request, Resize | NodeDraining):
            self._resize_wanted = True
