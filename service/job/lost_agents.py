"""Agents for ranks whose own are lost: in their places, elsewhere, or none where the job may continue without them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from service.cluster.placement import avoidable
from service.cluster.sizes import fitting, room_for, shapes_of, sizes_of
from service.job.context import JobContext
from service.recovery.budgets import PastFailure, avoided_nodes


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
    staying = [replica for replica in range(gang.layout.data) if replica not in replicas]
    job.departing.append(await gang.snapshot_holders_of(replicas))
    await gang.give_up(replicas, lost)
    has_room = room_for(gang.layout, await gang.capacity()) >= len(replicas)
    if has_room and await gang.place_replicas(generation, replicas, avoid):
        return True
    if len(staying) not in sizes_of(job.submitted):
        return False
    gang.shrink(staying)
    await job.record.event("shrunk", f"continues with {len(staying)} replicas: there is no room for more")
    return True


async def place_all(job: JobContext, generation: int, failures: Sequence[PastFailure]) -> None:
    """Place the whole gang, which has no places, for `generation`: in the largest layout that there is room for,
    avoiding nodes that keep failing. Raises NotPlaced."""
    gang = job.gang
    # If there is too little room for any layout, wait for the one that it has.
    spec = fitting(shapes_of(job.submitted), await job.wanted_replicas(), await gang.capacity()) or gang.spec
    await gang.place(generation, spec, avoided_nodes(failures, time.time()))
