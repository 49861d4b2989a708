"""While the store of the checkpoints does not answer, what a user asks of a job happens within a known time, and what
is in memory is kept."""

import asyncio
import time

import pytest

from manta.service.job.context import LISTING_SECONDS, FolderReader
from manta.service.store import checkpoints
from manta.workers.checkpoint.catalog import Listing
from manta.workers.protocol.reports import Position, TrainerStatus
from tests.service.support.supervised_job import save_checkpoint
from tests.service.support.virtual_time import in_virtual_time

AT_ONCE = 3.0
"""Seconds in which a job in memory is on its way again."""


@pytest.fixture
def job(two_replicas, cluster):
    return two_replicas(cluster, elastic={"min_data": 1, "max_data": 2})


@pytest.fixture
def while_it_hangs(monkeypatch, job):
    """Runs a test's coroutine, in virtual time, once a job has committed four steps and the save of the fourth, like
    every look at the folder, gets no answer."""

    async def listed(self, folder, seconds=LISTING_SECONDS, job=None):
        await asyncio.sleep(seconds)
        return Listing(folder, problem=f"the folder {folder} cannot be listed: no answer in {seconds:g} s")

    async def hang():
        await job.train(1, 2, 3, 4)
        save_checkpoint(job, 2)
        await job.store.write_async(lambda s: checkpoints.begin(s, job.id, 1, 4, "/store/4"))
        for agent in job.ranks:
            agent.status = TrainerStatus(7, record=Position(7, 4, "checkpoint", commits=4))

    def run(body):
        async def whole():
            await hang()
            with monkeypatch.context() as patch:  # undone first: what it replaces belongs to the virtual time
                patch.setattr(FolderReader, "list", listed)
                await body()

        in_virtual_time(monkeypatch, whole)

    return run


async def seconds(work):
    """How long it takes."""
    began = time.monotonic()
    await work
    return time.monotonic() - began


async def die(job):
    """All that is in memory is lost, and all trainers."""
    job.cluster.agents.memory.clear()
    for agent in job.ranks:
        agent.die()
    await job.waited(2)
    assert job.row.reason == "held" and "no answer in 20 s" in job.row.message


def test_job_that_trains_is_cancelled(job, while_it_hangs):
    async def body():
        job.cancel()
        assert await seconds(job.task) <= LISTING_SECONDS + AT_ONCE
        assert job.row.state == "CANCELLED" and job.cluster.nothing_held

    while_it_hangs(body)


def test_job_that_trains_is_paused_with_its_state_in_memory_and_resumed_from_there(job, while_it_hangs):
    async def body():
        job.pause()
        assert await seconds(job.task) <= 90.0, "six times what a save needs, and a look at the folder"
        assert (job.row.state, job.log[-1]) == ("PAUSED", "PAUSED")
        await job.resume()
        assert await seconds(job.watched(2)) <= LISTING_SECONDS + AT_ONCE
        assert job.generations[1] == ("resumed by the user", "snapshot", 4)

    while_it_hangs(body)


def test_job_that_trains_is_resized_and_repaired_from_memory(job, while_it_hangs):
    async def body():
        job.resize(1)
        assert await seconds(job.watched(2)) <= AT_ONCE
        assert job.generations[1] == ("resized from 2 to 1 replicas", "memory", 4)
        await job.commit(5)
        job.ranks[1].die()
        job.ranks[0].rest_by_itself(5)
        assert await seconds(job.watched(3)) <= AT_ONCE
        assert job.generations[2][1:] == ("snapshot", 5)

    while_it_hangs(body)


@pytest.mark.parametrize(("how", "state"), [("cancel", "CANCELLED"), ("pause", "PAUSED")])
def test_job_that_is_held_leaves(job, while_it_hangs, how, state):
    async def body():
        await die(job)
        job.resize(1)  # is carried out once the job goes on
        getattr(job, how)()
        assert await seconds(job.task) <= 2 * LISTING_SECONDS + AT_ONCE
        assert job.row.state == state

    while_it_hangs(body)
