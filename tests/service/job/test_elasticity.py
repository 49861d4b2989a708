"""When a job that is smaller than it should be may grow: on a real database and a cluster that exists on paper."""

import asyncio
from types import SimpleNamespace

import pytest

from service.cluster.placement import Capacity
from service.cluster.sizes import resized, shapes_of
from service.job.context import JobContext
from service.job.crew import Crew
from service.job.elasticity import ElasticityPlanner
from service.job.record import JobRecord
from service.states import JobState
from service.store import jobs
from workers.config import JobSpec


class PaperGangs:
    """Two nodes with two slots each; one job has two of them."""

    def __init__(self):
        self.draining = set()

    async def has_gpus(self):
        return False

    async def capacity(self, unit):
        return Capacity(unit, 4, 2, {"one": (2, 0), "two": (2, 2)})


@pytest.fixture
def may_grow(store, submit):
    """Whether a job that runs with one of two replicas sees room for the other."""

    def look(shape=0, **changes):
        job = submit(**{"parallel": {"tensor": 2, "data": 2}, "elastic": {"min_data": 1, "max_data": 2}, **changes})
        submitted, gangs = JobSpec.model_validate(job.spec), PaperGangs()
        store.write(lambda s: _running(s, job.id))
        crew = Crew(gangs, job.id, resized(shapes_of(submitted)[shape], 1))
        crew.nodes = dict.fromkeys(range(crew.layout.world_size), "one")
        site = SimpleNamespace(gangs=gangs)
        context = JobContext(site, submitted, JobRecord(store, job.id), crew)
        return asyncio.run(ElasticityPlanner(context, None).may_change())

    return look


def _running(session, job):
    jobs.transition(session, job, JobState.STARTING)


def test_room_that_nobody_waits_for_is_room_to_grow(may_grow):
    assert may_grow()


def test_room_belongs_to_those_who_wait_in_the_queue(may_grow, submit):
    submit(parallel={"tensor": 2})
    assert not may_grow()


def test_who_waits_for_another_cluster_holds_nobody_back(may_grow, submit):
    submit(parallel={"tensor": 2, "data": 4})
    assert may_grow()


WHOLE = {"parallel": {"tensor": 2, "pipeline": 2}, "elastic": {"reshape": True}}


def test_reshaped_job_goes_back_when_that_fits_together_with_what_it_holds(may_grow):
    assert not may_grow(shape=0, **WHOLE)
    assert may_grow(shape=1, **WHOLE), "it holds two units, and two are free"


def test_reshaped_job_stays_as_it_is_while_others_wait(may_grow, submit):
    submit(parallel={"tensor": 2})
    assert not may_grow(shape=1, **WHOLE)
