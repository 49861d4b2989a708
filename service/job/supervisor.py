"""One running job: its supervisor takes it from STARTING to its end, through as many generations as it needs.

It is a loop over actions (`actions.py`): each is carried out, and answers the next. The database is the truth. Whatever
the supervisor does is written there first, so that another one can take over at any point (`_adopt`); the gang itself
never notices.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any

from manta.service.cluster.agent_client import AgentClient, AgentError
from manta.service.cluster.agents import describe_all
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.cluster.placement_groups import NotPlaced
from manta.service.cluster.sizes import in_use
from manta.service.job.actions import (
    Action,
    End,
    Launch,
    Leave,
    Reacquire,
    Rearrange,
    Recover,
    Requeue,
    Watch,
    launch_after,
    while_leaving,
)
from manta.service.job.changes import Stay, carry_out, place_gang, replace_lost, standby_of
from manta.service.job.context import JobContext
from manta.service.job.generation import RunningGeneration, time_to_rest
from manta.service.job.inbox import (
    LEAVE,
    Cancel,
    JobRequest,
    NodeDraining,
    NodeLost,
    Overdue,
    Pause,
    Resize,
    WaitInQueue,
)
from manta.service.job.launch import LaunchFailed, finish_launch, launch_generation, watch_generation
from manta.service.job.leave import leave, request_save, watch_deadline
from manta.service.job.planning import plan_generation
from manta.service.job.record import NODES_TO_BE_LEFT
from manta.service.job.resize_and_drain import ElasticityPlanner
from manta.service.job.resume import known_checkpoints
from manta.service.recovery.decisions import UNREADABLE, Death, GiveUp, Incident, decide, failure_of
from manta.service.recovery.durable_state import CheckpointsUnreadable, hold_seconds, hold_sentence
from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.states import JobState, is_final
from manta.service.store import ranks
from manta.service.store.pauses_and_retries import RESUMED
from manta.service.store.tables import Job
from manta.service.tasks import BackgroundTasks, log_failure
from manta.workers.errors import failure_kind
from manta.workers.protocol.messages import AgentDescription

log = logging.getLogger(__name__)

# Seconds that the present step may take before a change of size or place aborts it.
STEP_GRACE_SECONDS = 20.0


class Supervisor:
    """Owns one job. `run` returns when the job is final, paused, or back in the queue."""

    def __init__(self, job: JobContext):
        self._job = job
        self._cluster, self._record, self._gang = job.cluster, job.record, job.gang
        self._inbox, self._history = job.inbox, job.history
        self._planner = ElasticityPlanner(self._job)
        self._running: RunningGeneration | None = None
        """The generation that is being watched."""
        self._unlaunched = False
        """Whether the job has got places and nothing was launched there yet."""
        self._save_requested_from: RunningGeneration | None = None
        self._background_tasks = BackgroundTasks()

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self._job.id

    @property
    def agents(self) -> list[AgentClient | None]:
        """By rank; None: lost, and not replaced yet."""
        return list(self._gang.agents)

    def tell(self, request: JobRequest) -> None:
        """Act on `request` now, or as soon as the present action allows it."""
        match request:
            case NodeLost(node, why):
                self._lose_node(node, why)
            case NodeDraining():
                self._leave_node(request)
            case _:
                self._inbox.put(request)

    def _lose_node(self, node: str, why: str) -> None:
        lost = self._gang.on([node])
        if not lost:
            return
        message = f"node {node[:12]} was lost ({why}), and with it {len(lost)} of {len(self._gang.agents)} ranks"
        self._in_background(self._record.event("node_lost", message, data={"node": node, "ranks": lost}))
        if self._running is not None:
            for rank in lost:
                self._running.lose(rank, f"was on node {node[:12]}, which is lost")

    def _leave_node(self, draining: NodeDraining) -> None:
        node, seconds, reason = draining.node, draining.seconds, draining.reason
        there = self._gang.on([node])
        if there:
            why = f" ({reason})" if reason else ""
            soon = "" if seconds is None else f" within {seconds:.0f} s"
            message = f"node {node[:12]} is being drained{soon}{why}; it runs {len(there)} ranks of the job"
            data = {"node": node, "ranks": there, "seconds": seconds, **({"reason": reason} if reason else {})}
            self._in_background(self._record.event("node_draining", message, data=data))
            self._planner.reconsider()

    async def run(self, scheduled_generation: int | None) -> None:
        """Supervise the job until its end. `scheduled_generation`: the number in the names of its placement groups if
        they were just acquired; None: take over what another control plane left."""
        timekeeper = asyncio.create_task(watch_deadline(self._job), name=f"time of {self._job.id}")
        timekeeper.add_done_callback(log_failure)
        try:
            action: Action | None = await self._first(scheduled_generation)
            while action is not None:
                if self._inbox.has(Cancel) and isinstance(action, Watch | Launch | Reacquire | Leave):
                    action = End(JobState.CANCELLED)
                elif self._inbox.has(*LEAVE):
                    no_room = bool(self._inbox.no_room)
                    action = while_leaving(action, self._unlaunched, self._inbox.has(Overdue), no_room)
                if not isinstance(action, Watch):
                    await self._record.store.until_certain()
                try:
                    action = await self._perform(action)
                except NotPlaced as error:
                    action = Requeue(str(error))
        finally:
            timekeeper.cancel()
            self._dismiss_departing()
            if self._running is not None:
                await self._running.close()

    async def settled(self) -> None:
        """Return when all background work for the job is done."""
        await self._background_tasks.settled()

    async def _first(self, scheduled_generation: int | None) -> Action:
        job, outcome = await self._record.job(), await self._record.outcome()
        if outcome is not None and is_final(outcome["state"]):  # another control plane could not finish
            return End(JobState(outcome["state"]), outcome["reason"], outcome["message"])
        if job.state == JobState.CANCELLING:
            self._inbox.put(Cancel())
            return End(JobState.CANCELLED)
        self._unlaunched = scheduled_generation is not None or job.generation == 0
        if job.state == JobState.PAUSING:
            self._inbox.put(Pause())
            if outcome is not None or self._unlaunched:
                return Leave()
        if job.state == JobState.RESIZING and job.reason == NODES_TO_BE_LEFT:
            self._inbox.put(WaitInQueue(job.message or ""))
        elif outcome is not None and outcome["state"] == JobState.QUEUED and job.state != JobState.STARTING:
            self._inbox.put(WaitInQueue(outcome["message"]))
        if outcome is not None and self._inbox.no_room:
            return Leave()
        return await (self._adopt(job) if scheduled_generation is None else self._start(job, scheduled_generation))

    async def _perform(self, action: Action) -> Action | None:
        """Carry out one action; returns the next, or None when the job has no owner any more."""
        match action:
            case Watch():
                return await self._watch()
            case Launch():
                return await self._launch(action)
            case Recover():
                return await self._recover(action)
            case Reacquire(launch):
                return await self._reacquire(launch)
            case Rearrange():
                return await self._rearrange(action)
            case Requeue(message):
                return None if await self._record.back_to_queue(message) else End(JobState.CANCELLED)
            case Leave():
                return await self._leave()
            case End():
                await self._end(action)
        return None

    async def _start(self, job: Job, scheduled_generation: int) -> Launch:
        """Start the agents in the places that were acquired for the job."""
        again = job.generation > 0
        if again:
            self._gang.departing.append(await self._gang.snapshot_holders())
        await self._gang.start(scheduled_generation, in_use(self._job.submitted, job))
        lives = await self._record.generations()
        if lives and lives[-1].started_at <= self._history.retried_at:
            return Launch("retried by the user", counts=False)
        if lives and (lives[-1].data or {}).get(RESUMED):
            return Launch("resumed by the user", counts=False)
        if ((await self._record.outcome()) or {}).get("state") == JobState.QUEUED:
            return Launch("placed on other nodes: its nodes were being drained", counts=False)
        return Launch("placed again" if again else "submitted", counts=again)

    async def _adopt(self, job: Job) -> Action:
        """Find the gang by the names of its agents and continue where the last control plane stopped. Its trainers are
        kept: those that train are watched, those at rest continue in the next generation."""
        rows = await self._record.read(lambda s: ranks.of_job(s, job.id))
        after = {row.rank: job.report_cursor.get(str(row.rank), 0) for row in rows}
        if self._job.logs is not None:  # agents still have the lines that are not kept yet; all else is known again
            after = {}
        about = await self._gang.adopt([row.actor or "" for row in rows], after)
        if about is None:
            if job.state == JobState.RUNNING:
                await self._record.record_state(JobState.RECOVERING)
            lost_too = " and its agents were lost" if rows else ""
            return Reacquire(Launch(f"the control plane was restarted{lost_too}", counts=job.generation > 0))
        lost = [rank for rank in range(len(rows)) if rank not in about]
        if any(state.generation != job.generation for state in about.values()):
            if lost:
                death = Death(lost[0], "agent_lost", message="lost its agent while the control plane was away")
                return Recover(death, tuple(lost), RecoveryTimeline(time.time()))
            return Launch("the control plane was restarted during a launch", counts=True)
        if not lost and any(row.state == ranks.STARTING for row in rows):
            await finish_launch(self._job, job.generation, about)
        await self._watch_adopted(job.generation, lost, about)
        if job.state == JobState.RESIZING and not self._inbox.no_room:
            # Perhaps not all were asked to rest: the reason for the change is found again.
            self._inbox.put(Resize())
            return Rearrange(Stay("the control plane was restarted during a resize"))
        if not lost:
            await self._record.event("adopted", "another control plane took the job over; training was not interrupted")
        return Watch()

    async def _watch_adopted(self, generation: int, lost: list[int], where: Mapping[int, AgentDescription]) -> None:
        current = await self._record.current_generation()
        resume_step = current.resume_step if current is not None else 0
        running = watch_generation(self._job, generation, resume_step, taken_over=True)
        self._observe(running)
        if not lost:  # the last control plane may not have done it
            running.run_alongside(plan_generation(self._job, generation, where))
        for rank in lost:
            running.lose(rank, "was given up: its agent does not answer")

    async def _watch(self) -> Action:
        """Watch one generation until it ends."""
        running = self._running
        assert running is not None
        leaving = self._inbox.has(*LEAVE)
        if leaving and self._save_requested_from is not running:
            self._save_requested_from = running
            if self._inbox.no_room:
                await self._record.record_no_room(self._inbox.no_room)
            running.run_alongside(request_save(self._job, running))
        await running.wait(self._inbox, Cancel, *((Overdue,) if leaving else (*LEAVE, Resize)))
        if self._inbox.has(Cancel):
            return End(JobState.CANCELLED)
        if not running.broken:
            if running.all_ended:
                return Leave() if running.saved else End(JobState.SUCCEEDED)
            if self._inbox.has(*LEAVE):
                return Watch()
            change = await self._planner.plan(running)
            if isinstance(change, WaitInQueue):
                self._inbox.put(change)
                return Watch()
            return Watch() if change is None else Rearrange(change)
        timeline = RecoveryTimeline(noticed_at=time.time())
        await self._record.store.until_certain()
        await running.wait_for_culprit()
        resting = running.rest(time_to_rest(self._gang.spec))
        if failure_kind(running.culprit.kind).is_hopeless:
            await resting
        else:
            await asyncio.gather(self._record.record_state(JobState.RECOVERING), resting)
        return self._after_deaths(running, timeline)

    def _after_deaths(self, ended: RunningGeneration, timeline: RecoveryTimeline) -> Recover | End:
        """The action after a generation has ended with deaths, and all that live are at rest. A failure that no restart
        cures, such as a mistake in the data, ends the job without anything being recovered."""
        self._running = None
        if failure_kind(ended.culprit.kind).is_hopeless:
            return End(JobState.FAILED, ended.culprit.kind, ended.culprit.message)
        timeline.rested_at, timeline.failed_at = time.time(), ended.culprit.at
        self._gang.resting_steps = dict(ended.resting)
        agents_lost = tuple(death.rank for death in ended.deaths if death.kind == "agent_lost")
        return Recover(ended.culprit, agents_lost, timeline)

    async def _recover(self, action: Recover) -> Action:
        """Start another generation, with other agents for ranks that lost theirs, or give up the job."""
        # Again, since a last report may have been of the first step.
        await self._record.record_state(JobState.RECOVERING)
        if action.agents_lost:  # it may be held back, or held, for long before the next launch records them again
            await self._record.record_end(action.agents_lost)
        job, lives = await self._record.job(), await self._record.generations()
        culprit, failed = action.culprit, action.failed_launch
        progressed = bool(lives) and lives[-1].first_step_at is not None and failed is None
        failure = failure_of(culprit, time.time(), job.step, progressed, self._gang.nodes.get(culprit.rank))
        data = {**failure.to_json(), "traceback": culprit.traceback}
        await self._record.event("rank_lost", culprit.sentence, rank=culprit.rank, step=culprit.step, data=data)
        history = self._history.failures(lives, failed.incident if failed is not None else None)
        if failed is not None:
            self._history.failed_launches.append(failure)
        policy, in_a_row = self._job.submitted.recovery, len(self._history.failed_launches)
        decision = decide(culprit, failure, history, policy.max_restarts, policy.restart_window_seconds, in_a_row)
        if isinstance(decision, GiveUp):
            return End(JobState.FAILED, decision.reason, decision.message)
        if culprit.kind == UNREADABLE and lives:
            older = len((await known_checkpoints(self._job)).checkpoints) > 1
            about = (lives[-1].resume_step, culprit.message, older, self._job.has_snapshots)
            await self._record.record_hold(hold_sentence(job.id, *about))
        elif (until := failure_kind(culprit.kind).waits_until) and decision.wait_seconds:
            held = f"on hold until {until}: {culprit.message}. manta cancel {job.id} ends the job"
            await self._record.record_hold(held)
        if decision.wait_seconds:
            await self._wait_before_generation(decision.wait_seconds, culprit)
        if self._inbox.has(Cancel):
            return End(JobState.CANCELLED)
        incident = Incident(culprit, failure, action.timeline, decision.wait_seconds)
        launch = launch_after(incident, decision.cause, failed, first=not lives)
        lost, generation = action.agents_lost, job.generation + 1
        if lost and not await replace_lost(self._job, lost, generation, [*history, failure]):
            return Reacquire(launch)
        return launch

    async def _wait_before_generation(self, seconds: float, culprit: Death) -> None:
        """Wait before the next generation, or until the job is cancelled or is to leave; while it tries to leave, until
        it has tried for long enough."""
        leave = (Overdue,) if self._inbox.has(*LEAVE) else LEAVE
        message = (
            f"waiting {seconds:g} s before the next restart: no step was committed since the last failure of this kind"
        )
        data = {"seconds": seconds, "kind": culprit.kind}
        await self._record.event("held_back", message, rank=culprit.rank, data=data)
        await self._inbox.wait(Cancel, *leave, seconds=seconds)

    async def _wait_before_retry(self, launch: Launch, why: str) -> Launch:
        """Wait before the next attempt of a launch that failed for no fault of the gang's, or until the job is
        cancelled or is to leave."""
        await self._record.record_hold(why)
        await self._inbox.wait(Cancel, *LEAVE, seconds=hold_seconds(launch.holds))
        return replace(launch, holds=launch.holds + 1)

    async def _reacquire(self, launch: Launch) -> Launch:
        """Give up all places, keep the snapshots, and place the whole gang again."""
        failures = self._history.failures(await self._record.generations(), launch.incident)
        holders = await self._gang.release()  # on all nodes that it has been on, so that no others are needed
        await self._record.record_end()
        self._dismiss_departing()
        self._gang.departing.append(holders)
        await place_gang(self._job, (await self._record.job()).generation + 1, failures)
        return launch

    async def _rearrange(self, action: Rearrange) -> Action:
        """Bring all trainers to rest after the present step, make the change, and launch the next generation. If
        something happens before that, the change is not made, and the event is handled."""
        running = self._running
        assert running is not None
        await self._record.record_state(JobState.RESIZING)
        noticed = time.time()
        await running.rest(time_to_rest(self._gang.spec), STEP_GRACE_SECONDS)
        # A trainer that took too long to rest was killed, and its rank resumes from its snapshot.
        failed = any(death.kind != "stopped" for death in running.deaths)
        if failed or running.all_ended or self._inbox.has(Cancel):
            standby = standby_of(action.change)
            if standby is not None:
                await self._gang.dismiss(standby)
            if running.deaths and not self._inbox.has(Cancel):
                return self._after_deaths(running, RecoveryTimeline(noticed))
            return Watch()
        self._running = None
        await carry_out(action.change, self._job, running.generation, running.resting)
        return Launch(action.change.cause, counts=False)

    async def _launch(self, launch: Launch) -> Action:
        """Start the next generation on the agents that are there."""
        try:
            running = await launch_generation(self._job, launch)
        except CheckpointsUnreadable as error:
            self._history.failed_launches = []  # all agents have answered
            return await self._wait_before_retry(launch, str(error))
        except ClusterUnavailable as error:
            return await self._wait_before_retry(launch, f"Ray refused a request ({error}); retrying")
        except (AgentError, LaunchFailed, TimeoutError) as error:
            log.warning("launch of %s failed: %s", self._job.id, error)
            death, lost = await self._launch_failure(error)
            return Recover(death, lost, RecoveryTimeline(time.time()), launch)
        self._history.failed_launches, self._unlaunched = [], False
        self._dismiss_departing()
        self._observe(running)
        return Watch()

    async def _launch_failure(self, error: Exception) -> tuple[Death, tuple[int, ...]]:
        """The death that a launch failed by, and the ranks whose agents are lost: all of them, if none can be
        blamed."""
        gang, everybody = self._gang, list(range(len(self._gang.agents)))
        why = (str(error).strip() or type(error).__name__).splitlines()[-1]
        if isinstance(error, LaunchFailed):
            silent, why = list(error.unresponsive), next(iter(error.unresponsive.values()))
        else:
            answering = await describe_all(gang.by_rank)
            silent = [rank for rank in everybody if rank not in answering]
        lost = sorted({*silent, *gang.on(self._cluster.nodes.lost)}) or everybody
        return Death(lost[0], "agent_lost", message=f"could not be launched ({why})"), tuple(lost)

    def _observe(self, running: RunningGeneration) -> None:
        """Watch this generation from now on."""
        running.run_alongside(self._planner.check_for_room())
        self._running = running

    async def _leave(self) -> Action | None:
        """The job has saved what it could: it pauses, or ends because its time is up."""
        if self._running is not None:
            await self._running.rest(time_to_rest(self._gang.spec))
        return await leave(self._job)

    async def _end(self, end: End) -> None:
        """Release everything, then record the end: a final job holds nothing, except for the snapshots of a failed one,
        which may be retried. Its outcome is recorded before that, since it could not be determined any more without the
        snapshots."""
        if end.state == JobState.CANCELLED and self._running is not None:
            await self._running.stop()
        await self._record.record_outcome(end.state, end.reason, end.message)
        keeps = end.state == JobState.FAILED and (await self._record.job()).step > 0 and self._job.memory_seconds > 0
        await self._cluster.end_job(self._job.id, keep_snapshots=keeps)
        try:
            await known_checkpoints(self._job)
        except Exception as error:  # noqa: BLE001 - it does not affect how the job has ended
            log.warning("the checkpoints of %s are not reconciled: %s", self._job.id, error)
        until = time.time() + self._job.memory_seconds if keeps else None
        await self._record.end(end.state, end.reason, end.message, until)

    def _dismiss_departing(self) -> None:
        departing, self._gang.departing = self._gang.departing, []
        for agents in departing:
            self._in_background(self._gang.dismiss(agents))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        self._background_tasks.start(work, f"beside {self._job.id}")
