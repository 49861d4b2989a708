"""Changes of a gang's size or place, as data, and how they are carried out once all trainers are at rest; and agents
for ranks whose own are lost: in their places, elsewhere, or none where the job may continue without them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manta.service.cluster.placement import avoidable
from manta.service.cluster.placement_groups import NotPlaced
from manta.service.cluster.sizes import fitting, room_for, shapes_of, sizes_of, staying_replicas
from manta.service.job.context import JobContext
from manta.service.job.gang import AgentSet
from manta.service.job.rank_backups import hand_over
from manta.service.recovery.decisions import PastFailure, avoided_nodes
from manta.workers.config import JobSpec


@dataclass(frozen=True)
class Move:
    """Some replicas continue on other nodes."""

    replicas: tuple[int, ...]
    standby: AgentSet
    """Agents with trainers that are ready to take over their ranks."""

    @property
    def cause(self) -> str:
        """Why the next generation begins, in words."""
        return f"replicas {list(self.replicas)} moved: their nodes are being drained"


@dataclass(frozen=True)
class Shrink:
    """Only these replicas continue."""

    staying: tuple[int, ...]
    cause: str


@dataclass(frozen=True)
class Grow:
    """More replicas join."""

    target: JobSpec
    """With the new number of replicas."""
    standby: AgentSet
    """Agents with trainers that are ready to be the additional ranks."""
    cause: str


@dataclass(frozen=True)
class Relocate:
    """The whole gang gives up its places, and continues in other places and another layout."""

    target: JobSpec
    why: str

    @property
    def cause(self) -> str:
        """Why the next generation begins, in words."""
        layout = self.target.layout
        shape = f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}"
        shape += f" x context {layout.context}" if layout.context > 1 else ""
        shape += f", experts over {layout.expert_size} ranks" if layout.expert_size > 1 else ""
        return f"placed again as {shape}: {self.why}"


@dataclass(frozen=True)
class Stay:
    """All trainers come to rest and continue as before: a change had begun, and it is unknown how far it got."""

    cause: str


Change = Move | Shrink | Grow | Relocate | Stay


def standby_of(change: Change) -> AgentSet | None:
    """Agents that were started for the change, and must be ended if it is not made; None if it needs none."""
    return change.standby if isinstance(change, Move | Grow) else None


async def carry_out(change: Change, job: JobContext, generation: int, resting: Mapping[int, int | None]) -> None:
    """Make the change; agents that leave the gang join the job's departing ones. `generation`: the one that has ended;
    `resting`: by rank the committed step that its trainer holds. Raises NotPlaced if there is no place left."""
    gang = job.gang
    match change:
        case Move(replicas, standby):
            agents = zip(gang.ranks_in(replicas), standby.agents, strict=True)
            await hand_over({rank: (gang.by_rank[rank], new) for rank, new in agents}, generation, gang.tag)
            gang.resting_steps = dict(resting)
            gang.departing.append(gang.swap(replicas, standby))
        case Shrink(staying):
            gang.departing.append(gang.shrink(staying))
        case Grow(target, standby):
            gang.grow(target, standby)
        case Relocate(target):
            await _relocate(target, job, generation)
        case Stay():
            gang.resting_steps = dict(resting)


async def _relocate(target: JobSpec, job: JobContext, generation: int) -> None:
    gang = job.gang
    before, avoid = gang.spec, await job.record.avoided_nodes()
    gang.departing.append(await gang.release())
    try:
        await gang.place(generation + 1, target, avoid)
    except NotPlaced:  # others were faster
        still = fitting(shapes_of(job.submitted), await job.wanted_replicas(), await gang.capacity())
        await gang.place(generation + 1, still or before, avoid)


async def replace_lost(job: JobContext, lost: Sequence[int], generation: int, failures: Sequence[PastFailure]) -> bool:
    """Find agents of `generation` for the ranks `lost`: in their own places, or by placing their replicas elsewhere, or
    by continuing without those replicas, if `elastic` allows it. False if the whole gang must be placed again.
    `failures`: all that the job has survived, and this one."""
    gang = job.gang
    if len(lost) == len(gang.agents):
        return False
    avoid = avoidable(gang.layout, await gang.capacity(), avoided_nodes(failures, time.time()))
    if avoid.isdisjoint(gang.nodes.get(rank) for rank in lost) and await gang.replace(generation, lost):
        return True
    replicas = gang.replicas_of(lost)
    left = [replica for replica in range(gang.layout.data) if replica not in replicas]
    gang.departing.append(await gang.snapshot_holders_of(replicas))
    await gang.give_up(replicas, lost)
    has_room = room_for(gang.layout, await gang.capacity()) >= len(replicas)
    if has_room and await gang.place_replicas(generation, replicas, avoid):
        return True
    staying = staying_replicas(sizes_of(job.submitted, gang.layout), gang.layout, left)
    if staying is None:
        return False
    if more := [replica for replica in left if replica not in staying]:
        gang.departing.append(await gang.snapshot_holders_of(more))
        await gang.give_up(more)
    gang.shrink(staying)
    await job.record.event("shrunk", f"continues with {len(staying)} replicas: no slots are free for more")
    return True


async def place_gang(job: JobContext, generation: int, failures: Sequence[PastFailure]) -> None:
    """Place the whole gang, which has no places, for `generation`: in the largest layout that there is room for,
    avoiding nodes that keep failing. Raises NotPlaced."""
    gang = job.gang
    # If there is too little room for any layout, wait for the one that it has.
    spec = fitting(shapes_of(job.submitted), await job.wanted_replicas(), await gang.capacity()) or gang.spec
    await gang.place(generation, spec, avoided_nodes(failures, time.time()))
