"""One running job: its supervisor takes it from STARTING to its end, through as many generations as it needs.

The database is the truth. Whatever the supervisor does is written there first, so that another one can take over at
any point (`adopt`); the gang itself never notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from service.cluster.gangs import NotPlaced
from service.cluster.placement import avoidable
from service.cluster.sizes import fitting, in_use, room_for, shapes_of, sizes_of
from service.faults import FaultNotPossible, refuse_impossible
from service.job.crew import Crew, Joiners
from service.job.elasticity import Change, Rearranger
from service.job.generation import Gang
from service.job.incident import Incident
from service.job.launch import Launcher, LaunchFailed
from service.job.record import JobRecord
from service.job.site import Site
from service.recovery.budgets import Fault as MachineFault
from service.recovery.budgets import avoided_nodes, faults_of
from service.recovery.decisions import Death, GiveUp, decide, fault_of
from service.recovery.timeline import RecoveryTimeline
from service.states import JobState, is_final
from service.store import ranks
from service.store.tables import Job
from workers.checkpoint.catalog import whole_checkpoints
from workers.config import JobSpec
from workers.paths import Paths
from workers.rank.faults import BETWEEN_STEPS, Fault

log = logging.getLogger(__name__)

# A trainer that takes longer to come to rest after the loss of a peer is killed, and its rank forked anew.
REST_SECONDS = 5.0
# How long the step under way may take before a change of size or place breaks it off.
PATIENCE_SECONDS = 20.0
# An agent that takes longer to arm a fault is taken for dead.
INJECT_SECONDS = 10.0


@dataclass(frozen=True)
class Launching:
    """A generation that is to be begun."""

    cause: str
    """In words."""
    counts: bool
    """As a restart."""
    incident: Incident | None = None
    """What made it necessary."""


class Supervisor:
    """Owns one job. `run` returns when the job is final, or back in the queue."""

    def __init__(self, site: Site, job: Job):
        self.site, self.job_id = site, job.id
        self.submitted = JobSpec.model_validate(job.spec)
        self.cancelled = asyncio.Event()
        self._record = JobRecord(site.store, job.id)
        self._crew = Crew(site.gangs, job.id, in_use(self.submitted, job))
        self._launcher = Launcher(site, self._record, self._crew, self.submitted)
        self._to_change = asyncio.Event()
        self._rearranger = Rearranger(
            site, self._record, self._crew, self._launcher, self.submitted, self._to_change, self.cancelled
        )
        self._gang: Gang | None = None
        """Of the newest generation."""
        self._chores: set[asyncio.Task[None]] = set()
        self._leavers: list[Joiners] = []
        """Not of the crew any more; their nodes may hold the state that the next generation needs."""
        self._failed_launches: list[MachineFault] = []
        """Since the last one that did not fail: they have no rows."""

    def cancel(self) -> None:
        """The job is CANCELLING: stop it."""
        self.cancelled.set()

    async def inject(self, fault: Fault) -> None:
        """Have the agent of the fault's rank make it. Raises FaultNotPossible."""
        agents = list(self._crew.agents)
        refuse_impossible(fault, len(agents), (await self._record.job()).step, self.submitted.train.steps)
        if agents[fault.rank] is None:
            raise FaultNotPossible(f"rank {fault.rank} is being replaced; try again")
        step = None if fault.phase in BETWEEN_STEPS else fault.at_step
        await self._record.event("fault_injected", fault.sentence, rank=fault.rank, step=step, data=fault.to_json())
        try:
            async with asyncio.timeout(INJECT_SECONDS):
                await agents[fault.rank].arm.remote(fault.to_json())
        except (self.site.ray.exceptions.RayError, TimeoutError) as error:
            raise FaultNotPossible(f"the agent of rank {fault.rank} does not answer; try again") from error

    def node_lost(self, node: str, why: str) -> None:
        """A node is lost, and with it all agents there."""
        lost = self._crew.on([node])
        if not lost:
            return
        told = f"node {node[:12]} is lost ({why}), and with it {len(lost)} of {len(self._crew.agents)} ranks"
        self._in_background(self._record.event("node_lost", told, data={"node": node, "ranks": lost}))
        if self._gang is not None:
            for rank in lost:
                self._gang.lose(rank, f"was on node {node[:12]}, which is lost")

    def node_draining(self, node: str, seconds: float) -> None:
        """A node is to be left within `seconds`."""
        there = self._crew.on([node])
        if there:
            told = f"node {node[:12]} is to be left within {seconds:g} s; {len(there)} ranks are there"
            data = {"node": node, "ranks": there, "seconds": seconds}
            self._in_background(self._record.event("node_draining", told, data=data))
            self._rearranger.ask_again()

    def resize(self) -> None:
        """The job may run with another number of replicas than it does: see whether it can."""
        self._to_change.set()

    async def run(self, placed_generation: int | None) -> None:
        """Take the job to its end. `placed_generation`: the number its placement groups carry when they were just
        acquired; None: take over what another control plane left."""
        gang: Gang | None = None
        try:
            outcome = await self._record.outcome()
            if outcome is not None:
                await self._end(JobState(outcome["state"]), outcome["reason"], outcome["message"])
                return
            job = await self._record.job()
            if job.state == JobState.CANCELLING:
                self.cancelled.set()
            elif placed_generation is not None:
                gang = await self._launch_placed(placed_generation)
            else:
                gang = await self._adopt(job)
            while gang is not None and not self.cancelled.is_set():
                gang = await self._through(gang)
            if self.cancelled.is_set() and not is_final((await self._record.job()).state):
                await self._finish_cancel(gang)
        except NotPlaced as error:
            if self.cancelled.is_set():
                await self._finish_cancel(None)
            else:
                await self._record.back_to_queue(str(error))
        finally:
            self._send_leavers_away()
            if gang is not None:
                await gang.close()

    async def _through(self, gang: Gang) -> Gang | None:
        """Live through one generation; the next gang, or None when the job is over."""
        await gang.wait(self.cancelled, self._to_change)
        if self.cancelled.is_set():
            return gang
        if not gang.broken:
            if not gang.all_ended:
                change = await self._rearranger.plan(gang)
                return gang if change is None else await self._change(gang, change)
            await self._end(JobState.SUCCEEDED)
            return None
        timeline = RecoveryTimeline(noticed_at=time.time())
        await gang.wait_for_culprit()
        await asyncio.gather(self._record.say(JobState.RECOVERING), gang.rest(REST_SECONDS))
        return await self._after_deaths(gang, timeline)

    async def _after_deaths(self, gang: Gang, timeline: RecoveryTimeline) -> Gang | None:
        """What follows when a generation has ended by deaths, and all that live are at rest."""
        timeline.rested_at, timeline.failed_at = time.time(), gang.culprit.at
        self._crew.memory = dict(gang.resting)
        agents_lost = [death.rank for death in gang.deaths if death.kind == "agent_lost"]
        return await self._recover(gang.culprit, agents_lost, timeline)

    async def _recover(
        self, culprit: Death, agents_lost: list[int], timeline: RecoveryTimeline, launching: Launching | None = None
    ) -> Gang | None:
        """The next generation after `culprit`'s death, with new agents for the ranks whose own were lost; None when
        the job is given up. `launching`: the launch that failed by it, before its generation had begun."""
        await self._record.say(JobState.RECOVERING)  # again: a last report may have told of the first step
        job = await self._record.job()
        lives = await self._record.generations()
        progressed = bool(lives) and lives[-1].first_step_at is not None and launching is None
        fault = fault_of(culprit, time.time(), job.step, progressed, self._crew.nodes.get(culprit.rank))
        data = {**fault.to_json(), "traceback": culprit.traceback}
        await self._record.event("rank_lost", culprit.sentence, rank=culprit.rank, step=culprit.step, data=data)
        policy, history = self.submitted.recovery, [*faults_of(lives), *self._failed_launches]
        if launching is not None and launching.incident is not None:
            known = launching.incident.fault  # it has no row either
            history += [] if known in history else [known]
        decision = decide(culprit, fault, history, policy.max_restarts, policy.restart_window_seconds)
        if launching is not None:
            self._failed_launches.append(fault)
            if len(self._failed_launches) > policy.max_restarts:  # however long ago the first of them was
                message = f"could not be launched {len(self._failed_launches)} times in a row; last: {culprit.sentence}"
                decision = GiveUp("restarts_exhausted", message)
        if isinstance(decision, GiveUp):
            await self._end(JobState.FAILED, decision.reason, decision.message)
            return None
        if decision.wait_seconds:
            await self._hold_back(decision.wait_seconds, culprit)
        if self.cancelled.is_set():
            return None
        incident = Incident(culprit, fault, timeline, decision.wait_seconds)
        if launching is None:
            launching = Launching(decision.cause, True, incident)
        elif launching.incident is None and lives:  # it was for a change
            launching = Launching(f"{launching.cause}, and {decision.cause}", True, incident)
        if agents_lost and not await self._make_whole(job, agents_lost, [*history, fault]):
            return await self._replace(job, launching)
        return await self._launch(launching)

    async def _hold_back(self, seconds: float, culprit: Death) -> None:
        """Wait before the next generation, or until the job is cancelled."""
        message = f"waits {seconds:g} s before the next try: no step was committed since the last failure of this kind"
        data = {"seconds": seconds, "kind": culprit.kind}
        await self._record.event("held_back", message, rank=culprit.rank, data=data)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.cancelled.wait()

    async def _launch_placed(self, placed_generation: int) -> Gang | None:
        job = await self._record.job()
        again = job.generation > 0
        if again:
            self._leavers.append(await self._crew.keepers())
        await self._crew.start(placed_generation, in_use(self.submitted, job))
        return await self._launch(Launching("placed again" if again else "submitted", counts=again))

    async def _replace(self, job: Job, launching: Launching) -> Gang | None:
        """Give up the placement, keep the snapshots, and place the whole gang anew, away from nodes that keep
        failing."""
        crew, incident = self._crew, launching.incident
        faults = await self._faults()
        if incident is not None and incident.fault not in faults:
            faults.append(incident.fault)
        kept = await crew.release()  # on all nodes that it has been on, so that no others are needed
        self._send_leavers_away()
        self._leavers.append(kept)
        wanted = job.wanted_replicas or self.submitted.layout.data
        # With too little room for any layout, wait for the one that it has.
        spec = fitting(shapes_of(self.submitted), wanted, await crew.capacity()) or crew.spec
        await crew.place(job.generation + 1, spec, avoided_nodes(faults, time.time()))
        return await self._launch(launching)

    async def _faults(self) -> list[MachineFault]:
        return [*faults_of(await self._record.generations()), *self._failed_launches]

    async def _make_whole(self, job: Job, lost: list[int], faults: list[MachineFault]) -> bool:
        """Find agents for the ranks `lost`: in their own places, else by placing their replicas elsewhere, else by
        going on without those replicas, where `elastic` allows it. False when the job must be placed anew. `faults`:
        all that the job has survived, and this one."""
        crew, generation = self._crew, job.generation + 1
        if len(lost) == len(crew.agents):
            return False
        avoid = avoidable(crew.layout, await crew.capacity(), avoided_nodes(faults, time.time()))
        if avoid.isdisjoint(crew.nodes.get(rank) for rank in lost) and await crew.replace(generation, lost):
            return True
        replicas = crew.replicas_of(lost)
        staying = [replica for replica in range(crew.layout.data) if replica not in replicas]
        self._leavers.append(await crew.keepers_of(replicas))
        await crew.give_up(replicas)
        has_room = room_for(crew.layout, await crew.capacity()) >= len(replicas)
        if has_room and await crew.place_replicas(generation, replicas, avoid):
            return True
        if len(staying) not in sizes_of(self.submitted):
            return False
        crew.shrink(staying)
        message = f"goes on with {len(staying)} replicas: there is no room for more"
        await self._record.event("shrunk", message)
        return True

    async def _change(self, gang: Gang, change: Change) -> Gang | None:
        """Bring all trainers to rest after the step under way, make the change, and launch the next generation. When
        something happens before that, it is not made, and that is dealt with."""
        await self._record.say(JobState.RESIZING)
        noticed = time.time()
        await gang.rest(REST_SECONDS, PATIENCE_SECONDS)
        # Who took too long to rest was killed, and its rank goes on from its snapshot.
        failed = any(death.kind != "stopped" for death in gang.deaths)
        if failed or gang.all_ended or self.cancelled.is_set():
            if change.joiners is not None:
                await self._crew.send_away(change.joiners)
            if gang.deaths and not self.cancelled.is_set():
                return await self._after_deaths(gang, RecoveryTimeline(noticed))
            return gang
        left = await change.arrange()
        if left is not None:
            self._leavers.append(left)
        return await self._launch(Launching(change.cause, counts=False))

    async def _adopt(self, job: Job) -> Gang | None:
        """Find the gang by the names of its agents and go on from wherever the control plane before this one was. Its
        trainers are kept: those that train are watched, those at rest go on in the next generation."""
        rows = await self._record.read(lambda s: ranks.of_job(s, self.job_id))
        after = {row.rank: job.report_cursor.get(str(row.rank), 0) for row in rows}
        about = await self._crew.adopt([row.actor or "" for row in rows], after)
        if about is None:
            if job.state == JobState.RUNNING:
                await self._record.say(JobState.RECOVERING)
            lost_too = " and its agents were lost" if rows else ""
            return await self._replace(
                job, Launching(f"the control plane was restarted{lost_too}", counts=job.generation > 0)
            )
        lost = [rank for rank in range(len(rows)) if rank not in about]
        if any(state["generation"] != job.generation for state in about.values()):
            if lost:
                death = Death(lost[0], "agent_lost", message="lost its agent while the control plane was away")
                return await self._recover(death, lost, RecoveryTimeline(time.time()))
            return await self._launch(Launching("the control plane was restarted during a launch", counts=True))
        current = await self._record.current_generation()
        resume_step = current.resume_step if current is not None else 0
        gang = self._gang = self._watched(self._launcher.watch(job.generation, resume_step, taken_over=True))
        for rank in lost:
            gang.lose(rank, "has an agent that does not answer")
        if job.state == JobState.RESIZING:  # all have been told to rest, or not yet: what was to change is seen again
            self._to_change.set()

            async def stay() -> None:
                self._crew.memory = dict(gang.resting)

            return await self._change(gang, Change("the control plane was restarted during a change of size", stay))
        if not lost:
            await self._record.event("adopted", "the control plane was restarted; the job never noticed")
        return gang

    async def _launch(self, launching: Launching) -> Gang | None:
        """Start the next generation on the agents at hand."""
        leavers = [agent for people in self._leavers for agent in people.agents]
        try:
            gang = await self._launcher.launch(launching.cause, launching.counts, launching.incident, leavers)
        except (self.site.ray.exceptions.RayError, LaunchFailed, TimeoutError) as error:
            log.warning("launch of %s failed: %s", self.job_id, error)
            death, lost = await self._launch_failure(error)
            return await self._recover(death, lost, RecoveryTimeline(time.time()), launching)
        self._failed_launches = []
        self._send_leavers_away()
        self._gang = self._watched(gang)
        return gang

    def _send_leavers_away(self) -> None:
        for people in self._leavers:
            self._in_background(self._crew.send_away(people))
        self._leavers = []

    async def _launch_failure(self, error: Exception) -> tuple[Death, list[int]]:
        """The death that a launch failed by, and the ranks whose agents are lost: all, where none can be blamed."""
        crew, everybody = self._crew, list(range(len(self._crew.agents)))
        if isinstance(error, LaunchFailed):
            silent = list(error.silent)
        else:
            answering = await self.site.gangs.describe_each(dict(enumerate(crew.agents)))
            silent = [rank for rank in everybody if rank not in answering]
        lost = sorted({*silent, *crew.on(self.site.gangs.lost)}) or everybody
        first_line = (str(error).strip() or type(error).__name__).splitlines()[-1]
        return Death(lost[0], "agent_lost", message=f"could not be launched ({first_line})"), lost

    def _watched(self, gang: Gang) -> Gang:
        gang.beside(self._rearranger.look_for_room())
        return gang

    async def _finish_cancel(self, gang: Gang | None) -> None:
        if gang is not None:
            await gang.stop()
        await self._end(JobState.CANCELLED)

    async def _end(self, state: JobState, reason: str | None = None, message: str | None = None) -> None:
        """Release everything, then say so: a final job holds nothing. What it ended with is noted before that, since
        nobody could tell any more once the snapshots are gone."""
        await self._record.note_outcome(state, reason, message)
        await self.site.gangs.end_job(self.job_id)
        folder = Paths.of(self.site.home).checkpoint_folder(self.job_id)
        await self._record.reconcile_checkpoints(await asyncio.to_thread(whole_checkpoints, folder))
        await self._record.end(state, reason, message)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
        task.add_done_callback(_complain)


def _complain(task: asyncio.Task[None]) -> None:
    """What is done beside a job's life may fail, but not unheard."""
    if not task.cancelled() and task.exception() is not None:
        log.error("beside a job: %r", task.exception(), exc_info=task.exception())
