"""A job under a real supervisor, with a real database and a cluster on paper: what a test says happens to it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from manta.service.job.context import JobContext
from manta.service.job.inbox import Cancel, Inbox, Pause, Resize
from manta.service.job.owner import catch_up
from manta.service.job.record import JobRecord
from manta.service.job.supervisor import Supervisor
from manta.service.states import SUPERVISED, JobState
from manta.service.store import (
    Job,
    Store,
    checkpoints,
    events,
    generations,
    jobs,
    pauses_and_retries,
    ranks,
    recoveries,
)
from manta.workers.checkpoint.catalog import Manifest, checkpoint_path, seal
from manta.workers.config import JobSpec
from tests.service.support.fake_cluster import FakeCluster, SimulatedAgent

LAUNCHED = ["STARTING", "generation_started"]
UP = [*LAUNCHED, "RUNNING", "first_step"]
AGAIN = ["generation_started", "ranks_replaced", "RUNNING", "first_step", "recovered"]
"""What a recovery ends with in which some rank keeps its process."""


class _Supervisor(Supervisor):
    """Says when a generation is watched from now on."""

    def _observe(self, running):
        super()._observe(running)
        self._cluster.agents.changed()


class _Inbox(Inbox):
    """Says when the next generation is held back."""

    def __init__(self, agents):
        super().__init__()
        self._agents, self.waits = agents, 0

    async def wait(self, *kinds, seconds=None):
        if Cancel in kinds and seconds is not None:
            self.waits += 1
            self._agents.changed()
        await super().wait(*kinds, seconds=seconds)


class SupervisedJob:
    """One job, from STARTING on."""

    def __init__(self, store: Store, cluster: FakeCluster, job: Job):
        """`job` is QUEUED."""
        self.store, self.cluster, self.id = store, cluster, job.id
        self.spec = JobSpec.model_validate(job.spec)
        self.world_size = self.spec.layout.world_size
        self.facts: dict[str, Any] = {}
        """Fields of its context that a test wants to be different."""

    async def start(self) -> None:
        """Acquire places for the job as the scheduler does, and hand it to a supervisor."""
        generation = self.row.generation + 1
        await self.store.write_async(self._place)
        await self.cluster.groups.acquire(self.id, generation, self.spec.layout, "manta_slot")
        self.supervise(generation)

    async def train(self, *steps: int) -> None:
        """Start the next generation, wait until it is watched, and commit `steps` in it."""
        generation = self.row.generation + 1
        await self.start()
        await self.watched(generation)
        if steps:
            await self.commit(*steps)

    def _place(self, session):
        jobs.transition(session, self.id, JobState.STARTING)
        jobs.set_layout(session, self.id, self.spec.layout)

    def supervise(self, scheduled_generation: int | None) -> None:
        """Hand the job to a supervisor of its own."""
        self.inbox = _Inbox(self.cluster.agents)
        self.supervisor = _Supervisor(
            replace(JobContext.of(self.store, self.cluster, self.row), inbox=self.inbox, **self.facts)
        )
        self.task = asyncio.create_task(self.supervisor.run(scheduled_generation))
        self.task.add_done_callback(lambda task: self.cluster.agents.changed())

    async def catch_up(self) -> bool:
        """Whether the database knew less than what runs, and says so now."""
        return await catch_up(JobRecord(self.store, self.id), self.cluster, self.row)

    async def own(self) -> None:
        """Another control plane takes the job up: it looks at what runs first."""
        await self.catch_up()
        if self.row.state in SUPERVISED:
            self.supervise(None)
        else:
            self.task = asyncio.create_task(asyncio.sleep(0))

    async def die_with_control_plane(self) -> None:
        """The supervisor is no more; agents and rows are all that is left."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    @property
    def ranks(self) -> list[SimulatedAgent]:
        """The agents in order of rank."""
        return self.supervisor._gang.agents

    async def watched(self, generation: int) -> None:
        """Wait until `generation` was launched and is watched. Fails when the supervisor ends before."""
        await self.cluster.agents.until(lambda: self.task.done() or self._generation == generation)
        assert not self.task.done(), self.log

    @property
    def _generation(self) -> int:
        running = self.supervisor._running
        return 0 if running is None else running.generation

    async def waited(self, times: int) -> None:
        """Wait until this supervisor has begun to wait before a next try so often. Fails when it ends before."""
        await self.cluster.agents.until(lambda: self.task.done() or self.inbox.waits >= times)
        assert not self.task.done(), self.log

    async def commit(self, *steps: int) -> None:
        """All ranks commit `steps`, and keep them in shared memory; the row of each is stored."""
        for agent in self.ranks[1:]:
            agent.steps = list(steps)[-2:]
        self.ranks[0].commit(*steps)
        await self.cluster.agents.until(lambda: self.ranks[0].all_handled)

    async def finish(self, *steps: int, generation: int | None = None) -> None:
        """All ranks commit `steps` and then the last step, once `generation` is watched; the supervisor has ended."""
        if generation is not None:
            await self.watched(generation)
        if steps:
            await self.commit(*steps)
        await self.commit(self.spec.train.steps)
        for agent in self.ranks:
            agent.finish(self.spec.train.steps)
        await self.task

    def stop_saving(self) -> None:
        """From now on no trainer saves and ends when it is told to."""
        for agent in self.ranks:
            agent.on_save = lambda agent: None

    def cancel(self) -> None:
        """The user cancels the job."""
        self.store.write(lambda s: jobs.request_cancel(s, self.id))
        self.supervisor.tell(Cancel())

    def pause(self) -> None:
        """The user pauses the job."""
        self.store.write(lambda s: pauses_and_retries.request_pause(s, self.id))
        self.supervisor.tell(Pause())

    async def resume(self) -> None:
        """The user resumes the job, and there are places for it at once."""
        self.store.write(lambda s: pauses_and_retries.request_resume(s, self.id))
        await self.start()

    def resize(self, replicas: int) -> None:
        """The user wants another number of replicas."""
        self.store.write(lambda s: jobs.request_resize(s, self.id, replicas))
        self.supervisor.tell(Resize())

    @property
    def row(self) -> Job:
        """The job as it is stored."""
        return self._read(lambda s: jobs.get(s, self.id))

    @property
    def generations(self) -> list[tuple[str, str, int]]:
        """(Cause, source of the state, its step) of each generation."""
        rows = self._read(lambda s: generations.of_job(s, self.id))
        return [(row.cause, row.resume_source, row.resume_step) for row in rows]

    @property
    def recoveries(self) -> list[tuple[int, str, str, int]]:
        """(Generation, kind, source of the state, step) of each recovery."""
        rows = self._read(lambda s: recoveries.of_job(s, self.id))
        return [(row.generation, row.kind, row.source, row.resume_step) for row in rows]

    @property
    def rank_states(self) -> list[str]:
        """As stored."""
        return [row.state for row in self._read(lambda s: ranks.of_job(s, self.id))]

    @property
    def pids(self) -> list[int | None]:
        """As stored."""
        return [row.pid for row in self._read(lambda s: ranks.of_job(s, self.id))]

    @property
    def events(self) -> list:
        """All events, oldest first."""
        return self._read(lambda s: events.page(s, self.id, limit=1000).items)

    @property
    def log(self) -> list[str]:
        """Types of all events after the submission, oldest first; of a change of state the new one."""
        return [event.data["to"] if event.type == "state_changed" else event.type for event in self.events[1:]]

    def message(self, kind: str) -> str:
        """Of the newest event of this type."""
        return [event.message for event in self.events if event.type == kind][-1]

    def _read(self, query):
        return self.store.query(query)


def save_checkpoint(job: SupervisedJob, step: int, generation: int = 1) -> None:
    """As the ranks do."""
    path = checkpoint_path(job.cluster.paths.checkpoint_folder(job.id), step, generation)
    path.mkdir(parents=True)
    seal(path, Manifest(job.id, generation, step, {}, {}))
    row = job.store.write(lambda s: checkpoints.begin(s, job.id, generation, step, str(path)).id)
    job.store.write(lambda s: checkpoints.complete(s, row, 0))
