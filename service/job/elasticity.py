"""Whether a job should run on other nodes or with another number of replicas than it does, and the preparations for
that, which are made while it trains on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from service.backups.transfer import hand_over
from service.cluster.gangs import NotPlaced
from service.cluster.placement import Capacity, missing, replica_of, unit_of
from service.cluster.sizes import fitting, given_back, resized, room_for, shapes_of, size_within, sizes_of, smallest
from service.job.crew import Crew, Joiners, prepared
from service.job.generation import Gang
from service.job.launch import Launcher
from service.job.record import JobRecord
from service.job.site import Site
from service.states import JobState
from service.store import jobs
from service.store.tables import Job
from workers.config import JobSpec
from workers.messages import Resume

log = logging.getLogger(__name__)

# How often a job that is smaller than it should be looks for room to grow.
ROOM_SECONDS = 2.0


@dataclass(frozen=True)
class Change:
    """A change of the crew that everything is ready for."""

    cause: str
    """In words, once it is done."""
    arrange: Callable[[], Awaitable[Joiners | None]]
    """Makes it, all trainers being at rest; answers who leaves the crew by it."""
    joiners: Joiners | None = None
    """Who is ready to join; to be sent away when the change is not made."""


class Rearranger:
    """Looks after the size and the place of one job."""

    def __init__(
        self,
        site: Site,
        record: JobRecord,
        crew: Crew,
        launcher: Launcher,
        submitted: JobSpec,
        asked: asyncio.Event,
        cancelled: asyncio.Event,
    ):
        """`asked` is set when there may be something to change."""
        self._site, self._record, self._crew, self._launcher = site, record, crew, launcher
        self._sizes, self._shapes = sizes_of(submitted), shapes_of(submitted)
        self._asked, self._cancelled = asked, cancelled
        self._told_waiting = False

    def ask_again(self) -> None:
        """Something has changed: see whether there is more to do than there was."""
        self._told_waiting = False
        self._asked.set()

    async def plan(self, gang: Gang) -> Change | None:
        """What is to be changed, ready to be done; None when nothing can or need be, or something happened to the gang
        meanwhile."""
        self._asked.clear()
        current = await self._record.current_generation()
        if current is None or current.first_step_at is None:
            return None  # ranks may still read what others left; `look_for_room` asks again
        if leaving := self._leaving():
            return await self._leave(gang, leaving)
        larger = None if await self._others_wait() else await self._larger_shape()
        return await self._resize(gang) if larger is None else self._place_anew(gang, larger, "there is room again")

    async def look_for_room(self) -> None:
        """Now and then, see whether the job could run where or with as many replicas as it should: no event tells."""
        while True:
            await asyncio.sleep(ROOM_SECONDS)
            try:
                if await self._may_change():
                    self._asked.set()
            except Exception:  # what is only a look must not end the job: look again in a moment
                log.exception("a look for room for %s failed", self._record.id)

    async def _may_change(self) -> bool:
        """Whether a change of place or size has become possible."""
        if leaving := self._leaving():
            if not self._told_waiting or await self._room(self._crew.spec) >= len(leaving):
                return True
            return fitting(self._shapes, await self._wanted(), await self._without_itself()) is not None
        if len(self._sizes) == len(self._shapes) == 1:
            return False
        wanted, others_wait = await self._wanted(), await self._others_wait()
        if wanted < self._crew.layout.data:
            return True
        if others_wait:
            return False
        grows = wanted > self._crew.layout.data and await self._room(self._crew.spec) > 0
        return grows or await self._larger_shape() is not None

    async def _larger_shape(self) -> JobSpec | None:
        """The layout that a job with smaller tensor and pipeline sizes than submitted could go back to."""
        layout = self._crew.layout
        sizes = [(shape.layout.tensor, shape.layout.pipeline) for shape in self._shapes]
        larger = self._shapes[: sizes.index((layout.tensor, layout.pipeline))]
        return fitting(larger, await self._wanted(), await self._without_itself()) if larger else None

    async def _without_itself(self) -> Capacity:
        """What the cluster would have if this job gave back what it holds."""
        return given_back(await self._crew.capacity(), self._crew.nodes.values())

    async def _wanted(self) -> int:
        return (await self._record.job()).wanted_replicas or self._shapes[0].layout.data

    async def _room(self, spec: JobSpec) -> int:
        return room_for(spec.layout, await self._crew.capacity())

    async def _others_wait(self) -> bool:
        """Whether jobs stand in the queue, to whom what is free belongs; not those that the cluster could never hold,
        who wait for another cluster."""
        waiting: list[Job] = await self._record.read(
            lambda s: [job for job in jobs.unfinished(s) if job.state == JobState.QUEUED]
        )
        has_gpus = await self._site.gangs.has_gpus() if waiting else False
        for job in waiting:
            try:
                spec = JobSpec.model_validate(job.spec)
            except ValidationError:
                continue  # the scheduler fails it when its turn comes
            capacity = await self._site.gangs.capacity(unit_of(spec.resources.accelerator, has_gpus))
            shortage = missing(smallest(spec).layout, capacity)
            if shortage is None or shortage.possible >= shortage.needed:
                return True
        return False

    def _leaving(self) -> list[int]:
        """The replicas that have ranks on nodes that are to be left."""
        return self._crew.replicas_of(self._crew.on(self._site.gangs.draining))

    async def _leave(self, gang: Gang, leaving: list[int]) -> Change | None:
        """Move these replicas to other nodes, else go on without them, where `elastic` allows it."""
        crew, staying = self._crew, [each for each in range(self._crew.layout.data) if each not in leaving]
        joiners = await self._enlist(crew.spec, gang, leaving)
        if joiners is None:
            return await self._go_on_without(gang, leaving, staying)

        async def move() -> Joiners:
            moves = {
                rank: (crew.agents[rank], new) for rank, new in zip(crew.ranks_in(leaving), joiners.agents, strict=True)
            }
            await hand_over(moves, gang.generation, crew.tag)
            crew.memory = dict(gang.resting)
            return crew.swap(leaving, joiners)

        return Change(f"replicas {leaving} moved: their nodes are to be left", move, joiners)

    async def _go_on_without(self, gang: Gang, leaving: list[int], staying: list[int]) -> Change | None:
        if self._is_over(gang):
            return None
        if len(staying) not in self._sizes:
            elsewhere = fitting(self._shapes, await self._wanted(), await self._without_itself())
            if elsewhere is not None:
                return self._place_anew(gang, elsewhere, "its nodes are to be left")
            if not self._told_waiting:
                message = "there is no room elsewhere; it stays until there is, or until the end"
                await self._record.event("drain_waiting", message)
            self._told_waiting = True
            return None

        async def shrink() -> Joiners:
            return self._crew.shrink(staying)

        return Change(f"went on without replicas {leaving}: their nodes are to be left", shrink)

    def _place_anew(self, gang: Gang, target: JobSpec, why: str) -> Change:
        """Give up all places, and go on in others."""
        layout, crew = target.layout, self._crew

        async def place_anew() -> Joiners:
            before, avoid, left = crew.spec, await self._record.avoided_nodes(), await crew.release()
            try:
                await crew.place(gang.generation + 1, target, avoid)
            except NotPlaced:  # others were faster
                still = fitting(self._shapes, await self._wanted(), await crew.capacity())
                await crew.place(gang.generation + 1, still or before, avoid)
            return left

        told = f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}"
        return Change(f"placed anew as {told}: {why}", place_anew)

    async def _resize(self, gang: Gang) -> Change | None:
        """Go on with as many replicas as are wanted and fit."""
        crew, wanted = self._crew, await self._wanted()
        held = crew.layout.data
        size = size_within(self._sizes, wanted, held, await self._room(crew.spec))
        if size is None or size == held:
            if wanted > held:
                message = f"there is no room for more than {held} replicas; it goes on waiting"
                await self._record.event("resize_waiting", message)
            return None
        cause = f"resized from {held} to {size} replicas"
        if size < held:

            async def shrink() -> Joiners:
                return crew.shrink(range(size))

            return Change(cause, shrink)
        target = resized(crew.spec, size)
        joiners = await self._enlist(target, gang, range(held, size))
        if joiners is None:
            return None

        async def grow() -> None:
            crew.grow(target, joiners)

        return Change(cause, grow, joiners)

    async def _enlist(self, target: JobSpec, gang: Gang, replicas: Sequence[int]) -> Joiners | None:
        """Agents for these replicas of `target`, more than there are or in the place of others, with trainers that are
        ready, while the others train on; None when they cannot be had, or something happened meanwhile."""
        if await self._room(target) < len(replicas):
            return None
        generation = gang.generation + 1
        avoid = await self._record.avoided_nodes()
        joiners = await self._crew.enlist(generation, target.layout, replicas, avoid)
        if joiners is None:
            return None
        about = await self._site.gangs.describe(joiners.agents)
        ranks = [rank for rank in range(target.layout.world_size) if replica_of(target.layout, rank) in replicas]
        orders = [
            self._launcher.order(rank, target, generation, Resume(), None, place)
            for rank, place in zip(ranks, about or [], strict=False)
        ]
        held = self._crew.layout.world_size
        # A rank that others have now has files in the shared memory that nodes of one machine share: not yet those.
        orders = [order if order.rank >= held else replace(order, snapshot_folder=None) for order in orders]
        ready = about is not None and await self._while_it_runs(
            gang, prepared(joiners.agents, [order.to_json() for order in orders], self._site.ray.exceptions.RayError)
        )
        if ready and not self._is_over(gang):
            return joiners
        await self._crew.send_away(joiners)
        return None

    def _is_over(self, gang: Gang) -> bool:
        return gang.broken or gang.all_ended or self._cancelled.is_set()

    async def _while_it_runs(self, gang: Gang, work: Coroutine[Any, Any, bool]) -> bool:
        """What `work` answers; False as soon as something happens to the gang, which comes first."""
        working, watching = asyncio.create_task(work), asyncio.create_task(gang.wait(self._cancelled))
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        if working.done():
            return working.result()
        working.cancel()
        return False
