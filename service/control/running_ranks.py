"""What the agents of a running job do on request: say which rank waits for which, give the stack of one trainer, take
requests to all ranks. They answer every control plane, whichever one owns the job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from manta.service.cluster.agent_client import AgentClient, AgentError, within
from manta.service.cluster.agents import query
from manta.service.cluster.cluster import Cluster
from manta.service.cluster.sizes import in_use
from manta.service.errors import ErrorKind, ServiceError
from manta.service.recovery.waits import Waits, waits_now
from manta.service.store import Store, jobs, ranks
from manta.service.store.tables import Job, Rank
from manta.service.stored_specs import stored_spec
from manta.service.words import no_such_rank
from manta.workers.comm.grid import RankGrid
from manta.workers.protocol.requests import RankRequest

REQUEST_SECONDS = 2.0
STACK_SECONDS = 5.0
FRESH_SECONDS = 0.5
"""Requests that come this soon after another one get the same answer, so that thousands of agents are asked once for
all viewers."""
_MAX_CACHED = 64


class NoRanks(ServiceError):
    """The job has no ranks that could be asked."""

    kind = ErrorKind("no_ranks", 409, "the job has no running ranks")

    def __init__(self, job: Job):
        super().__init__(f"{job.id} is {job.state} and has no running ranks: ask while it is RUNNING")


class RankNotFound(ServiceError):
    """The job has no such rank."""

    kind = ErrorKind("rank_not_found", 404, "the job has no such rank")

    def __init__(self, job_id: str, rank: int, count: int):
        super().__init__(no_such_rank(job_id, rank, count))


class RankTimeout(ServiceError):
    """The rank's agent, or its trainer, does not answer."""

    kind = ErrorKind("rank_silent", 503, "the rank's agent does not answer, or no trainer runs there")

    def __init__(self, rank: int, why: str):
        super().__init__(f"rank {rank} cannot be asked: {why}; try again in a moment")


@dataclass(frozen=True)
class ObservedWaits:
    """Which rank waits for which, and when that was."""

    at: float
    """Unix seconds."""
    waits: Waits


@dataclass(frozen=True)
class RankStack:
    """Where all threads of a trainer are."""

    rank: int
    pid: int
    at: float
    """Unix seconds."""
    text: str


class RunningRanks:
    """Asks agents. Called on the control plane's own thread."""

    def __init__(self, store: Store, cluster: Cluster):
        self._store, self._cluster = store, cluster
        self._polls: dict[str, tuple[float, asyncio.Task[ObservedWaits]]] = {}

    async def waits(self, job_id: str) -> ObservedWaits:
        """Which rank waits for which in a job. Raises JobNotFound, NoRanks, SpecNotUnderstood, ClusterUnavailable."""
        now = time.monotonic()
        began, poll = self._polls.pop(job_id, (0.0, None))
        if poll is None or (poll.done() and now - began > FRESH_SECONDS):
            began, poll = now, asyncio.create_task(self._poll(job_id), name=f"waits of {job_id}")
        self._polls[job_id] = began, poll
        while len(self._polls) > _MAX_CACHED:
            self._polls.pop(next(iter(self._polls)))
        return await asyncio.shield(poll)  # other callers may wait for it too

    async def _poll(self, job_id: str) -> ObservedWaits:
        job, rows = await asyncio.to_thread(self._ranks, job_id)
        agents = await self._agents(rows)
        layout = in_use(stored_spec(job).spec, job).layout
        if layout.world_size != len(rows):
            raise NoRanks(job)
        living = {rank: agent for rank, agent in enumerate(agents) if agent is not None}
        answers, silent = await query(living, lambda rank, agent: agent.progress(), REQUEST_SECONDS)
        gone = {rank for rank in range(len(rows)) if rank not in living}
        statuses = [answers.get(rank) for rank in range(len(rows))]
        return ObservedWaits(time.time(), waits_now(statuses, frozenset({*silent, *gone}), RankGrid(layout).group))

    async def stack(self, job_id: str, rank: int) -> RankStack:
        """The stacks of a rank's trainer, which it writes itself wherever it is. Raises JobNotFound, NoRanks,
        RankNotFound, RankTimeout, ClusterUnavailable."""
        _, rows = await asyncio.to_thread(self._ranks, job_id)
        if rank >= len(rows):
            raise RankNotFound(job_id, rank, len(rows))
        (agent,) = await self._agents([rows[rank]])
        if agent is None:
            raise RankTimeout(rank, "its agent is gone")
        try:
            status = await within(REQUEST_SECONDS, agent.progress())
            if status is None:
                raise RankTimeout(rank, "no trainer runs there")
            text = await within(STACK_SECONDS, agent.stacks(status.pid))
        except AgentError as error:
            raise RankTimeout(rank, f"its agent does not answer ({error})") from error
        if not text:
            raise RankTimeout(rank, "its trainer has ended")
        return RankStack(rank, status.pid, time.time(), text)

    async def tell(self, job_id: str, request: RankRequest) -> None:
        """Have all ranks of a job take `request`. Raises JobNotFound, NoRanks, RankTimeout, ClusterUnavailable."""
        _, rows = await asyncio.to_thread(self._ranks, job_id)
        agents = {rank: agent for rank, agent in enumerate(await self._agents(rows)) if agent is not None}
        _, unresponsive = await query(agents, lambda rank, agent: agent.tell(request), REQUEST_SECONDS)
        for rank, why in unresponsive.items():
            raise RankTimeout(rank, f"its agent does not answer ({why})")

    def _ranks(self, job_id: str) -> tuple[Job, list[Rank]]:
        """The job, and its ranks in order."""
        with self._store.read() as session:
            job, rows = jobs.get(session, job_id), ranks.of_job(session, job_id)
        if not rows or all(row.pid is None for row in rows):
            raise NoRanks(job)
        return job, rows

    async def _agents(self, rows: Sequence[Rank]) -> list[AgentClient | None]:
        return await self._cluster.agents.find([row.actor or "" for row in rows])
