"""Decides whether a job should run on other nodes or with another number of replicas, and prepares that while it
trains. The result is a `Change`, which is carried out later."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from manta.service.cluster.agent_client import AgentClient, AgentError, within
from manta.service.cluster.agents import describe
from manta.service.cluster.placement import Capacity, missing, replica_of, unit_of
from manta.service.cluster.sizes import (
    fitting,
    largest_fitting_size,
    resized,
    room_for,
    shapes_of,
    sizes_of,
    sizes_of_shape,
    smallest,
    staying_replicas,
    with_freed_units,
)
from manta.service.job.changes import Change, Grow, Move, Relocate, Shrink
from manta.service.job.context import JobContext
from manta.service.job.gang import AgentSet
from manta.service.job.generation import RunningGeneration
from manta.service.job.inbox import LEAVE, Cancel, Resize, WaitInQueue
from manta.service.job.launch import CommonOrder, order_for
from manta.service.job.leave import time_to_save
from manta.service.store import jobs
from manta.service.store.errors import JobNotFound
from manta.service.stored_specs import SpecNotUnderstood, stored_spec
from manta.workers.config import JobSpec
from manta.workers.protocol.messages import LaunchOrder

log = logging.getLogger(__name__)

# Seconds until trainers of standby agents must be ready.
PREPARE_SECONDS = 120.0
NO_ROOM = "its nodes are being drained and no other slots are free; it continues once some are"
TOO_SOON = "its nodes shut down before it can move; it continues on others"
# Seconds between checks whether a job that is smaller than it should be has room to grow.
ROOM_SECONDS = 2.0


class ElasticityPlanner:
    """Plans the changes of size and place of one job."""

    def __init__(self, job: JobContext):
        self._job, self._gang = job, job.gang
        self._shapes = shapes_of(job.submitted)
        self._reported_waiting = False
        self._reported_size: tuple[int, str] | None = None
        """How many replicas are wanted, and what was said about it last: each request comes over REST and from the
        database."""
        self._queue: list[jobs.QueuedJob] = []
        """The state when it was last checked."""
        self._never_fitting: dict[str, object] = {}
        """Jobs in the queue that the cluster could never hold; by job and capacity."""

    @property
    def _sizes(self) -> range:
        """The numbers of replicas that the job may have in the shape that it runs in."""
        return sizes_of(self._job.submitted, self._gang.layout)

    def reconsider(self) -> None:
        """Something has changed: there may be more to do."""
        self._reported_waiting = False
        self._job.inbox.put(Resize())

    async def plan(self, running: RunningGeneration) -> Change | WaitInQueue | None:
        """The change to make, prepared; None if nothing can or need be changed, or something happened to the gang
        meanwhile."""
        self._job.inbox.remove(Resize)
        current = await self._job.record.current_generation()
        if current is None or current.first_step_at is None:
            return None  # ranks may still read the snapshots of others; `check_for_room` asks again
        if draining := self._draining():
            return await self._leave(running, draining)
        other_jobs_wait = await self._other_jobs_wait()
        larger = None if other_jobs_wait else await self._larger_shape()
        return (
            await self._resize(running, other_jobs_wait) if larger is None else Relocate(larger, "slots are free again")
        )

    async def check_for_room(self) -> None:
        """From time to time, check whether the job could run on the nodes or with the number of replicas that it
        should: no event announces that."""
        while True:
            await asyncio.sleep(ROOM_SECONDS)
            try:
                if await self.may_change():
                    self._job.inbox.put(Resize())
            except Exception:  # a mere check must not end the job: try again later
                log.exception("looking for room for %s failed", self._job.id)

    async def may_change(self) -> bool:
        """Whether a change of place or size has become possible."""
        if draining := self._draining():
            if not self._reported_waiting or await self._room(self._gang.spec) >= len(draining):
                return True
            return await self._fitting(self._shapes) is not None or await self._spare_seconds() <= 0
        if len(self._sizes) == len(self._shapes) == 1:
            return False
        wanted, held = await self._job.wanted_replicas(), self._gang.layout.data
        if wanted < held:
            return True
        could_grow = wanted > held and await self._room(self._gang.spec) >= self._sizes.step
        # The queue, which may be long, is checked last.
        return (could_grow or await self._larger_shape() is not None) and not await self._other_jobs_wait()

    async def _larger_shape(self) -> JobSpec | None:
        """The submitted, larger tensor, pipeline, context and expert sizes, if a job that runs with smaller ones could
        go back to them."""
        layout = self._gang.layout
        sizes = [sizes_of_shape(shape.layout) for shape in self._shapes]
        larger = self._shapes[: sizes.index(sizes_of_shape(layout))]
        return await self._fitting(larger) if larger else None

    async def _fitting(self, shapes: Sequence[JobSpec]) -> JobSpec | None:
        """The first of `shapes` that there is room for if this job gives back what it holds."""
        own_given_back: Capacity = with_freed_units(await self._gang.capacity(), self._gang.nodes.values())
        return fitting(shapes, await self._job.wanted_replicas(), own_given_back)

    async def _room(self, spec: JobSpec) -> int:
        return room_for(spec.layout, await self._gang.capacity())

    async def _other_jobs_wait(self) -> bool:
        """Whether jobs wait in the queue, which have a right to free resources; not counting jobs that need other
        resources, nor jobs that the cluster could never hold."""
        waiting = self._queue = await self._job.record.read(partial(jobs.queued, before=self._queue))
        nodes = self._job.cluster.nodes
        has_gpus = await nodes.has_gpus() if waiting else False
        unit = unit_of(self._gang.spec.resources.accelerator, has_gpus)
        alike = [each for each in waiting if unit_of(each.accelerator, has_gpus) == unit]
        if not alike:
            return False
        capacity = await nodes.capacity(unit)
        totals = {node: total for node, (total, _) in capacity.nodes.items()}, capacity.types
        known, self._never_fitting = self._never_fitting, {}
        for each in alike:
            about = (each.updated_at, totals)
            if known.get(each.id) != about and await self._could_ever_fit(each.id, capacity):
                return True
            self._never_fitting[each.id] = about
        return False

    async def _could_ever_fit(self, job_id: str, capacity: Capacity) -> bool:
        """Whether the cluster could hold a job in the queue, if no other job held anything."""
        try:
            spec = stored_spec(await self._job.record.read(partial(jobs.get, job_id=job_id))).spec
        except (JobNotFound, SpecNotUnderstood):  # it is gone, or waits for another release
            return False
        shortage = missing(smallest(spec).layout, capacity)
        return shortage is None or not shortage.can_never_fit

    def _draining(self) -> tuple[int, ...]:
        """The replicas that have ranks on nodes that are being drained."""
        return tuple(self._gang.replicas_of(self._gang.on(self._job.cluster.nodes.draining)))

    def _seconds_left(self) -> float:
        """Seconds that all nodes of ranks remain available; infinite if unknown."""
        leave_by = self._job.cluster.nodes.leave_by
        deadlines = [at for node, at in leave_by.items() if self._gang.on([node])]
        return min(deadlines, default=math.inf) - time.monotonic()

    async def _spare_seconds(self) -> float:
        """Seconds that the job can continue as it is without being too late to save its state."""
        left = self._seconds_left()
        return left if math.isinf(left) else left - await time_to_save(self._job.record)

    async def _leave(self, running: RunningGeneration, draining: tuple[int, ...]) -> Change | WaitInQueue | None:
        """Move these replicas to other nodes, or continue without them if `elastic` allows it, or save the state in
        time and wait in the queue."""
        seconds = max(await self._spare_seconds(), self._seconds_left() / 2)
        standby = await self._start_standby(self._gang.spec, running, draining, seconds)
        return Move(draining, standby) if standby is not None else await self._continue_without(running, draining)

    async def _continue_without(
        self, running: RunningGeneration, draining: tuple[int, ...]
    ) -> Change | WaitInQueue | None:
        if self._is_over(running):
            return None
        left = tuple(replica for replica in range(self._gang.layout.data) if replica not in draining)
        if (staying := staying_replicas(self._sizes, self._gang.layout, left)) is not None:
            return Shrink(staying, f"continued without replicas {list(draining)}: their nodes are being drained")
        elsewhere, spare = await self._fitting(self._shapes), await self._spare_seconds()
        if spare <= 0:  # placing it again would leave its newest state on nodes that may be gone at any moment
            return WaitInQueue(NO_ROOM if elsewhere is None else TOO_SOON)
        if elsewhere is not None:
            return Relocate(elsewhere, "its nodes are being drained")
        if not self._reported_waiting:
            more = f"for {spare:.0f} s; then it saves its state and waits in the queue"
            how_long = "until the end" if math.isinf(spare) else more
            message = f"no other slots are free; the job stays until some are, or {how_long}"
            await self._job.record.event("drain_waiting", message)
        self._reported_waiting = True
        return None

    async def _resize(self, running: RunningGeneration, other_jobs_wait: bool) -> Change | None:
        """Continue with as many replicas as are wanted and fit; jobs in the queue come first."""
        gang, wanted = self._gang, await self._job.wanted_replicas()
        held = gang.layout.data
        size = largest_fitting_size(self._sizes, wanted, held, 0 if other_jobs_wait else await self._room(gang.spec))
        if size is None or size == held:
            if wanted > held:
                message = f"no slots are free for more than {held} replicas; the job keeps waiting"
                if other_jobs_wait:
                    message = f"jobs in the queue come first: the job stays at {held} replicas and keeps waiting"
                if self._reported_size != (wanted, message):
                    self._reported_size = wanted, message
                    await self._job.record.event("resize_waiting", message)
            return None
        self._reported_size = None
        cause = f"resized from {held} to {size} replicas"
        if size < held:
            return Shrink(tuple(range(size)), cause)
        target = resized(gang.spec, size)
        standby = await self._start_standby(target, running, range(held, size))
        return None if standby is None else Grow(target, standby, cause)

    async def _start_standby(
        self, target: JobSpec, running: RunningGeneration, replicas: Sequence[int], seconds: float = math.inf
    ) -> AgentSet | None:
        """Agents for these replicas of `target`, additional ones or replacements, with trainers that are ready within
        `seconds`, while the others train; None if that is impossible, or something happened meanwhile."""
        ready_by = time.monotonic() + seconds
        if await self._room(target) < len(replicas):
            return None
        generation = running.generation + 1
        avoid = await self._job.record.avoided_nodes()
        standby = await self._gang.start_standby(generation, target.layout, replicas, avoid)
        if standby is None:
            return None
        about = await describe(standby.agents)
        ranks = [rank for rank in range(target.layout.world_size) if replica_of(target.layout, rank) in replicas]
        common = CommonOrder(generation, target)
        orders = [order_for(self._job, rank, place, common) for rank, place in zip(ranks, about or [], strict=False)]
        held = self._gang.layout.world_size
        # Nodes on one machine share memory, where files of the ranks' present owners are: standby agents must not touch
        # them.
        orders = [order if order.rank >= held else replace(order, snapshot_folder=None) for order in orders]
        left = min(PREPARE_SECONDS, ready_by - time.monotonic())
        ready = about is not None and await self._while_it_runs(running, _prepared(standby.agents, orders, left))
        if ready and not self._is_over(running):
            return standby
        await self._gang.dismiss(standby)
        return None

    def _is_over(self, running: RunningGeneration) -> bool:
        return running.broken or running.all_ended or self._job.inbox.has(Cancel, *LEAVE)

    async def _while_it_runs(self, running: RunningGeneration, work: Coroutine[Any, Any, bool]) -> bool:
        """The result of `work`; False as soon as something happens to the generation, which comes first."""
        working = asyncio.create_task(work)
        watching = asyncio.create_task(running.wait(self._job.inbox, Cancel, *LEAVE))
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        if working.done():
            return working.result()
        working.cancel()
        return False


async def _prepared(agents: Sequence[AgentClient], orders: Sequence[LaunchOrder], seconds: float) -> bool:
    """Whether every agent has a trainer ready for its order within `seconds`."""
    pairs = zip(agents, orders, strict=True)
    try:
        return all(await within(seconds, asyncio.gather(*(agent.prepare(order) for agent, order in pairs))))
    except AgentError:
        return False
