"""Detects a database that is older than what is running: running jobs are then taken over, neither removed nor killed.

Facts decide, not how the database was restored: no agent or checkpoint has a generation above its job's unless the
database has forgotten it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from service.cluster.agents import describe_each
from service.cluster.cluster import Cluster
from service.cluster.placement import job_of
from service.job.record import JobRecord
from service.states import PAUSABLE, JobState
from service.store import restored
from service.store.restored import NewerGang
from service.store.tables import Job
from workers.protocol.messages import AgentDescription

log = logging.getLogger(__name__)


async def catch_up(record: JobRecord, cluster: Cluster, job: Job) -> bool:
    """Update the database with what is running of `job`, which no control plane owns yet; returns whether it knew less.
    A forgotten job that is not running is paused. Raises ClusterUnavailable, ProtocolMismatch."""
    names = [name for name in await cluster.agents.names() if job_of(name) == job.id]
    agents = dict(zip(names, await cluster.agents.find(names), strict=True)) if names else {}
    living = {number: agent for number, agent in enumerate(agents.values()) if agent is not None}
    if not living:
        if job.state in (*PAUSABLE, JobState.PAUSING) and await record.read(lambda s: restored.unsettled(s, job.id)):
            await cluster.end_job(job.id, keep_snapshots=True)
            await record.write(lambda s: restored.pause(s, job.id))
        return False
    described = await describe_each(living)
    await record.store.exceed(max((about.owner_epoch for about in described.values()), default=0))
    gang = newer_gang(job.generation, {names[number]: about for number, about in described.items()})
    if gang is None:
        return False
    log.warning("%s is at generation %d, and the database knows %d", job.id, gang.generation, job.generation)
    return await record.write(lambda s: restored.take_over(s, job.id, gang))


def newer_gang(known: int, about: Mapping[str, AgentDescription]) -> NewerGang | None:
    """The newest gang among agents with these descriptions, by name; None if its generation is not above `known`. It
    does not contain ranks that do not answer."""
    newest = max((each.generation for each in about.values()), default=0)
    members = {name: each for name, each in about.items() if each.generation == newest and each.rank is not None}
    if newest <= known or not members:
        return None
    tensor, pipeline, data = next(iter(members.values())).sizes
    agents = {
        each.rank: {
            "actor": name,
            "node": each.host,
            "device": f"GPU {each.devices[0]}" if each.devices else "cpu",
            "pid": each.trainer_pid,
        }
        for name, each in members.items()
        if each.rank is not None
    }
    return NewerGang(newest, tensor, pipeline, data, agents)
