"""One running job in the database, as its supervisor reads and writes it. The rows are the truth: every event is
written here before the next action, so that another control plane can take over at any point. If the database does not
answer, the supervisor waits: such a failure never ends a job."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy.orm import Session

from manta.service.cluster.placement import insufficient, unit_of
from manta.service.ledger import StateEntry
from manta.service.recovery.decisions import Incident, avoided_nodes, past_failures
from manta.service.states import HELD, JobState, can
from manta.service.store import Store, checkpoints, events, generations, jobs, ranks, recoveries, step_traces
from manta.service.store.database import until_done
from manta.service.store.tables import Checkpoint, Generation, Job
from manta.workers.checkpoint.catalog import Listing
from manta.workers.config import ParallelConfig
from manta.workers.protocol.messages import Resume

T = TypeVar("T")
Outcome = Mapping[str, Any]
"""How a job ends: `state`, `reason`, `message`."""

NODES_TO_BE_LEFT = "nodes_to_be_left"
"""The reason code of a job that waits, or is about to wait, because its nodes are being drained and there is no room
elsewhere."""


class JobRecord:
    """The rows of job `id`."""

    def __init__(self, store: Store, job_id: str):
        self.store, self.id = store, job_id
        self.has_begun = False
        """Whether a generation was begun here, so that the database cannot be older than the folder of checkpoints."""

    async def job(self) -> Job:
        """The job's own row."""
        return await self.read(lambda s: jobs.get(s, self.id))

    async def generations(self) -> list[Generation]:
        """All of them, in order."""
        return await self.read(lambda s: generations.of_job(s, self.id))

    async def state_changes(self) -> list[StateEntry]:
        """The job's changes of state, oldest first."""
        return await self.read(lambda s: [StateEntry(row.time, row.state) for row in jobs.states_over_time(s, self.id)])

    async def avoided_nodes(self) -> set[str]:
        """Nodes whose hardware keeps failing the job."""
        return avoided_nodes(past_failures(await self.generations()), time.time())

    async def current_generation(self) -> Generation | None:
        """The newest generation; None before the first."""
        number = (await self.job()).generation
        return next((row for row in await self.generations() if row.generation == number), None)

    async def outcome(self) -> Outcome | None:
        """How the current generation ended the job, if another control plane recorded that but could not finish."""
        current = await self.current_generation()
        return (current.data or {}).get("outcome") if current is not None else None

    async def data_of(self, kind: str) -> list[dict[str, Any]]:
        """Data of the job's events of this kind, oldest first."""
        return await self.read(lambda s: events.data_of(s, self.id, kind))

    async def event(
        self,
        kind: str,
        message: str,
        rank: int | None = None,
        step: int | None = None,
        data: Any = None,
    ) -> None:
        """Append an event."""
        await self.write(lambda s: events.append(s, self.id, kind, message, rank=rank, step=step, data=data))

    async def record_state(self, state: JobState) -> None:
        """Record that the job is in `state`, unless that is impossible from its present one."""

        def note(session: Session) -> None:
            if can(JobState(jobs.get(session, self.id, lock=True).state), state):
                jobs.transition(session, self.id, state)

        await self.write(note)

    async def begin(
        self,
        cause: str,
        counts: bool,
        resume: Resume,
        source: str,
        layout: ParallelConfig,
        incident: Incident | None,
        expected: Sequence[dict[str, Any]],
    ) -> int:
        """Begin the next generation in `layout`; returns its number. `counts`: whether it is a restart; `source`: of
        its state, for the record of the recovery from `incident`; `expected`: its ranks, with whose agents another
        control plane would find the gang if this one died."""
        words = {
            "start": "starts at step 1",
            "snapshot": f"continues after step {resume.step} from shared memory",
            "memory": f"continues after step {resume.step} from the shared memory of another layout",
            "checkpoint": f"continues after step {resume.step} from {resume.path}",
        }
        failure = None if incident is None else incident.failure.to_json()
        data = {"failure": failure, "resume_path": resume.path}
        data_of_event = {"resume_source": resume.source, "resume_step": resume.step}

        def begin(session: Session) -> int:
            reached = jobs.get(session, self.id).step
            step_traces.interrupt(session, self.id, cause)
            number = generations.begin(session, self.id, cause, counts, resume.source, resume.step, data)
            jobs.set_layout(session, self.id, layout)
            jobs.set_hold_reason(session, self.id, None)
            if {row.actor for row in ranks.of_job(session, self.id)} != {row["actor"] for row in expected}:
                ranks.replace(session, self.id, expected)
            if incident is not None:
                recoveries.begin(
                    session,
                    self.id,
                    number,
                    incident.timeline,
                    kind=incident.culprit.kind,
                    rank=incident.culprit.rank,
                    cause=incident.culprit.sentence,
                    node=incident.failure.node,
                    source=source,
                    resume_step=resume.step,
                    wait_seconds=incident.wait_seconds,
                )
            message = f"generation {number} {words[resume.source]}: {cause}"
            about = {"generation": number, "step": resume.step}
            events.append(session, self.id, "generation_started", message, data=data_of_event, **about)
            if resume.source == "start" and reached:
                lost = f"the state of all {reached} committed steps is lost: training starts again at step 1"
                events.append(session, self.id, "state_lost", lost, data={"steps": reached}, **about)
            return number

        number = await self.write(begin)
        self.has_begun = True
        return number

    async def launched(self, generation: int, at: float, rows: list[dict[str, Any]], kept: Sequence[int]) -> None:
        """Record the ranks of a generation that was launched `at` Unix seconds; those in `kept` kept their process."""
        forked = [row["rank"] for row in rows if row["rank"] not in set(kept)]

        def note(session: Session) -> None:
            ranks.replace(session, self.id, rows)
            recoveries.record_latest(session, self.id, generation, launched_at=at)
            recoveries.record_replaced(session, self.id, generation, forked, len(kept))
            if kept:
                message = f"generation {generation} keeps the processes of {len(kept)} of {len(rows)} ranks"
                data = {"kept": list(kept), "started": forked}
                events.append(session, self.id, "ranks_replaced", message, generation=generation, data=data)

        await self.write(note)

    async def reconcile_checkpoints(self, listing: Listing) -> list[Checkpoint]:
        """Update the rows to match the folder as far as known; returns `saved_checkpoints`."""
        await self.write(lambda s: checkpoints.reconcile(s, self.id, listing))
        return await self.saved_checkpoints()

    async def saved_checkpoints(self) -> list[Checkpoint]:
        """Checkpoints that are complete, or may be, as reported; in order of creation."""
        return await self.read(lambda s: checkpoints.saved_or_saving(s, self.id))

    async def unfinished_saves(self) -> list[tuple[str, float]]:
        """Identifies each save that has begun and whose end was not reported."""
        return await self.read(lambda s: checkpoints.under_way(s, self.id))

    async def record_end(self, lost: Sequence[int] | None = None) -> None:
        """Record that these ranks (None: all) have no process any more, though they did not report it."""
        await self.write(lambda s: ranks.end_all(s, self.id) if lost is None else ranks.end(s, self.id, lost))

    async def record_hold(self, why: str) -> None:
        """Record why the next generation is not begun; in an event, once until a step is committed."""

        def note(session: Session) -> None:
            job = jobs.set_hold_reason(session, self.id, why)
            if not events.has_event_since(session, self.id, HELD, why, since="first_step"):
                events.append(session, self.id, HELD, why, step=job.step)

        await self.write(note)

    async def record_outcome(self, state: JobState, reason: str | None, message: str | None) -> None:
        """Record how the job is about to end."""
        outcome = {"state": state.value, "reason": reason, "message": message}

        def note(session: Session) -> None:
            generations.end(session, self.id, jobs.get(session, self.id, lock=True).generation, outcome=outcome)

        await self.write(note)

    async def end(
        self, state: JobState, reason: str | None, message: str | None, memory_kept_until: float | None = None
    ) -> None:
        """The job is final; a cancelled one is always CANCELLED. `memory_kept_until`: Unix seconds, if its snapshots
        still exist."""

        def end(session: Session) -> None:
            job = jobs.get(session, self.id, lock=True)
            ranks.end_all(session, self.id)
            if state != JobState.CANCELLED and job.state == JobState.CANCELLING:
                jobs.transition(session, self.id, JobState.CANCELLED)
                job.memory_kept_until = None if memory_kept_until is None else time.time()
                return
            jobs.transition(session, self.id, state, reason=reason, message=message)
            job.memory_kept_until = memory_kept_until
            if memory_kept_until is not None:
                until = datetime.fromtimestamp(memory_kept_until, UTC).strftime("%Y-%m-%d %H:%M UTC")
                kept = f"its snapshots stay in memory until {until}; manta retry continues from there"
                events.append(session, self.id, "memory_kept", kept, data={"until": memory_kept_until})

        await self.write(end)

    async def pause(self) -> bool:
        """The job, which no longer holds places, is PAUSED; False if it was cancelled meanwhile."""

        def pause(session: Session) -> bool:
            job = jobs.get(session, self.id, lock=True)
            ranks.end_all(session, self.id)
            return job.state != JobState.CANCELLING and _pause(session, job)

        return await self.write(pause)

    async def record_no_room(self, why: str) -> None:
        """Record that the job is about to save its state and to wait in the queue, for the reason `why`; also for the
        next control plane."""

        def note(session: Session) -> None:
            if can(JobState(jobs.get(session, self.id, lock=True).state), JobState.RESIZING):
                jobs.transition(session, self.id, JobState.RESIZING, NODES_TO_BE_LEFT, why)

        await self.write(note)

    async def wait_in_queue(self, why: str) -> bool:
        """The job, which has saved its state and no longer holds places, waits in the queue, or is PAUSED if its user
        wants that. False if it was cancelled meanwhile."""

        def queue(session: Session) -> bool:
            job = jobs.get(session, self.id, lock=True)
            ranks.end_all(session, self.id)
            if job.state == JobState.CANCELLING:
                return False
            if job.state == JobState.PAUSING:
                return _pause(session, job)
            if job.state == JobState.RUNNING:  # it has gone through another generation since it was to leave
                jobs.transition(session, self.id, JobState.RESIZING, NODES_TO_BE_LEFT, why)
            jobs.transition(session, self.id, JobState.QUEUED, NODES_TO_BE_LEFT, why)
            return True

        return await self.write(queue)

    async def back_to_queue(self, message: str) -> bool:
        """The job has no places, as `message` says: it waits for some, or is PAUSED if its user wants that. False if it
        was cancelled meanwhile."""

        def queue(session: Session) -> bool:
            job = jobs.get(session, self.id, lock=True)
            ranks.end_all(session, self.id)
            if job.state == JobState.CANCELLING:
                return False
            pauses = job.state == JobState.PAUSING
            target, reason = (JobState.PAUSED, job.reason) if pauses else (JobState.QUEUED, _lacks(job))
            jobs.transition(session, self.id, target, reason=reason, message=message)
            return True

        return await self.write(queue)

    async def read(self, query: Callable[[Session], T]) -> T:
        """The result of `query` with a session."""
        return await until_done(lambda: self.store.read_async(query))

    async def write(self, operation: Callable[[Session], T]) -> T:
        """Run `operation` with a session that is then committed."""
        return await until_done(lambda: self.store.write_async(operation))


def _lacks(job: Job) -> str:
    """Why a job that had places before waits for places again, as a code."""
    # `auto` was resolved then, and does not change with the cluster.
    return insufficient(unit_of(jobs.accelerator_of(job), cluster_has_gpus=False))


def _pause(session: Session, job: Job) -> bool:
    message = f"paused by the user at step {job.step}; manta resume {job.id} continues it"
    jobs.transition(session, job.id, JobState.PAUSED, "paused_by_user", message)
    return True
