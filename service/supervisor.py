"""One running job: its supervisor takes it from STARTING to its end, through as many generations as it needs.

The database is the truth. Whatever the supervisor does is written there first, so that another one can take over at
any point (`adopt`); the gang itself never notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from service import replication
from service.budgets import Fault as MachineFault
from service.budgets import avoided_nodes, faults_of
from service.crew import Crew, Joiners, prepared
from service.faults import FaultNotPossible, refuse_impossible
from service.gang import Gang
from service.gangs import Gangs, NotPlaced
from service.hang_watch import HangWatch
from service.incident import Incident
from service.moving import hand_over
from service.other_layouts import spread, whole_states
from service.placement import replica_of
from service.recovery import Death, GiveUp, choose_resume, decide, fault_of, unusable_sources
from service.recovery_timeline import RecoveryTimeline
from service.reports import ReportWriter
from service.sizes import resized, room_for, size_within, sizes_of
from service.states import JobState, can, is_final
from service.store import Store, checkpoints, events, generations, jobs, ranks, recoveries
from service.store.tables import Generation, Job
from workers.checkpoint.catalog import whole_checkpoints
from workers.checkpoint.snapshot import layout_tag
from workers.config import JobSpec
from workers.errors import MantaError
from workers.faults import BETWEEN_STEPS, Fault
from workers.messages import LaunchOrder, Resume
from workers.parallel.grid import RankGrid
from workers.paths import Paths

log = logging.getLogger(__name__)

# A trainer that takes longer to come to rest after the loss of a peer is killed, and its rank forked anew.
REST_SECONDS = 5.0
# A launch that takes longer has an agent in it that does not answer; a node's first trainer waits for its zygote.
LAUNCH_SECONDS = 150.0
# How long the step under way may take before a change of size or place breaks it off.
PATIENCE_SECONDS = 20.0
# An agent that takes longer to arm a fault is taken for dead.
INJECT_SECONDS = 10.0
# How often a job that is smaller than it should be looks for room to grow.
ROOM_SECONDS = 2.0


@dataclass
class Site:
    """What all supervisors share."""

    store: Store
    gangs: Gangs
    ray: Any
    home: Path
    peaks: dict[str, float] = field(default_factory=dict)
    """Peak FLOP/s of one rank's device by node id."""


class LaunchFailed(MantaError):
    """An agent or a node did not do its part of a launch; the next generation tries again."""


class Supervisor:
    """Owns one job. `run` returns when the job is final, or back in the queue."""

    def __init__(self, site: Site, job: Job):
        self.site, self.job_id = site, job.id
        self.submitted = JobSpec.model_validate(job.spec)
        self.spec = resized(self.submitted, job.replicas or self.submitted.layout.data)
        """With the number of replicas that the job runs with."""
        self.paths = Paths.of(site.home)
        self.cancelled = asyncio.Event()
        self._size_asked = asyncio.Event()
        self._crew = Crew(site.gangs, job.id, self.spec)
        self._gang: Gang | None = None
        """Of the newest generation."""
        self._chores: set[asyncio.Task[None]] = set()
        self._replicated: set[int] = set()
        self._failed_launches = 0
        self._told_waiting = False
        self._memory: dict[int, int | None] = {}
        self._stragglers_replaced: dict[int, float] = {}

    def cancel(self) -> None:
        """The job is CANCELLING: stop it."""
        self.cancelled.set()

    async def inject(self, fault: Fault) -> None:
        """Have the agent of the fault's rank make it. Raises FaultNotPossible."""
        agents = list(self._crew.agents)
        refuse_impossible(fault, len(agents), (await self._job()).step, self.spec.train.steps)
        step = None if fault.phase in BETWEEN_STEPS else fault.at_step
        await self._event("fault_injected", fault.sentence, rank=fault.rank, step=step, data=fault.to_json())
        try:
            async with asyncio.timeout(INJECT_SECONDS):
                await agents[fault.rank].arm.remote(fault.to_json())
        except (self.site.ray.exceptions.RayError, TimeoutError) as error:
            raise FaultNotPossible(f"the agent of rank {fault.rank} does not answer; try again") from error

    def node_lost(self, node: str, why: str) -> None:
        """A node is lost, and with it all agents there."""
        ranks = self._crew.on([node])
        if not ranks:
            return
        told = f"node {node[:12]} is lost ({why}), and with it {len(ranks)} of {len(self._crew.agents)} ranks"
        self._in_background(self._event("node_lost", told, data={"node": node, "ranks": ranks}))
        if self._gang is not None:
            for rank in ranks:
                self._gang.lose(rank, f"was on node {node[:12]}, which is lost")

    def node_draining(self, node: str, seconds: float) -> None:
        """A node is to be left within `seconds`."""
        ranks = self._crew.on([node])
        if ranks:
            self._told_waiting = False
            told = f"node {node[:12]} is to be left within {seconds:g} s; {len(ranks)} ranks are there"
            data = {"node": node, "ranks": ranks, "seconds": seconds}
            self._in_background(self._event("node_draining", told, data=data))
            self._size_asked.set()

    def resize(self) -> None:
        """The job may run with another number of replicas than it does: see whether it can."""
        self._size_asked.set()

    @property
    def _tag(self) -> str:
        """Of the layout that the job runs with, in the names of its snapshots."""
        return layout_tag(self.spec.model_dump(mode="json"))

    async def run(self, placed_generation: int | None) -> None:
        """Take the job to its end. `placed_generation`: the number its placement groups carry when they were just
        acquired; None: take over what another control plane left."""
        job = await self._job()
        gang: Gang | None = None
        try:
            outcome = await self._outcome(job)
            if outcome is not None:
                await self._end(JobState(outcome["state"]), outcome["reason"], outcome["message"])
                return
            if job.state == JobState.CANCELLING:
                self.cancelled.set()
            elif placed_generation is not None:
                gang = await self._launch_placed(placed_generation)
            else:
                gang = await self._adopt(job)
            while gang is not None and not self.cancelled.is_set():
                gang = await self._through(gang)
            if self.cancelled.is_set() and not is_final((await self._job()).state):
                await self._finish_cancel(gang)
        except NotPlaced as error:
            if self.cancelled.is_set():
                await self._finish_cancel(None)
            else:
                await self._back_to_queue(str(error))
        finally:
            if gang is not None:
                await gang.close()

    async def _through(self, gang: Gang) -> Gang | None:
        """Live through one generation; the next gang, or None when the job is over."""
        await gang.wait(self.cancelled, self._size_asked)
        if self.cancelled.is_set():
            return gang
        if not gang.broken:
            if not gang.all_ended:
                return await self._rearrange(gang)
            await self._succeed()
            return None
        timeline = RecoveryTimeline(noticed_at=time.time())
        await gang.wait_for_culprit()
        await asyncio.gather(self._say(JobState.RECOVERING), gang.rest(REST_SECONDS))
        return await self._after_deaths(gang, timeline)

    async def _after_deaths(self, gang: Gang, timeline: RecoveryTimeline) -> Gang | None:
        timeline.rested_at, timeline.failed_at = time.time(), gang.culprit.at
        self._memory = gang.resting
        agents_lost = [death.rank for death in gang.deaths if death.kind == "agent_lost"]
        return await self._recover(gang.culprit, agents_lost, timeline)

    async def _recover(self, culprit: Death, agents_lost: list[int], timeline: RecoveryTimeline) -> Gang | None:
        """The next generation after `culprit`'s death, with new agents for the ranks whose own were lost; None when
        the job is given up."""
        await self._say(JobState.RECOVERING)  # again: a last report may have told of the generation's first step
        job = await self._job()
        lives = await self._generations()
        progressed = bool(lives) and lives[-1].first_step_at is not None
        fault = fault_of(culprit, time.time(), job.step, progressed, self._crew.nodes.get(culprit.rank))
        data = {**fault.to_json(), "traceback": culprit.traceback}
        await self._event("rank_lost", culprit.sentence, rank=culprit.rank, step=culprit.step, data=data)
        policy = self.spec.recovery
        decision = decide(
            culprit, fault, faults_of(lives), policy.max_restarts, policy.restart_window_seconds, self._failed_launches
        )
        if isinstance(decision, GiveUp):
            await self._fail(decision)
            return None
        if decision.wait_seconds:
            await self._hold_back(decision.wait_seconds, culprit)
        if self.cancelled.is_set():
            return None
        incident = Incident(culprit, fault, timeline, decision.wait_seconds)
        if agents_lost and not await self._make_whole(job, agents_lost, fault):
            return await self._replace(job, decision.cause, incident)
        return await self._launch(decision.cause, counts=True, incident=incident)

    async def _hold_back(self, seconds: float, culprit: Death) -> None:
        """Wait before the next generation, or until the job is cancelled."""
        message = f"waits {seconds:g} s before the next try: no step was committed since the last failure of this kind"
        await self._event("held_back", message, rank=culprit.rank, data={"seconds": seconds, "kind": culprit.kind})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.cancelled.wait()

    async def _launch_placed(self, placed_generation: int) -> Gang | None:
        job = await self._job()
        self.spec = resized(self.submitted, job.replicas or self.submitted.layout.data)
        await self._crew.start(placed_generation, self.spec.layout)
        return await self._launch("submitted" if job.generation == 0 else "placed again", counts=job.generation > 0)

    async def _replace(self, job: Job, cause: str, incident: Incident | None = None) -> Gang | None:
        """Give up the placement, keep the snapshots, and place the whole gang anew, away from nodes that keep
        failing."""
        faults = [*faults_of(await self._generations()), *([] if incident is None else [incident.fault])]
        self._memory = {}
        await self._crew.release()
        wanted = job.wanted_replicas or self.submitted.layout.data
        room = room_for(self.spec.layout, await self._crew.capacity())
        # With too little room for any size, wait for the one that it has.
        size = size_within(sizes_of(self.submitted), wanted, 0, room) or self.spec.layout.data
        self.spec = resized(self.spec, size)
        await self._crew.place(job.generation + 1, self.spec.layout, avoided_nodes(faults, time.time()))
        return await self._launch(cause, counts=job.generation > 0, incident=incident)

    async def _make_whole(self, job: Job, lost: list[int], fault: MachineFault) -> bool:
        """Find agents for the ranks `lost`: in their own places, else by placing their replicas elsewhere, else by
        going on without those replicas, where `elastic` allows it. False when the job must be placed anew."""
        crew, generation = self._crew, job.generation + 1
        if len(lost) == len(crew.agents):
            return False
        if await crew.replace(generation, lost):
            return True
        replicas = crew.replicas_of(lost)
        staying = [replica for replica in range(crew.layout.data) if replica not in replicas]
        await crew.give_up(replicas)
        avoid = avoided_nodes([*faults_of(await self._generations()), fault], time.time())
        has_room = room_for(crew.layout, await crew.capacity()) >= len(replicas)
        if has_room and await crew.place_replicas(generation, replicas, avoid):
            return True
        if len(staying) not in sizes_of(self.submitted):
            return False
        smaller = resized(self.spec, len(staying))
        crew.shrink(smaller.layout, staying)
        self.spec, self._memory = smaller, {}
        await self._event("shrunk", f"goes on with {len(staying)} replicas: there is no room for more")
        return True

    async def _rearrange(self, gang: Gang) -> Gang | None:
        """Other nodes, or another number of replicas; the same gang when nothing can or need be changed."""
        self._size_asked.clear()
        current = await self._generation_row(await self._job())
        if current is None or current.first_step_at is None:
            return gang  # ranks may still read what others left; `_look_for_room` asks again
        leaving = self._leaving()
        return await (self._leave(gang, leaving) if leaving else self._resize(gang))

    def _leaving(self) -> list[int]:
        """The replicas that have ranks on nodes that are to be left."""
        return self._crew.replicas_of(self._crew.on(self.site.gangs.draining))

    async def _leave(self, gang: Gang, leaving: list[int]) -> Gang | None:
        """Move these replicas to other nodes, else go on without them, where `elastic` allows it."""
        crew, staying = self._crew, [each for each in range(self._crew.layout.data) if each not in leaving]
        joiners = await self._enlist(await self._job(), self.spec, gang, leaving)
        if gang.broken or gang.all_ended or self.cancelled.is_set():
            return gang  # then nobody was enlisted
        if joiners is None and len(staying) not in sizes_of(self.submitted):
            if not self._told_waiting:
                await self._event(
                    "drain_waiting", "there is no room elsewhere; it stays until there is, or until the end"
                )
            self._told_waiting = True
            return gang

        async def move() -> Joiners:
            if joiners is None:
                self.spec, self._memory = resized(self.spec, len(staying)), {}
                return crew.shrink(self.spec.layout, staying)
            moving = crew.ranks_in(leaving)
            moves = {rank: (crew.agents[rank], new) for rank, new in zip(moving, joiners.agents, strict=True)}
            await hand_over(moves, gang.generation, self._tag)
            self._memory = {rank: step for rank, step in gang.resting.items() if rank not in moves}
            return crew.swap(leaving, joiners)

        done = f"replicas {leaving} moved" if joiners is not None else f"went on without replicas {leaving}"
        return await self._change(gang, joiners, move, f"{done}: their nodes are to be left")

    async def _change(
        self, gang: Gang, joiners: Joiners | None, arrange: Callable[[], Awaitable[Joiners | None]], cause: str
    ) -> Gang | None:
        """Launch the next generation with what `arrange` makes of the crew, all trainers being at rest; it answers who
        leaves it. When something happens before that, `joiners` are sent away and that is dealt with."""
        await self._say(JobState.RESIZING)
        noticed = time.time()
        await gang.rest(REST_SECONDS, PATIENCE_SECONDS)
        # Who took too long to rest was killed, and its rank goes on from its snapshot.
        failed = any(death.kind != "stopped" for death in gang.deaths)
        if failed or gang.all_ended or self.cancelled.is_set():
            if joiners is not None:
                await self._crew.send_away(joiners)
            if gang.deaths and not self.cancelled.is_set():
                return await self._after_deaths(gang, RecoveryTimeline(noticed))
            return gang
        left = await arrange()
        if left is not None:
            self._in_background(self._crew.send_away(left))
        return await self._launch(cause, counts=False)

    async def _resize(self, gang: Gang) -> Gang | None:
        """Go on with as many replicas as are wanted and fit; the same gang when that is what it has."""
        job, crew = await self._job(), self._crew
        wanted, held = job.wanted_replicas or self.submitted.layout.data, crew.layout.data
        size = size_within(sizes_of(self.submitted), wanted, held, room_for(crew.layout, await crew.capacity()))
        if size is None or size == held:
            if wanted > held:
                await self._event(
                    "resize_waiting", f"there is no room for more than {held} replicas; it goes on waiting"
                )
            return gang
        target, joiners = resized(self.spec, size), None
        if size > held:
            joiners = await self._enlist(job, target, gang, range(held, size))
            if joiners is None:
                return gang

        async def arrange() -> Joiners | None:
            self.spec, self._memory = target, {}
            if joiners is None:
                return crew.shrink(target.layout, range(size))
            crew.grow(target.layout, joiners)
            return None

        return await self._change(gang, joiners, arrange, f"resized from {held} to {size} replicas")

    async def _enlist(self, job: Job, target: JobSpec, gang: Gang, replicas: Sequence[int]) -> Joiners | None:
        """Agents for these replicas of `target`, more than there are or in the place of others, with trainers that are
        ready, while the others train on; None when they cannot be had, or something happened meanwhile."""
        if room_for(target.layout, await self._crew.capacity()) < len(replicas):
            return None
        joiners = await self._crew.enlist(job.generation + 1, target.layout, replicas)
        if joiners is None:
            return None
        about = await self.site.gangs.describe(joiners.agents)
        ranks = [rank for rank in range(target.layout.world_size) if replica_of(target.layout, rank) in replicas]
        orders = [
            self._order(rank, target, job.generation + 1, Resume(), None, place)
            for rank, place in zip(ranks, about or [], strict=False)
        ]
        held = self._crew.layout.world_size
        # A rank that others have now has files in the shared memory that nodes of one machine share: not yet those.
        orders = [order if order.rank >= held else replace(order, snapshot_folder=None) for order in orders]
        ready = about is not None and await self._while_it_runs(
            gang, prepared(joiners.agents, [order.to_json() for order in orders], self.site.ray.exceptions.RayError)
        )
        if ready and not (gang.broken or gang.all_ended or self.cancelled.is_set()):
            return joiners
        await self._crew.send_away(joiners)
        return None

    async def _while_it_runs(self, gang: Gang, work: Coroutine[Any, Any, bool]) -> bool:
        """What `work` answers; False as soon as something happens to the gang, which comes first."""
        working, watching = asyncio.create_task(work), asyncio.create_task(gang.wait(self.cancelled))
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        if working.done():
            return working.result()
        working.cancel()
        return False

    async def _look_for_room(self) -> None:
        """Now and then, see whether the job could run where or with as many replicas as it should: no event tells."""
        while True:
            await asyncio.sleep(ROOM_SECONDS)
            try:
                if await self._may_change():
                    self._size_asked.set()
            except Exception:  # what is only a look must not end the job: look again in a moment
                log.exception("a look for room for %s failed", self.job_id)

    async def _may_change(self) -> bool:
        """Whether a change of place or size has become possible."""
        if leaving := self._leaving():
            return not self._told_waiting or room_for(self.spec.layout, await self._crew.capacity()) >= len(leaving)
        if len(sizes_of(self.submitted)) == 1:
            return False
        wanted = (await self._job()).wanted_replicas or self.submitted.layout.data
        if wanted <= self.spec.layout.data or await self._others_wait():
            return wanted < self.spec.layout.data
        return room_for(self.spec.layout, await self._crew.capacity()) > 0

    async def _others_wait(self) -> bool:
        """Whether jobs stand in the queue, to whom what is free belongs."""
        return any(job.state == JobState.QUEUED for job in await self._read(lambda s: list(jobs.unfinished(s))))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
        task.add_done_callback(_complain)

    async def _adopt(self, job: Job) -> Gang | None:
        """Find the gang by the names of its agents and go on from wherever the control plane before this one was. Its
        trainers are kept: those that train are watched, those at rest go on in the next generation."""
        rows = await self._read(lambda s: ranks.of_job(s, self.job_id))
        after = {row.rank: job.report_cursor.get(str(row.rank), 0) for row in rows}
        about = await self._crew.adopt([row.actor or "" for row in rows], after)
        if about is None:
            if job.state == JobState.RUNNING:
                await self._say(JobState.RECOVERING)
            found = "an agent was lost while the control plane was away" if rows else "the control plane was restarted"
            return await self._replace(job, found)
        if any(state["generation"] != job.generation for state in about):
            return await self._launch("the control plane was restarted during a launch", counts=True)
        current = await self._generation_row(job)
        gang = self._watch(job.generation, current.resume_step if current is not None else 0, taken_over=True)
        if job.state == JobState.RESIZING:  # all have been told to rest, or not yet: what was to change is seen again
            self._size_asked.set()

            async def stay() -> None:
                self._memory = gang.resting

            return await self._change(gang, None, stay, "the control plane was restarted during a change of size")
        await self._event("adopted", "the control plane was restarted; the job never noticed")
        return gang

    async def _launch(self, cause: str, counts: bool, incident: Incident | None = None) -> Gang | None:
        """Start the next generation on the agents at hand."""
        gang: Gang | None = None
        begun = False
        try:
            async with asyncio.timeout(LAUNCH_SECONDS):
                resume = await self._choose_resume(incident)
                generation = await self._begin(cause, counts, resume, incident)
                begun = counts
                where = await asyncio.gather(*(agent.describe.remote() for agent in self._crew.agents))
                self._crew.note(where)
                store = await self._start_store(where[0]["node"], generation)
                passed = await self._read(lambda s: events.data_of(s, self.job_id, "rolled_back"))
                orders = [
                    self._order(rank, self.spec, generation, resume, store, place, passed)
                    for rank, place in enumerate(where)
                ]
                gang = self._watch(generation, resume.step)
                pids = await asyncio.gather(
                    *(
                        agent.launch.remote(order.to_json())
                        for agent, order in zip(self._crew.agents, orders, strict=True)
                    )
                )
        except (self.site.ray.exceptions.RayError, LaunchFailed, TimeoutError) as error:
            log.warning("launch of %s failed: %s", self.job_id, error)
            if gang is not None:
                await gang.close()
            if not begun:  # else it was counted as a restart
                self._failed_launches += 1
            first_line = (str(error).strip() or type(error).__name__).splitlines()[-1]
            death = Death(0, "agent_lost", message=f"could not be launched ({first_line})")
            lost = self._crew.on(self.site.gangs.lost) or list(range(len(self._crew.agents)))
            return await self._recover(death, lost, RecoveryTimeline(time.time()))
        rows = [self._rank_row(order, where[order.rank], pids[order.rank]["pid"]) for order in orders]
        nodes = [each["node"] or each["host"] for each in where]
        kept = [rank for rank, answer in enumerate(pids) if answer["kept"]]
        self._failed_launches = 0
        await self._note_launched(generation, rows, kept)
        await replication.begin(self._crew.agents, nodes, generation, self._tag)
        if kept:
            await self._say_replaced(generation, kept)
        return gang

    async def _note_launched(self, generation: int, rows: list[dict[str, Any]], kept: list[int]) -> None:
        now = time.time()
        forked = [row["rank"] for row in rows if row["rank"] not in set(kept)]

        def note(session: Any) -> None:
            ranks.replace(session, self.job_id, rows)
            recoveries.note_latest(session, self.job_id, generation, launched_at=now)
            recoveries.note_replaced(session, self.job_id, generation, forked, len(kept))

        await self._write(note)

    async def _say_replaced(self, generation: int, kept: list[int]) -> None:
        started = [rank for rank in range(len(self._crew.agents)) if rank not in kept]
        message = f"generation {generation} goes on with {len(kept)} of {len(self._crew.agents)} processes"
        data = {"kept": kept, "started": started}
        await self._write(
            lambda s: events.append(s, self.job_id, "ranks_replaced", message, generation=generation, data=data)
        )

    def _watch(self, generation: int, resume_step: int, taken_over: bool = False) -> Gang:
        writer = ReportWriter(self.site.store, self.job_id, generation, resume_step)

        async def take(report: dict[str, Any]) -> None:
            hangs.heard(report)
            await writer.take(report)

        gang = Gang(self.site.ray, self._crew.agents, generation, self._crew.after, take)
        hangs = HangWatch(
            self.site.ray,
            self._crew.agents,
            RankGrid(self.spec.layout).group,
            self._event,
            gang.lose,
            self.spec.recovery.stragglers,
            self._stragglers_replaced,
        )
        gang.beside(hangs.run(look_first=taken_over))
        gang.beside(self._look_for_room())
        self._gang = gang
        return gang

    async def _choose_resume(self, incident: Incident | None) -> Resume:
        agents, generation = self._crew.agents, (await self._job()).generation
        steps = await asyncio.gather(*(agent.snapshot_steps.remote(self._tag) for agent in agents))
        found = await replication.bring_back(agents, steps, generation, self._tag)
        self._replicated = {step for own, all_steps in zip(steps, found, strict=True) for step in {*all_steps} - {*own}}
        held = [(*own, self._memory.get(rank)) for rank, own in enumerate(found)]
        snapshots = [[step for step in each if step is not None] for each in held]
        last_kind = None if incident is None else incident.culprit.kind
        unusable = unusable_sources(await self._generations(), last_kind)
        folder = self.paths.checkpoint_folder(self.job_id)
        whole = await asyncio.to_thread(whole_checkpoints, folder)
        await self._write(lambda s: checkpoints.reconcile(s, self.job_id, [(str(path), m.bytes) for path, m in whole]))
        durable = [(m.step, str(path)) for path, m in whole]
        return choose_resume(snapshots, durable, unusable, await self._of_other_sizes(generation))

    async def _of_other_sizes(self, generation: int) -> list[tuple[int, list[str]]]:
        """(Step, files) of the newest state that ranks of another size of the job left whole in shared memory."""
        sizes = [resized(self.submitted, size) for size in sizes_of(self.submitted)]
        worlds = {layout_tag(spec.model_dump(mode="json")): spec.layout.world_size for spec in sizes}
        worlds.pop(self._tag, None)
        if not worlds:
            return []
        where = await asyncio.gather(*(agent.describe.remote() for agent in self._crew.agents))
        agents = {place["host"]: agent for place, agent in zip(where, self._crew.agents, strict=True)}
        kept = dict(zip(agents, await asyncio.gather(*(agent.kept.remote() for agent in agents.values())), strict=True))
        for state in whole_states(kept, worlds):
            if await spread(state, agents, kept, generation):
                return [(state.step, state.paths)]
        return []

    async def _begin(self, cause: str, counts: bool, resume: Resume, incident: Incident | None) -> int:
        words = {
            "start": "from the start",
            "snapshot": "from shared memory",
            "memory": "from the shared memory of another size",
            "checkpoint": f"from {resume.path}",
        }
        failure = None if incident is None else incident.fault.to_json()
        data = {"failure": failure, "resume_path": resume.path}
        source = self._told_source(resume)

        def begin(session: Any) -> int:
            number = generations.begin(session, self.job_id, cause, counts, resume.source, resume.step, data)
            jobs.set_replicas(session, self.job_id, self.spec.layout.data)
            if incident is not None:
                recoveries.begin(session, self.job_id, number, incident.beginning(source, resume.step))
            events.append(
                session,
                self.job_id,
                "generation_started",
                f"generation {number} resumes at step {resume.step} {words[resume.source]}: {cause}",
                generation=number,
                step=resume.step,
                data={"resume_source": resume.source, "resume_step": resume.step},
            )
            return number

        return await self.site.store.write_async(begin)

    def _told_source(self, resume: Resume) -> str:
        """Where the state comes from, for the record of the recovery."""
        if resume.source != "snapshot":
            return resume.source
        where = "replica" if resume.step in self._replicated else "snapshot"
        return f"memory and {where}" if resume.step in self._memory.values() else where

    async def _start_store(self, node: str, generation: int) -> dict[str, Any] | None:
        if self.spec.layout.world_size == 1:
            return None
        daemons = await self.site.gangs.ensure_node_daemons()
        if node not in daemons:
            raise LaunchFailed(f"the daemon of node {node} does not answer")
        found: dict[str, Any] = await daemons[node].start_store.remote(self.job_id, generation)
        return found

    def _order(
        self,
        rank: int,
        spec: JobSpec,
        generation: int,
        resume: Resume,
        store: dict[str, Any] | None,
        where: dict[str, Any],
        roll_backs: Sequence[dict[str, Any]] = (),
    ) -> LaunchOrder:
        return LaunchOrder(
            job=self.job_id,
            generation=generation,
            rank=rank,
            spec=spec.model_dump(mode="json"),
            store_host=store["host"] if store else None,
            store_port=store["port"] if store else None,
            snapshot_folder=str(self.paths.snapshot_folder(self.job_id)),
            checkpoint_folder=str(self.paths.checkpoint_folder(self.job_id)),
            resume=resume,
            roll_backs=tuple(roll_backs),
            device="cuda:0" if where["devices"] else "cpu",
            peak_flops=self.site.peaks.get(where["node"]),
            in_place=not where["devices"],  # over NCCL a survivor cannot leave a collective
        )

    def _rank_row(self, order: LaunchOrder, where: dict[str, Any], pid: int) -> dict[str, Any]:
        at = RankGrid(self.spec.layout).coordinates(order.rank)
        return {
            "rank": order.rank,
            "tensor": at.tensor,
            "pipeline": at.pipeline,
            "data": at.data,
            "context": at.context,
            "node": where["host"],
            "device": f"GPU {where['devices'][0]}" if where["devices"] else "cpu",
            "pid": pid,
            "generation": order.generation,
            "state": "running",
            "actor": self._crew.names[order.rank],
        }

    async def _generations(self) -> list[Generation]:
        found: list[Generation] = await self._read(lambda s: generations.of_job(s, self.job_id))
        return found

    async def _generation_row(self, job: Job) -> Generation | None:
        """What is stored about the job's current generation."""
        return next((row for row in await self._generations() if row.generation == job.generation), None)

    async def _outcome(self, job: Job) -> dict[str, Any] | None:
        """How the current generation ended the job, when another control plane knew but could not finish."""
        current = await self._generation_row(job)
        return (current.data or {}).get("outcome") if current is not None else None

    async def _succeed(self) -> None:
        await self._end(JobState.SUCCEEDED, None, None)

    async def _fail(self, decision: GiveUp) -> None:
        await self._end(JobState.FAILED, decision.reason, decision.message)

    async def _finish_cancel(self, gang: Gang | None) -> None:
        if gang is not None:
            await gang.stop()
        await self._end(JobState.CANCELLED, None, None)

    async def _end(self, state: JobState, reason: str | None, message: str | None) -> None:
        """Release everything, then say so: a final job holds nothing. What it ended with is noted before that, since
        nobody could tell any more once the snapshots are gone."""
        outcome = {"state": state.value, "reason": reason, "message": message}

        def note(session: Any) -> None:
            job = jobs.get(session, self.job_id, lock=True)
            generations.end(session, self.job_id, job.generation, outcome=outcome)

        await self._write(note)
        await self.site.gangs.end_job(self.job_id)
        whole = await asyncio.to_thread(whole_checkpoints, self.paths.checkpoint_folder(self.job_id))

        def end(session: Any) -> None:
            job = jobs.get(session, self.job_id, lock=True)
            checkpoints.reconcile(session, self.job_id, [(str(path), manifest.bytes) for path, manifest in whole])
            ranks.set_all(session, self.job_id, "exited")
            if state != JobState.CANCELLED and job.state == JobState.CANCELLING:
                jobs.transition(session, self.job_id, JobState.CANCELLED)
                return
            jobs.transition(session, self.job_id, state, reason=reason, message=message)

        await self._write(end)

    async def _back_to_queue(self, message: str) -> None:
        def queue(session: Any) -> None:
            job = jobs.get(session, self.job_id, lock=True)
            ranks.set_all(session, self.job_id, "exited")
            target = JobState.CANCELLED if job.state == JobState.CANCELLING else JobState.QUEUED
            jobs.transition(session, self.job_id, target, reason="insufficient_slots", message=message)

        await self._write(queue)

    async def _say(self, state: JobState) -> None:
        """Note that the job is on its way to another generation."""

        def say(session: Any) -> None:
            job = jobs.get(session, self.job_id, lock=True)
            if can(JobState(job.state), state):
                jobs.transition(session, self.job_id, state)

        await self._write(say)

    async def _job(self) -> Job:
        return await self._read(lambda s: jobs.get(s, self.job_id))

    async def _event(
        self, kind: str, message: str, rank: int | None = None, step: int | None = None, data: Any = None
    ) -> None:
        await self._write(lambda s: events.append(s, self.job_id, kind, message, rank=rank, step=step, data=data))

    async def _read(self, query: Any) -> Any:
        def read() -> Any:
            with self.site.store.read() as session:
                return query(session)

        return await asyncio.to_thread(read)

    async def _write(self, operation: Any) -> Any:
        return await self.site.store.write_async(operation)


def _complain(task: asyncio.Task[None]) -> None:
    """What is done beside a job's life may fail, but not unheard."""
    if not task.cancelled() and task.exception() is not None:
        log.error("beside a job: %r", task.exception(), exc_info=task.exception())
