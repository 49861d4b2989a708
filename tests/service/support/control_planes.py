"""A control plane on simulated nodes, and what its jobs do there."""

import asyncio

from manta.service.cluster.placement import placement_group_name, seats_of
from manta.service.store import events, jobs
from manta.service.tasks import Lag
from manta.workers.config import JobSpec
from tests.service.support.waiting import reached


class IdleNodeWatch:
    """Says nothing of its own accord."""

    def __init__(self, cluster, lost, draining):
        self.lost, self.draining, self.lag = lost, draining, Lag()

    async def run(self):
        await asyncio.Event().wait()


def train_to_the_end(agent):
    """What a trainer does that nothing happens to."""
    agent.begin()
    if agent.rank == 0:
        agent.commit(*range(1, 11))
    agent.finish(10)


def start_training(agent):
    """What a trainer does that goes on for ever."""
    agent.begin()
    if agent.rank == 0:
        agent.commit(1)


def behave(cluster, how):
    """All trainers that are launched from now on do this."""
    cluster.agents.on_start = lambda agent: setattr(agent, "on_launch", how)


def until(plane, job, *states):
    """The job, once it is in one of these states and, where that is final, has no supervisor any more."""

    def seen():
        row = plane.store.query(jobs.get, job.id)
        return row if row.state in states and (row.state == "RUNNING" or job.id not in plane._owners.by_job) else None

    return plane._call(reached(seen))


def running(plane, cluster, submit, how=start_training, **sections):
    """A job, by default of two ranks, that a control plane has placed and whose trainers run."""
    behave(cluster, how)
    job = submit(**(sections or {"parallel": {"tensor": 2}}))
    plane.submitted(job.id)
    until(plane, job, "RUNNING")
    return job


def left_running(start, cluster, submit):
    """A job of two ranks that trains, and their agents, once the control plane that placed it has stopped."""
    plane = start()
    job = running(plane, cluster, submit)
    plane.stop()
    agents = list(cluster.agents.living.values())
    for_the_next_loop(agents)
    return job, agents


def for_the_next_loop(agents):
    """The next control plane listens to these agents on a loop of its own."""
    for agent in agents:
        agent._changed = asyncio.Event()


def log(store, job):
    listed = store.query(events.page, job.id, limit=1000).items
    return [event.data["to"] if event.type == "state_changed" else event.type for event in listed[1:]]


def hold(cluster, job):
    """Places and agents of a job that nobody looks after."""

    async def placed():
        layout = JobSpec.model_validate(job.spec).layout
        await cluster.groups.acquire(job.id, 1, layout, "manta_slot")
        groups = [placement_group_name(job.id, 1, replica) for replica in range(layout.data)]
        await cluster.agents.start(job.id, 1, seats_of(layout, groups), "manta_slot")

    asyncio.run(placed())


def finish(store, job):
    store.write(lambda s: jobs.request_cancel(s, job.id))
