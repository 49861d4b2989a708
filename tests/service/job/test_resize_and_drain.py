"""When a job that is smaller than it should be may grow: on a real database and a cluster that exists on paper."""

import asyncio

import pytest

from service.cluster.sizes import resized, shapes_of
from service.job.context import JobContext
from service.job.resize_and_drain import ElasticityPlanner
from service.states import JobState
from service.store import jobs
from tests.service.support.fake_cluster import FakeCluster
from workers.config import JobSpec


@pytest.fixture
def may_grow(store, submit, tmp_path):
    """Whether a job that runs with one of two replicas sees room for the other, on two nodes with two slots each."""

    def look(shape=0, **changes):
        job = submit(**{"parallel": {"tensor": 2, "data": 2}, "elastic": {"min_data": 1, "max_data": 2}, **changes})
        submitted, cluster = JobSpec.model_validate(job.spec), FakeCluster(tmp_path, one=2, two=2)
        cluster.nodes.used["one"] = 2
        store.write(lambda s: jobs.transition(s, job.id, JobState.STARTING))
        context = JobContext.of(store, cluster, job)
        context.gang.spec = resized(shapes_of(submitted)[shape], 1)
        context.gang.nodes = dict.fromkeys(range(context.gang.layout.world_size), "one")
        return asyncio.run(ElasticityPlanner(context).may_change())

    return look


def test_room_that_nobody_waits_for_is_room_to_grow(may_grow):
    assert may_grow()


def test_room_belongs_to_those_who_wait_in_the_queue(may_grow, submit):
    submit(parallel={"tensor": 2})
    assert not may_grow()


def test_what_is_free_is_kept_for_who_waits_for_more_than_that(may_grow, submit):
    submit(parallel={"tensor": 2, "data": 2})
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
